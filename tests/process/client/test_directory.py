"""Listing, stopping and reaping engines, from Python and from the shell."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from engine_processes import is_running, kill_all
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine import AsyncLLM
from nbengine.cli import main
from nbengine.client.engines.directory import (
    clear_dead_engines,
    count_clients,
    list_engines,
    reap,
    stop_engine,
)
from nbengine.client.engines.processes import kill_session, session_processes
from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.liveness import (
    ProcessIdentity,
    identity_of,
    is_alive,
    lasting_machine_id,
    machine_id,
    this_process,
)
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    log_dir,
    write_connection,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.logs import log_end, worker_log_path

pytestmark = pytest.mark.usefixtures("short_grace")

StartAsync = Callable[..., AsyncLLM]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for processes that these tests have stopped."""
    monkeypatch.setattr("nbengine.client.engines.directory.ORPHAN_GRACE", 0.2)


def unwatched(start_async: StartAsync, name: str, **options: object) -> ConnectionInfo:
    """An engine that this process is not attached to any more."""
    llm = start_async(name=name, bound=False, **options)
    llm.detach()
    info = llm.connection
    wait_for(lambda: count_clients(info) == 0, "the end of the client's sockets")
    wait_for(lambda: "detached" in Path(info.log_path).read_text(), "the end of the lease")
    return info


