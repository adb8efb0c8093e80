"""`%engine history` shows what the engine's host has kept."""

from __future__ import annotations

import base64
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.metrics.history import HistoryRow
from tests.unit.magics.conftest import FakeClient, RecordingPublisher
from tests.unit.magics.test_engine_magic import error_line

Capture = pytest.CaptureFixture[str]
ROWS = [
    HistoryRow(
        rank,
        start,
        1,
        1e9 + start,
        40 + rank,
        running=3,
        running_after=0,
        waiting_after=0,
        kv_usage_after=0.0,
    )
    for rank in (0, 1)
    for start in (100, 101, 104)
]


def test_it_asks_for_the_time_and_the_rank_that_the_line_names(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.history = HistoryPage(ROWS, 110.0)
    shell.run_cell("%engine history").raise_error()
    printed = capsys.readouterr().out
    assert printed.startswith("engine 'random-tiny': the last 10.0 s\n")
    assert "RANK  TIME" in printed
    assert "\nrank 1\n" in printed
    shell.run_cell("%engine history random-tiny --last 10m --rank 1").raise_error()
    printed = capsys.readouterr().out
    assert "RANK" not in printed
    assert "≤ 41.0" in printed
    assert engine.asked_history == [ReadHistory(3600.0), ReadHistory(600.0, 1)]


def test_a_notebook_gets_a_table_and_pictures(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    engine.history = HistoryPage(ROWS, 110.0)
    kernel_shell.run_cell("%engine history").raise_error()
    assert isinstance(kernel_shell.display_pub, RecordingPublisher)
    (output,) = kernel_shell.display_pub.outputs()
    html = output["text/html"]
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", html)]
    assert [re.findall(r">(rank \d)<", picture) for picture in pictures] == [["rank 0"], ["rank 1"]]
    assert html.count("<tr>") == 21
    assert "tokens/s" in output["text/plain"]


def test_an_engine_that_has_told_nothing_says_so(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine history --last 90s").raise_error()
    assert capsys.readouterr().out == "engine 'random-tiny' has told nothing in the last 90s\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--last week", "last must be a number of seconds, or a text such as '90s', '10m', '1h' or '1d'"),
        ("--last 2d", "at most a day"),
        ("--rank -1", "rank must be None, or the rank of an engine core, got -1"),
        ("--rank x", "invalid int value"),
        ("--lsat 1h", "did you mean --last?"),
        ("nobody", "there is no engine 'nobody'"),
    ],
)
def test_a_mistake_is_one_line(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, line: str, message: str
) -> None:
    assert message in error_line(shell, f"%engine history {line}", capsys)
