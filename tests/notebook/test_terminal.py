"""A terminal, where cells block: IPython in a pseudo-terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pexpect
import pytest
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
REDRAW = r"\x1b\[(\d+)A\x1b\[J"
"""Up to where the text before began."""


class Terminal:
    """IPython with a plain prompt."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor", "--no-confirm-exit"],
            env=environment | {"TERM": "dumb", "COLUMNS": "200"},
            encoding="utf-8",
            echo=False,
            timeout=30,
        )
        self.expect(r"In \[1\]: ")

    def expect(self, pattern: str) -> str:
        """Wait for a pattern; returns what came before it."""
        self.child.expect(pattern)
        return self.child.before or ""

    def run(self, line: str) -> str:
        """Run a line and return what it shows."""
        self.child.sendline(line)
        return self.expect(r"In \[\d+\]: ")


@pytest.fixture
def terminal(notebook_environment: dict[str, str], clean_afterwards: None) -> Iterator[Terminal]:
    terminal = Terminal(notebook_environment)
    yield terminal
    terminal.child.sendeof()
    terminal.child.close(force=True)


def test_a_terminal_streams_answers_and_an_interrupt_keeps_the_text(terminal: Terminal) -> None:
    terminal.run("%load_ext nbengine")
    started = terminal.run(start_line(tokens_per_second=200))
    assert "✓ load" in started
    assert "engine 'random-tiny' is ready" in started
    shown = terminal.run("answer = %generate --max-tokens 30 What is this?")
    assert (ALPHABET * 2)[:30] in shown
    assert "30 tokens" in shown
    assert "(30, 'length')" in terminal.run("len(answer.token_ids), answer.finish_reason")
    terminal.child.sendline("%%generate -o other --max-tokens 3000")
    for line in ("hi", "", ""):
        terminal.child.sendline(line)
    terminal.expect(ALPHABET)
    terminal.child.sendintr()
    interrupted = terminal.expect(r"In \[\d+\]: ")
    assert "ended early" in interrupted
    assert "KeyboardInterrupt: generation interrupted" in interrupted
    assert "Traceback" not in interrupted
    assert "('abort', True)" in terminal.run(
        "other.finish_reason, other.text in 'ABCDEFGHIJKLMNOPQRSTUVWXYZ' * 200"
    )
    assert "ABC" in terminal.run("%generate --max-tokens 3 again")
    assert "0 running, 0 waiting" in terminal.run("%engine status")
    watch_the_engine(terminal)
    look_closer(terminal)
    assert "2 processes are gone" in terminal.run("%engine stop")
    assert "UsageError: no engine is running here" in terminal.run("%generate hi")


def watch_the_engine(terminal: Terminal) -> None:
    """Show the dashboard as text, once and until ^C."""
    once = terminal.run("%dashboard")
    assert "random-tiny" in once
    assert "\x1b" not in once
    terminal.child.sendline("%dashboard --watch 0.1")
    for _ in range(2):
        drawn = terminal.expect(REDRAW)
        assert drawn.count("\n") == int(terminal.child.match[1])
        assert "random-tiny" in drawn
    terminal.child.sendintr()
    assert "Traceback" not in terminal.expect(r"In \[\d+\]: ")
    assert "42" in terminal.run("6 * 7")


def look_closer(terminal: Terminal) -> None:
    """Look at tokens, comparisons, conversations, and at what is shown again."""
    assert "ABCD" in terminal.run("shaded = %generate --logprobs 3 --max-tokens 4 hi")
    assert "[3, 3, 3, 3]" in terminal.run("[len(entry) for entry in shaded.logprobs]")
    terminal.run("branch = shaded.branch(1, 'C').result()")
    assert "'ACAB'" in terminal.run("branch.text")
    grid = terminal.run("grid = %generate --seed 1,2 --max-tokens 3,5 hi")
    assert grid.count("ABCDE") == 2
    assert "4" in terminal.run("len(grid.results)")
    assert "ABCD" in terminal.run("%chat --max-tokens 4 -o talk first")
    terminal.run("%chat --max-tokens 4 -o talk second")
    assert "['first', 'second']" in terminal.run("[turn.user for turn in talk.turns]")
    again = terminal.run("%engine recover")
    assert "> second" in again
    assert "ABCD" in again


def test_tab_completes_a_flag(notebook_environment: dict[str, str]) -> None:
    with pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--no-banner", "--no-confirm-exit", "--ext=nbengine"],
        env=notebook_environment | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        encoding="utf-8",
        timeout=30,
    ) as child:
        child.expect(r"In \[")
        child.send("%generate --tempe\t")
        # What has been typed is echoed; the rest comes from the completion.
        assert child.expect_exact(["rature", pexpect.TIMEOUT]) == 0, child.before
        child.sendintr()
        child.sendeof()
        child.expect(pexpect.EOF)