def test_ps_shows_state_clients_and_memory(
    start_async: StartAsync, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = start_async(name="shown")
    (listing,) = list_engines()
    assert (listing.info.name, listing.state, listing.num_clients) == ("shown", "ready", 1)
    assert listing.pids == [llm.connection.host_pid, llm.ready.pid]
    assert listing.memory_bytes > 10 << 20
    assert main(["ps"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATE", "PID", "CLIENTS", "PROCESSES", "MEMORY", "UP", "MODEL"]
    assert row.split()[:5] == ["shown", "ready", str(llm.connection.host_pid), "1", "2"]
    assert row.endswith("random-tiny")


def test_an_engine_is_stopped_by_name(start_async: StartAsync, capsys: pytest.CaptureFixture[str]) -> None:
    info = unwatched(start_async, "named")
    assert main(["stop", "named"]) == 0
    assert capsys.readouterr().out == "named has ended\n"
    assert not session_processes(info)
    assert not Path(info.run_dir).exists()
    assert main(["stop", "named"]) == 1
    assert "no engine is called 'named'; running: none" in capsys.readouterr().err


def test_an_engine_that_does_not_react_is_made_to_end(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.client.engines.directory.TERMINATE_TIMEOUT", 0.3)
    info = unwatched(start_async, "stuck")
    stop(info.host_pid)
    stop_engine(info, timeout=0.3)
    assert not session_processes(info)
    assert not connection_file("stuck").exists()


def test_reaping_removes_what_a_killed_engine_left_and_spares_the_living(
    start_async: StartAsync, capsys: pytest.CaptureFixture[str]
) -> None:
    living = start_async(name="living")
    info = unwatched(start_async, "killed")
    kill_all(info)
    assert Path(info.run_dir).is_dir()
    assert {listing.info.name: listing.state for listing in list_engines()} == {
        "living": "ready",
        "killed": "dead",
    }
    assert main(["reap"]) == 0
    assert capsys.readouterr().out == "removed what was left of killed\n"
    assert not Path(info.run_dir).exists()
    assert not connection_file("killed").exists()
    assert living.call_utility_blocking("ping", timeout=60) == "pong"
    assert main(["reap"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


@pytest.fixture
def leave_behind() -> Iterator[Callable[[str], tuple[ProcessIdentity, psutil.Process]]]:
    """Start a process with a title in a session whose leader has ended: the leader, the process."""
    left: list[psutil.Process] = []

    def start(title: str) -> tuple[ProcessIdentity, psutil.Process]:
        script = f"(exec -a '{title}' sleep 60) >/dev/null & echo $!; read"
        # By its log the tests of other processes know that it is none of theirs.
        with (
            (log_dir() / "left.log").open("w") as log,
            subprocess.Popen(
                ["bash", "-c", script],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            ) as popen,
        ):
            leader = identity_of(popen.pid)
            assert leader is not None
            left.append(psutil.Process(int(popen.stdout.readline())))
        wait_for(lambda: is_titled(left[-1], title), "the title")
        return leader, left[-1]

    yield start
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_reaping_kills_a_core_that_could_not_follow_its_host(leave_behind) -> None:
    leader, core = leave_behind("nbengine: core 0 orphaned")
    directories = EngineDirectories.make()
    info = ConnectionInfo(
        name="orphaned",
        run_dir=directories.run_dir,
        tensor_dir=directories.tensor_dir,
        marker=directories.marker,
        log_path="",
        host_pid=leader.pid,
        host_started=leader.started,
        config=EngineConfig(),
    )
    write_connection(info)
    report = reap()
    assert report.dead == ["orphaned"]
    assert report.killed_pids == [core.pid]
    assert not is_running(core)
    assert not Path(info.run_dir).exists()


@pytest.mark.parametrize("written_at", [0, 2**32], ids=["long ago", "in the future"])
def test_a_directory_that_no_connection_file_names_goes_with_its_engine_whatever_its_age(
    start_async: StartAsync, written_at: int
) -> None:
    info = unwatched(start_async, "fileless")
    connection_file("fileless").unlink()
    os.utime(info.run_dir, (written_at, written_at))
    assert reap().removed_dirs == []
    kill_all(info)
    assert reap().removed_dirs == [info.run_dir]


def test_a_start_clears_away_such_a_directory_when_nobody_lives_in_it(start_async: StartAsync) -> None:
    info = unwatched(start_async, "fileless")
    connection_file("fileless").unlink()
    clear_dead_engines()
    assert Path(info.run_dir).is_dir()
    kill_all(info)
    clear_dead_engines()
    assert not Path(info.run_dir).exists()
    assert not Path(info.tensor_dir).exists()


def test_a_core_that_was_stopped_when_its_host_died_does_not_outlive_a_reaping(
    start_async: StartAsync,
) -> None:
    info = unwatched(start_async, "stopped")
    core = session_processes(info)[1]
    stop(core.pid)
    os.kill(info.host_pid, signal.SIGKILL)
    wait_for(lambda: not info.host_alive, "the end of the host")
    # The kernel wakes the core if it was stopped in time, and it ends by itself then.
    reap()
    wait_for(lambda: not session_processes(info), "the end of the core")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of its files")
    wait_for(lambda: not connection_file("stopped").exists(), "the end of the connection file")
    assert not is_alive(core)
    assert list_engines() == []
    assert reap().dead == []


@pytest.mark.parametrize("is_emptied", [True, False], ids=["emptied", "kept"])
def test_an_engine_from_before_a_boot_of_this_machine_is_dead_and_in_nobodys_way(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch, is_emptied: bool
) -> None:
    info = unwatched(start_async, "before")
    assert info.lasting_machine == lasting_machine_id()
    kill_all(info)
    # Its pid is that of a process that lives, and happens to have been started as long after the boot.
    monkeypatch.setattr("nbengine.ipc.liveness.lasting_machine_id", lambda: "this")
    alive = this_process()
    info = msgspec.structs.replace(
        info,
        machine=f"{uuid.uuid4()}:4026531836",
        lasting_machine="this",
        host_pid=alive.pid,
        host_started=alive.started,
    )
    write_connection(info)
    if is_emptied:
        # As a boot does with a temporary directory.
        for directory in (info.run_dir, info.tensor_dir):
            shutil.rmtree(directory)
    else:
        write_engine_file(info)
    assert [(listing.info.name, listing.state, listing.pids) for listing in list_engines()] == [
        ("before", "dead", [])
    ]
    with pytest.raises(NBEngineError, match="engine before is dead"):
        AsyncLLM.attach("before")
    assert kill_session(info) == []
    if is_emptied:
        assert reap().dead == ["before"]
    again = start_async(name="before")
    assert again.call_utility_blocking("ping", timeout=60) == "pong"
    assert not Path(info.run_dir).exists()
    assert not Path(info.tensor_dir).exists()


@pytest.mark.parametrize("title", ["nbengine: worker TP0 gone", "nbengine: core 0 gone"])
def test_a_process_that_has_outlived_its_engine_is_found_without_any_file(leave_behind, title: str) -> None:
    _, process = leave_behind(title)
    assert process.pid in reap().killed_pids
    assert not is_running(process)


def is_titled(process: psutil.Process, title: str) -> bool:
    return " ".join(process.cmdline()).startswith(title)


def test_reaping_ends_engines_that_nobody_is_attached_to_only_when_asked(start_async: StartAsync) -> None:
    attached = start_async(name="attached", bound=False)
    lonely = unwatched(start_async, "lonely")
    assert reap().ended == []
    assert lonely.host_alive
    assert reap(end_unattached=True).ended == ["lonely"]
    assert not lonely.host_alive
    assert attached.connection.host_alive


def test_directories_of_others_and_of_starting_engines_are_left_alone(private_socket_dir: Path) -> None:
    made = EngineDirectories.make()
    young, foreign = Path(made.run_dir), private_socket_dir / "nbe-not-ours"
    foreign.mkdir()
    (young / "engine.json").write_text("{}")
    assert reap().removed_dirs == []
    assert young.exists()
    assert foreign.exists()
    foreign.rmdir()
    made.remove()
    assert not young.exists()


def test_a_directory_of_a_starting_engine_is_kept_whatever_its_age_until_nobody_starts_it() -> None:
    made = EngineDirectories.make()
    starting = [sys.executable, "-c", "import signal; signal.pause()", made.run_dir]
    with subprocess.Popen(["sleep", "60"]) as launcher, subprocess.Popen(starting) as host:
        info = ConnectionInfo(
            name="starting",
            run_dir=made.run_dir,
            tensor_dir=made.tensor_dir,
            marker=made.marker,
            log_path="",
            host_pid=0,
            host_started=0,
            config=EngineConfig(),
            machine=machine_id(),
            launcher=identity_of(launcher.pid) or ProcessIdentity(0, 0),
        )
        write_engine_file(info)
        for ended in (None, launcher):
            if ended is not None:
                ended.kill()
                ended.wait()
            for written_at in (0, 2**32):
                os.utime(made.run_dir, (written_at, written_at))
                assert reap().removed_dirs == []
        host.kill()
    assert reap().removed_dirs == [made.run_dir]


def test_a_reused_session_number_protects_its_new_owner(start_async: StartAsync) -> None:
    import msgspec

    llm = start_async(name="owner")
    stale = msgspec.structs.replace(
        llm.connection,
        name="stale",
        host_started=llm.connection.host_started - 1,
        run_dir="/tmp/nbe-stale000",
    )
    write_connection(stale)
    assert reap().dead == ["stale"]
    assert llm.call_utility_blocking("ping", timeout=60) == "pong"


def test_logs_show_the_end_of_the_log_and_follow_it(
    start_async: StartAsync, capsys: pytest.CaptureFixture[str]
) -> None:
    info = unwatched(start_async, "logged")
    assert main(["logs", "logged", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "client 1 detached" in shown
    assert len(shown.splitlines()) == 2
    follower = threading.Thread(target=main, args=(["logs", "-f", "logged"],))
    follower.start()
    wait_for(lambda: "client 1 detached" in capsys.readouterr().out, "the end of the log so far")
    stop_engine(info)
    follower.join(60)
    assert not follower.is_alive()
    assert "the engine was shut down" in capsys.readouterr().out
    assert main(["logs", "logged"]) == 0
    assert "the engine was shut down" in capsys.readouterr().out


def test_what_is_written_while_the_end_of_a_log_is_shown_follows(
    start_async: StartAsync, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = unwatched(start_async, "logged")

    def write_more(*arguments: object) -> str:
        stop_engine(info)
        return log_end(*arguments)

    monkeypatch.setattr("nbengine.runtime.logs.log_end", write_more)
    assert main(["logs", "-f", "logged"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("client 1 detached") == shown.count("the engine was shut down") == 1


def test_logs_show_and_follow_the_log_of_a_worker(
    start_async: StartAsync, capsys: pytest.CaptureFixture[str]
) -> None:
    info = unwatched(start_async, "logged")
    worker_log_path(info.log_path, 0).write_text("one\ntwo\nthree\n")
    assert main(["logs", "logged", "--rank", "0", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"
    assert main(["logs", "logged", "--rank", "1"]) == 2
    assert "rank must be 0, got 1" in capsys.readouterr().err
    follower = threading.Thread(target=main, args=(["logs", "-f", "logged", "--rank", "0"],))
    follower.start()
    stop_engine(info)
    follower.join(60)
    assert not follower.is_alive()
    assert "the engine was shut down" not in capsys.readouterr().out


def test_fetch_puts_a_model_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path))
    assert main(["fetch", "random-tiny"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert list(tmp_path.rglob("model.safetensors"))
    assert main(["fetch", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err
