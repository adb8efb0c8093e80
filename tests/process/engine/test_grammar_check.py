"""The process that checks grammars bounds what a text may cost, and never outlives the process that started
it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from nbengine.engine.core.grammar_check import GrammarChecker, GrammarSource
from nbengine.errors import RequestError

pytestmark = pytest.mark.fresh_processes

FINE = GrammarSource("regex", "[ab]+")
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(16)]}
SLOW = GrammarSource("json", json.dumps(PATTERNS))
"""Intersecting these takes a minute and gigabytes."""

Start = Callable[..., GrammarChecker]


@pytest.fixture
def start(no_leftovers: None) -> Iterator[Start]:
    checkers: list[GrammarChecker] = []

    def make(**limits: float) -> GrammarChecker:
        checkers.append(GrammarChecker(**limits))  # type: ignore[arg-type]
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.shutdown()


def child() -> psutil.Process:
    (process,) = psutil.Process().children()
    return process


def test_one_process_answers_until_it_is_shut_down(start: Start) -> None:
    checker = start()
    assert psutil.Process().children() == []
    assert "[ab]+" in checker.check(FINE)
    first = child()
    with pytest.raises(RequestError, match="unclosed group"):
        checker.check(GrammarSource("regex", "("))
    assert checker.check(FINE)
    assert child() == first
    checker.shutdown()
    assert not first.is_running()
    assert checker.check(FINE)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_seconds": 0.3}, r"it takes more than 0\.3 s to compile"),
        ({"max_seconds": 60, "max_bytes": 250 << 20}, "it takes more than 250 MiB to compile"),
    ],
)
def test_a_text_that_costs_too_much_ends_the_process_and_is_refused(
    start: Start, limits: dict[str, float], reason: str
) -> None:
    checker = start(**limits)
    for _ in range(2):
        with pytest.raises(RequestError, match=reason):
            checker.check(SLOW)
        assert checker.check(FINE)


def test_a_process_that_was_ended_while_idle_is_replaced(start: Start) -> None:
    checker = start()
    checker.check(FINE)
    process = child()
    process.send_signal(signal.SIGINT)
    assert checker.check(FINE)
    assert child() == process
    process.kill()
    process.wait()
    assert checker.check(FINE)


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import json, os\n"
        "from nbengine.engine.core.grammar_check import GrammarChecker, GrammarSource\n"
        "checker = GrammarChecker()\n"
        "checker.check(GrammarSource('regex', 'a'))\n"
        "print(checker._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    pid = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)
    assert not psutil.pid_exists(pid)
