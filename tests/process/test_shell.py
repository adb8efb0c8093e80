"""`nbengine start`, `attach` and `chat`: engines that stay, talks that are interrupted, and what a shell gets back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import SUPPORT_PATH, wait_for

from nbengine.cli import main
from nbengine.client.engines.directory import find_engine, list_engines, stop_engine

MAIN = "import sys; from nbengine.cli import main; sys.exit(main(sys.argv[1:]))"
Shell = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shell(no_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """Commands with pipes; all are gone in the end, and so are their engines."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    begun: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-u", "-c", MAIN, *arguments]
        begun.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return begun[-1]

    yield run
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for engine in list_engines():
        stop_engine(engine.info)


@pytest.mark.timeout(300)
def test_an_engine_stays_is_watched_and_talked_to_until_it_is_stopped(shell: Shell, tmp_path: Path) -> None:
    started = shell("start", "random-tiny", "--name", "mine", "--num-blocks", "256")
    said, _ = started.communicate()
    assert started.returncode == 0
    assert said.startswith("engine 'mine' is ready on cpu")
    info = find_engine("mine")
    assert info.config.keep_alive == 24 * 3600

    watching = shell("attach", "--interval", "0.05")
    assert watching.stdout is not None
    assert "attached to engine 'mine'" in watching.stdout.readline()
    assert watching.stdout.readline().startswith("0 running · 0 waiting")
    watching.send_signal(signal.SIGINT)
    rest, trouble = watching.communicate()
    assert (watching.returncode, trouble) == (0, "")
    assert rest.splitlines()[-1] == "engine 'mine' goes on without this terminal"

    talking = shell("chat", "--engine", "mine", "--system", "Be brief")
    assert talking.stdout is not None
    assert talking.stdin is not None
    talking.stdin.write("/set ignore_eos=true\n/set max_tokens=1800\nHi\n")
    talking.stdin.flush()
    assert [talking.stdout.readline()[:11] for _ in range(3)] == ["random-tiny", "max_tokens=", "max_tokens="]
    talking.stdout.read(1)  # The answer has begun.
    talking.send_signal(signal.SIGINT)
    rest, trouble = talking.communicate("/set max_tokens=3\nagain\n/history\n")
    assert (talking.returncode, trouble) == (0, "")
    assert rest.count("\n> again\n") == 1

    stopped = shell("stop", "mine")
    assert stopped.communicate()[0] == "mine has ended\n"
    wait_for(lambda: not info.host_alive, "the engine's end")


@pytest.mark.timeout(300)
def test_an_engine_of_a_talk_ends_with_it(shell: Shell) -> None:
    talking = shell("chat", "random-tiny", "--num-blocks", "64", "--name", "short")
    said, _ = talking.communicate("/set max_tokens=4\nHi\n")
    assert talking.returncode == 0
    assert said.startswith("random-tiny on engine 'short'")
    assert not list_engines()


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["attach"], 1, "no engine runs; `nbengine start` starts one"),
        (["attach", "nobody"], 1, "no engine nobody runs"),
        (["chat", "--engine", "nobody"], 1, "no engine nobody runs"),
        (["chat", "--engine", "a", "random-tiny"], 2, "--engine must be given without MODEL"),
        (["start", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["start", "--frobnicate"], 2, "--frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    arguments: list[str], status: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(arguments)
    except SystemExit as end:
        found = end.code
    said = capsys.readouterr().err
    assert found == status
    assert complaint in said
    assert "Traceback" not in said


def test_the_status_of_a_mistake_is_that_of_the_process(shell: Shell) -> None:
    process = shell("start", "no-such-model")
    _, said = process.communicate("")
    assert process.returncode == 1
    assert "no model 'no-such-model'" in said
    assert "Traceback" not in said
