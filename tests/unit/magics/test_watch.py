"""`%engine watch` tells once that a figure has passed its bound, and again only after it was back."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, EngineStalledError, InvalidArgumentError
from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.magics.engines import watch as module
from nbengine.magics.engines.conditions import Condition, ConditionWatch
from nbengine.magics.engines.watch import WatchCommand
from nbengine.magics.extension import Extension
from nbengine.metrics.history import COLUMNS, FIGURES, HistoryRow, MetricsHistory
from tests.support.thorough import amount
from tests.unit.magics.conftest import FakeClient, RecordingPublisher
from tests.unit.magics.test_engine_magic import error_line

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests look themselves."""
    monkeypatch.setattr(module, "LOOK_INTERVAL", 10**6)


def row(start: int, ttft: float | None, rank: int = 0, running: int = 1) -> HistoryRow:
    return HistoryRow(rank, start, 1, 1e9 + start, ttft_p95=ttft, running=running, generation_tokens=3)


def command(shell: InteractiveShell) -> WatchCommand:
    return Extension.loaded[shell].engine._commands["watch"].__self__  # type: ignore[attr-defined]


def go_on(shell: InteractiveShell, engine: FakeClient, *rows: HistoryRow) -> None:
    """Let an engine's history have these rows behind the others, and look."""
    known = [*engine.history.rows, *rows]
    engine.history = HistoryPage(known, max((each.end for each in known), default=0.0))
    command(shell)._watches.look()


def published(shell: InteractiveShell) -> list[str]:
    assert isinstance(shell.display_pub, RecordingPublisher)
    return [output["text/plain"] for output in shell.display_pub.outputs()]


def test_it_is_told_once_when_it_becomes_true_and_again_after_it_was_false(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.run_cell('%engine watch "ttft_p95 > 0.5" --notify').raise_error()
    go_on(kernel_shell, engine, row(1, 0.1), row(2, 0.4))
    assert len(published(kernel_shell)) == 1
    go_on(kernel_shell, engine, row(3, 0.9), row(4, 0.8), row(5, None))
    go_on(kernel_shell, engine, row(6, 0.7))
    own, told = published(kernel_shell)
    assert "ttft_p95 > 0.5 is true: true since" in told
    assert "ttft_p95 was 0.9 (rank 0)" in told
    assert "watch 1 of engine 'random-tiny': ttft_p95 > 0.5: true since" in own
    go_on(kernel_shell, engine, row(7, 0.2))
    own, _ = published(kernel_shell)
    assert "no longer true since" in own
    go_on(kernel_shell, engine, row(8, 0.6))
    assert len(published(kernel_shell)) == 3


def test_without_notify_its_own_line_alone_says_it(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.run_cell("%engine watch ttft_p95 > 0.5").raise_error()
    go_on(kernel_shell, engine, row(1, 0.9))
    (own,) = published(kernel_shell)
    assert "true since" in own


def test_a_watch_ends_with_its_engine_and_says_so(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    kernel_shell.run_cell('%engine watch "running >= 1"').raise_error()
    go_on(kernel_shell, engine, row(1, None))
    engine.answers["metrics"] = EngineStalledError("no history")
    go_on(kernel_shell, engine)
    assert "no news: no history" in published(kernel_shell)[0]
    del engine.answers["metrics"]
    go_on(kernel_shell, engine)
    assert "true since" in published(kernel_shell)[0]
    engine.answers["metrics"] = EngineDeadError("gone")
    go_on(kernel_shell, engine)
    assert published(kernel_shell)[0].endswith("the notebook has left it; it was true once")
    assert command(kernel_shell)._watches.all == []


def test_one_that_is_ended_while_its_engine_is_asked_has_had_its_last_word(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_shell.run_cell('%engine watch "running >= 1" --notify').raise_error()
    for answer in (EngineStalledError("no history"), None):
        kernel_shell.run_cell('%engine watch "running >= 1" --notify').raise_error()
        before = published(kernel_shell)
        submit = engine.submit_history

        def stop_first(
            asked: ReadHistory, answer: object = answer, submit: Any = submit
        ) -> Future[HistoryPage]:
            command(kernel_shell)._watches.stop()
            nonlocal ended
            ended = published(kernel_shell)
            if answer is not None:
                engine.answers["metrics"] = answer
            return submit(asked)

        ended: list[str] = []
        monkeypatch.setattr(engine, "submit_history", stop_first)
        go_on(kernel_shell, engine, row(1, None))
        assert len(ended) == len(before)
        assert published(kernel_shell) == ended
        engine.answers.pop("metrics", None)
        monkeypatch.setattr(engine, "submit_history", submit)


def test_an_error_of_one_look_ends_no_watch(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL", 0.001)
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    look, failed = module.Watches.look, threading.Event()

    def fail_once(watches: module.Watches) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the frontend is gone")
        look(watches)

    monkeypatch.setattr(module.Watches, "look", fail_once)
    engine.history = HistoryPage([row(1, 0.9)], 2.0)
    kernel_shell.run_cell('%engine watch "ttft_p95 > 0.5" --notify').raise_error()
    publisher.wait_for("is true: true since")
    assert "the watched engines could not be looked at" in caplog.text


def test_watches_are_listed_and_ended_by_number(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    for condition in ("waiting > 5", "kv_usage>=0.9 --rank 0", "tokens_per_second < 1e1 --notify"):
        shell.run_cell(f"%engine watch {condition}").raise_error()
    capsys.readouterr()
    shell.run_cell("%engine watch --list").raise_error()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["N", "1", "2", "3"]
    assert "rank 0: kv_usage >= 0.9" in lines[2]
    assert "tokens_per_second < 10  yes" in lines[3]
    shell.run_cell("%engine watch --stop 2").raise_error()
    assert "kv_usage >= 0.9" in capsys.readouterr().out
    assert "no watch 2" in error_line(shell, "%engine watch --stop 2", capsys)
    shell.run_cell("%engine watch --stop").raise_error()
    assert command(shell)._watches.all == []
    capsys.readouterr()
    shell.run_cell("%engine watch --list").raise_error()
    assert capsys.readouterr().out == "nothing is watched\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"ttft_p59 > 1"', "'ttft_p59' is none; did you mean ttft_p99?"),
        ('"time > 1"', "'time' is none"),
        ('"ttft_p95 = 1"', "COLUMN, one of > >= < <=, and a number"),
        ('"ttft_p95 > fast"', "COLUMN, one of > >= < <=, and a number"),
        ('"running > 1 2"', "COLUMN, one of > >= < <=, and a number"),
        ("", "which condition?"),
        ("--stop x", "'x' is not the number of a watch"),
        ("--stop 0", "'0' is not the number of a watch"),
        ("--list --stop", "one of them"),
        ("--list running > 1", "one of them"),
        ('--engine nobody "running > 1"', "there is no engine 'nobody'"),
        ('--notfy "running > 1"', "did you mean --notify?"),
    ],
)
def test_a_mistake_is_one_line(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, line: str, message: str
) -> None:
    assert message in error_line(shell, f"%engine watch {line}", capsys)


def test_a_thread_looks_while_there_are_watches_and_leaving_ends_it(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL", 0.001)
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    kernel_shell.run_cell('%engine watch "ttft_p95 > 0.5" --notify').raise_error()
    thread = command(kernel_shell)._watches._thread
    assert thread is not None
    engine.history = HistoryPage([row(1, 0.9)], 2.0)
    publisher.wait_for("is true: true since")
    kernel_shell.run_cell("%engine watch --stop").raise_error()
    thread.join(60)
    assert not thread.is_alive()
    kernel_shell.run_cell("%engine watch running > 5").raise_error()
    again = command(kernel_shell)._watches._thread
    assert again is not None
    command(kernel_shell)._watches.close()
    assert not again.is_alive()


ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.9])), st.booleans()),
    max_size=30,
)


