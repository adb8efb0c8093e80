"""`%engine load`, `config` and `logs -f`, and the help of everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines import logs
from nbengine.client.engines.logs import follow_log
from nbengine.config import EngineArgs
from nbengine.errors import EngineStartError, ModelNotFoundError
from nbengine.magics.engines.logs import SHOWN_CHARACTERS, SHOWN_LINES, RollingLines
from nbengine.magics.extension import Extension
from tests.unit.magics.conftest import FakeBackend, FakeClient, RecordingPublisher

Capture = pytest.CaptureFixture[str]


def test_load_keeps_the_name_and_what_is_not_about_the_model(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell(
        "%engine start first --name box --tp 2 --max-model-len 64 --seed 3 --block-size 32"
    ).raise_error()
    old = backend.clients["box"]
    capsys.readouterr()
    shell.run_cell("%engine load second --block-size 16 -o llm").raise_error()
    printed = capsys.readouterr().out
    assert backend.started[-1] == {"model": "second", "tensor_parallel_size": 2, "seed": 3, "block_size": 16}
    assert old.calls == ["shutdown drain=False"]
    assert "max_model_len=64 was for the model before" in printed
    assert "engine 'box' stopped in" in printed
    assert "came back" in printed
    assert "engine 'box' is ready" in printed
    assert shell.user_ns["llm"] is backend.clients["box"] is not old
    shell.run_cell("%generate hi").raise_error()
    assert len(backend.clients["box"].requests) == 1


def test_a_model_that_cannot_be_found_leaves_the_engine_alone(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient
) -> None:
    def missing() -> None:
        raise ModelNotFoundError("no model 'gone'")

    backend.on_prepare = missing
    with pytest.raises(UsageError, match="%engine load: no model 'gone'"):
        shell.run_cell("%engine load gone").raise_error()
    assert engine.calls == []
    with pytest.raises(UsageError, match="max_num_seqs must be at least 1"):
        shell.run_cell("%engine load other --max-num-seqs 0").raise_error()
    assert engine.calls == []


def test_an_engine_that_does_not_start_gives_way_to_the_one_before(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    def fail() -> None:
        if backend.started[-1]["model"] == "large":
            raise EngineStartError("it does not fit")

    backend.on_start = fail
    with pytest.raises(EngineStartError, match="it does not fit"):
        shell.run_cell("%engine load large").raise_error()
    printed = capsys.readouterr().out
    assert "large did not start; random-tiny is started again" in printed
    assert [arguments["model"] for arguments in backend.started] == ["random-tiny", "large", "random-tiny"]
    assert backend.clients["random-tiny"] is not engine
    shell.run_cell("%generate hi").raise_error()

    def fail_always() -> None:
        raise EngineStartError("no memory")

    backend.on_start = fail_always
    with pytest.raises(EngineStartError):
        shell.run_cell("%engine load large").raise_error()
    assert (
        "engine 'random-tiny' is gone: random-tiny did not start again, either: no memory"
        in capsys.readouterr().out
    )
    with pytest.raises(UsageError, match="no engine is running here"):
        shell.run_cell("%generate hi").raise_error()


def test_an_interrupted_load_says_how_to_come_back(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    backend.on_start = interrupt
    with pytest.raises(
        KeyboardInterrupt, match="`%engine start random-tiny --name random-tiny` starts the previous one"
    ):
        shell.run_cell("%engine load large").raise_error()
    assert len(backend.started) == 2


def test_config_shows_every_argument_and_where_it_comes_from(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine restart --max-num-seqs 8 --kv-cache-memory-bytes 1MiB").raise_error()
    capsys.readouterr()
    shell.run_cell("%engine config --json").raise_error()
    shown = json.loads(capsys.readouterr().out)
    assert shown["engine"] == "random-tiny"
    assert list(shown["arguments"]) == [argument.name for argument in fields(EngineArgs)]
    assert shown["arguments"]["max_num_seqs"] == {"value": 8, "source": "given"}
    assert shown["arguments"]["model"] == {"value": "random-tiny", "source": "given"}
    assert shown["arguments"]["dtype"] == {"value": "float32", "source": "chosen"}
    assert shown["arguments"]["max_model_len"] == {"value": 1024, "source": "chosen"}
    assert shown["arguments"]["num_gpu_blocks_override"] == {"value": 64, "source": "chosen"}
    assert shown["arguments"]["max_num_batched_tokens"] == {"value": 2048, "source": "default"}
    shell.run_cell("%engine config random-tiny").raise_error()
    table = capsys.readouterr().out
    assert "kv_cache_memory_bytes" in table
    assert "1,048,576 (1 MiB)" in table
    assert len(table.splitlines()) == len(fields(EngineArgs)) + 1


def sources(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    shell.run_cell("%engine config --json").raise_error()
    shown = json.loads(capsys.readouterr().out)["arguments"]
    return {
        name: entry["source"] for name, entry in shown.items() if entry["source"] not in ("default", "chosen")
    }


def test_config_tells_what_was_given_from_what_is_default(
    shell: InteractiveShell, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%engine start --seed 0 --max-num-seqs 8").raise_error()
    assert sources(shell, capsys) == {"seed": "given", "max_num_seqs": "given"}
    shell.run_cell("%engine restart --block-size 8").raise_error()
    assert sources(shell, capsys) == {"seed": "given", "max_num_seqs": "given", "block_size": "given"}
    # A restart of the kernel: what differs from the defaults is all that is known, and that it is no default.
    name = next(iter(backend.clients))
    shell.run_cell(f"%engine detach {name}\n%engine attach {name}").raise_error()
    assert sources(shell, capsys) == {"max_num_seqs": "given", "block_size": "given"}
    shell.run_cell("%engine load random-tiny").raise_error()
    assert sources(shell, capsys) == {"model": "given", "max_num_seqs": "given", "block_size": "given"}


def test_config_tells_the_model_that_the_notebook_is_configured_for(
    shell: InteractiveShell, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%config NBEngine.model = 'random-tiny'\n%engine start").raise_error()
    assert sources(shell, capsys) == {"model": "configured"}
    shell.run_cell("%engine restart").raise_error()
    assert sources(shell, capsys) == {"model": "configured"}
    shell.run_cell("%engine restart random-tiny").raise_error()
    assert sources(shell, capsys) == {"model": "given"}


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of pieces that a followed log gets; the user interrupts behind the last one."""
    pieces: list[str] = []

    def follow(path: Path, info: object, start: int) -> Iterator[str]:
        yield from pieces
        raise KeyboardInterrupt

    monkeypatch.setattr("nbengine.magics.engines.logs.follow_log", follow)
    return pieces


