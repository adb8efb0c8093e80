"""`%engine serve`, with servers that only wait: which one a line finds or starts, and what ends it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.liveness import identity_of, is_alive
from nbengine.ipc.private import write_own
from nbengine.magics.engines import serving
from nbengine.magics.extension import Extension
from nbengine.runtime.connection import ConnectionInfo
from nbengine.server.records import ServerRecord, servers_of, url_of
from nbengine.server.settings import ServerSettings
from tests.unit.magics.conftest import FakeBackend, FakeClient

Capture = pytest.CaptureFixture[str]
KEY = "a-very-secret-key"
FREE_PORT = 50_000


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerSettings]]:
    """Replace servers by processes that wait for their end; the list has the settings of each."""
    given: list[ServerSettings] = []
    children: list[subprocess.Popen[bytes]] = []

    def start(info: ConnectionInfo, settings: ServerSettings) -> ServerRecord:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        process = identity_of(child.pid)
        assert process is not None
        url = url_of(settings.host, settings.port or FREE_PORT + len(given))
        record = ServerRecord(url, (info.name,), bool(settings.api_keys), child.pid, process.started)
        write_own(Path(info.run_dir, f"server-{child.pid}.json"), msgspec.json.encode(record))
        given.append(settings)
        children.append(child)
        return record

    monkeypatch.setattr(serving, "start_server", start)
    yield given
    for child in children:
        child.kill()
        child.wait()


def said(shell: InteractiveShell, capsys: Capture, line: str) -> str:
    shell.run_cell(line).raise_error()
    return capsys.readouterr().out.strip()


def refused(shell: InteractiveShell, capsys: Capture, line: str) -> str:
    assert isinstance(shell.run_cell(line).error_in_exec, UsageError)
    return capsys.readouterr().err


def test_a_line_starts_a_server_once_and_says_where_it_is(
    shell: InteractiveShell, engine: FakeClient, started: list[ServerSettings], capsys: Capture
) -> None:
    where = f"random-tiny at http://127.0.0.1:{FREE_PORT}/v1 for this machine only, without an API key"
    line = "%engine serve --port 0 -o server"
    assert said(shell, capsys, line) == (
        f"engine 'random-tiny' is served as {where}; `%engine serve --stop` ends that"
    )
    assert "is served already as" in said(shell, capsys, line)
    assert started == [ServerSettings(port=0)]
    (record,) = servers_of(engine.connection)
    assert shell.user_ns["server"] == record
    status = said(shell, capsys, "%engine status")
    assert re.search(rf"^server +{re.escape(where)}$", status, re.MULTILINE)


def test_other_settings_are_another_server(
    shell: InteractiveShell, engine: FakeClient, started: list[ServerSettings], capsys: Capture
) -> None:
    shell.user_ns["key"] = KEY
    said(shell, capsys, "%engine serve --port 0")
    told = said(shell, capsys, "%engine serve random-tiny --port 0 --api-key {key} --served-model-name mine")
    assert "with an API key" in told
    assert KEY not in told
    assert started[1:] == [ServerSettings(port=0, api_keys=(KEY,), served_model_names=("mine",))]
    assert len(servers_of(engine.connection)) == 2
    assert KEY not in said(shell, capsys, "%engine status")


def test_after_a_restart_of_the_kernel_the_line_finds_its_server_by_the_port(
    shell: InteractiveShell, engine: FakeClient, started: list[ServerSettings], capsys: Capture
) -> None:
    said(shell, capsys, "%engine serve")
    command = serving.ServeCommand(shell, Extension.loaded[shell].session)
    command.serve([])
    assert "is served already as random-tiny at http://127.0.0.1:8000/v1" in capsys.readouterr().out
    # One that asks for a key is not what this line asks for.
    command.serve(["--api-key", KEY])
    assert "is served as" in capsys.readouterr().out


def test_stop_ends_the_servers_and_not_the_engine(
    shell: InteractiveShell, engine: FakeClient, started: list[ServerSettings], capsys: Capture
) -> None:
    said(shell, capsys, "%engine serve --port 0")
    said(shell, capsys, "%engine serve --port 8123")
    records = servers_of(engine.connection)
    told = said(shell, capsys, "%engine serve --stop")
    assert told.splitlines() == [
        f"the server at {record.url} has ended; engine 'random-tiny' goes on" for record in records
    ]
    assert not any(is_alive(record.process) for record in records)
    assert engine.calls == []
    assert "engine 'random-tiny' has no server" in refused(shell, capsys, "%engine serve --stop")
    said(shell, capsys, "%engine serve --port 0")
    assert len(started) == 3


def test_the_end_of_an_engine_is_the_end_of_its_servers(
    shell: InteractiveShell,
    engine: FakeClient,
    backend: FakeBackend,
    started: list[ServerSettings],
    capsys: Capture,
) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    for name in ("second", "random-tiny"):
        said(shell, capsys, f"%engine serve {name} --port 0")
    (record,) = servers_of(engine.connection)
    (other,) = servers_of(backend.clients["second"].connection)
    told = said(shell, capsys, "%engine stop random-tiny")
    assert told.startswith(f"the server at {record.url} has ended, too\nengine 'random-tiny' stopped")
    assert not is_alive(record.process)
    assert is_alive(other.process)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%engine serve nobody", "there is no engine 'nobody'"),
        ("%engine serve --port 70000", "port must be 0 (any free one) to 65535"),
        ("%engine serve --host 0.0.0.0", "unless there is an API key"),
        ("%engine serve --prot 0", "did you mean --port?"),
        ("%engine serve -o 1-x", "'1-x' is not a variable name"),
    ],
)
def test_what_is_not_possible_is_one_line(
    shell: InteractiveShell,
    engine: FakeClient,
    started: list[ServerSettings],
    capsys: Capture,
    line: str,
    message: str,
) -> None:
    assert message in refused(shell, capsys, line)
    assert not started


def test_without_its_packages_it_says_what_to_install(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'nbengine[server]'" in refused(shell, capsys, "%engine serve --port 0")
    assert servers_of(engine.connection) == []