@given(ROWS, st.sampled_from(["> 0.5", ">= 0.5", "< 0.5", "<= 0.5"]))
@settings(max_examples=amount(33, thorough=3000), deadline=None)
def test_it_changes_as_the_newest_values_of_all_engine_cores_do_however_they_are_read(
    rows: list[tuple[int, float | None, bool]], bound: str
) -> None:
    watch = ConditionWatch(Condition.parse(f"ttft_p95 {bound}"))
    compare = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}[bound.split()[0]]
    told: list[bool] = []
    expected: list[bool] = []
    newest: dict[int, float] = {}
    history: list[HistoryRow] = [row(0, None, 0), row(0, None, 1)]
    watch.begin(MetricsHistory(history, 0, 1))
    for start, (rank, value, is_read) in enumerate(rows, 1):
        history.append(row(start, value, rank))
        before = any(compare(each, 0.5) for each in newest.values())
        if value is not None:
            newest[rank] = value
        if (after := any(compare(each, 0.5) for each in newest.values())) is not before:
            expected.append(after)
        if is_read:
            # The newest row is under way the first time, and says something else then.
            begun = [*history[:-1], row(start, 1.0 - (value or 0.0), rank)]
            told += [change.is_true for change in watch.take(MetricsHistory(begun, 0, start + 0.5))]
            told += [change.is_true for change in watch.take(MetricsHistory(history, 0, start + 1))]
    told += [change.is_true for change in watch.take(MetricsHistory(history, 0, math.inf))]
    assert told == expected


def test_an_engine_core_that_is_gone_makes_it_false() -> None:
    watch = ConditionWatch(Condition.parse("running > 2"))
    history = MetricsHistory([row(1, None, 0, 1), row(1, None, 1, 5)], 0, 2)
    assert [change.is_true for change in watch.take(history)] == [True]
    assert [(c.is_true, c.row) for c in watch.take(MetricsHistory([row(40, None, 0, 1)], 30, 60))] == [
        (False, None)
    ]


@given(
    st.text(max_size=30)
    | st.sampled_from(["running > 9" + "9" * 400, "ttft_p95 > 1e999", "a" * 5000 + " > 1"])
)
@settings(max_examples=amount(33, thorough=3000), deadline=None)
def test_any_text_is_a_condition_or_explained(text: str) -> None:
    condition = None
    # Any other error is one of the program's.
    with contextlib.suppress(InvalidArgumentError):
        condition = Condition.parse(text)
    assert condition is None or math.isfinite(condition.number)


@pytest.mark.parametrize("column", FIGURES)
def test_every_figure_can_be_watched(column: str) -> None:
    condition = Condition.parse(f"{column} >= 0")
    busy = msgspec.structs.replace(row(1, 0.5), prefix_cache_queries=2, ttft_p50=1, ttft_p99=1)
    busy = msgspec.structs.replace(busy, itl_p50=1, itl_p95=1, itl_p99=1)
    assert condition.holds(busy) is True
    assert column in COLUMNS