def test_a_followed_log_is_one_output_until_an_interrupt(
    kernel_shell: InteractiveShell, engine: FakeClient, feed: list[str], capsys: Capture
) -> None:
    feed += ["line fo", "ur <b>\n", "half\rfive\n"]
    kernel_shell.run_cell("%engine logs -f -n 1").raise_error()
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    (shown,) = publisher.outputs()
    assert shown["text/plain"] == "line three\nline four <b>\nfive"
    assert "line four &lt;b&gt;" in shown["text/html"]
    assert [data["text/plain"].splitlines()[-1] for _, data, _ in publisher.messages] == [
        "line three",
        "line fo",
        "line four <b>",
        "five",
    ]
    assert capsys.readouterr().out == "not followed any more\n"


def test_a_terminal_prints_what_is_added(
    shell: InteractiveShell, engine: FakeClient, feed: list[str], capsys: Capture
) -> None:
    feed += ["line four\n"]
    shell.run_cell("%engine logs --follow -n 1 --worker 0").raise_error()
    assert capsys.readouterr().out == "line three\nline four\nnot followed any more\n"


def test_a_followed_log_takes_no_more_than_its_place() -> None:
    lines = RollingLines()
    for number in range(1000):
        lines.add(f"{number} {'x' * 10_000}")
        lines.add("\n")
    shown = lines.bundle()["text/plain"].split("\n")
    assert len(shown) == SHOWN_LINES
    assert shown[-1].startswith("999 xxx")
    assert max(map(len, shown)) == SHOWN_CHARACTERS
    assert len(lines._lines) == SHOWN_LINES


def test_following_ends_with_the_engine_and_pauses_between_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    seen: list[str] = []

    class Engine:
        host_alive = True

    def add(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    def pause(seconds: float) -> None:
        assert seconds == logs.FOLLOW_INTERVAL
        if not seen:
            add("1\n")
        seen.append("pause")

    monkeypatch.setattr(logs.time, "sleep", pause)
    for text in follow_log(path, Engine(), len("before\n")):  # type: ignore[arg-type]
        seen.append(text)
        if text == "3\n":
            Engine.host_alive = False
        else:
            add(f"{int(text) + 1}\n")
    assert seen == ["pause", "1\n", "pause", "2\n", "pause", "3\n", "pause"]


def test_every_command_has_help_in_three_ways(shell: InteractiveShell, capsys: Capture) -> None:
    for command in Extension.loaded[shell].engine.command_names:
        shell.run_cell(f"%engine {command} -h").raise_error()
        asked = capsys.readouterr().out
        shell.run_cell(f"%engine {command}?").raise_error()
        questioned = capsys.readouterr().out
        shell.run_cell(f"%engine help {command}").raise_error()
        assert asked == questioned == capsys.readouterr().out
        assert f"%engine {command}" in asked or command == "help"


@pytest.mark.parametrize("name", ["engine", "generate", "chat", "dashboard"])
def test_a_question_mark_shows_what_help_shows(shell: InteractiveShell, capsys: Capture, name: str) -> None:
    is_line = name in ("engine", "dashboard")
    sign = "%" if is_line else "%%"
    shell.run_cell(f"%{name} -h" if is_line else f"%%{name} -h\nbody\n").raise_error()
    helped = capsys.readouterr().out
    assert "Traceback" not in helped
    shown: list[str] = []

    def page(shell: object, data: dict[str, str], **_: object) -> None:
        shown.append(data["text/plain"])

    shell.set_hook("show_in_pager", page)
    for question in (f"{sign}{name}?", f"%{name}?"):
        shell.run_cell(question).raise_error()
        lines = [line.strip() for line in shown.pop().splitlines()]
        assert all(line.strip() in lines for line in helped.splitlines())


def test_a_joined_engine_is_restarted_with_its_own_model_not_with_the_notebooks(
    shell: InteractiveShell, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start smollm2-135m --name joined").raise_error()
    shell.run_cell("%engine detach joined\n%config NBEngine.model = 'random-tiny'").raise_error()
    shell.run_cell("%engine attach joined\n%engine restart --seed 1").raise_error()
    assert backend.clients["joined"].config.model.model == "smollm2-135m"


def test_config_of_an_engine_that_a_start_has_joined_has_what_that_line_gave(
    shell: InteractiveShell, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%engine start random-tiny --seed 0").raise_error()
    shell.run_cell("%engine detach random-tiny\n%config NBEngine.model = 'random-tiny'").raise_error()
    shell.run_cell("%engine start --seed 0").raise_error()
    assert backend.attached == ["random-tiny"]
    assert sources(shell, capsys) == {"model": "configured", "seed": "given"}
