"""Readings of the history: one is under way at a time, none comes too soon after another, and all end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from nbengine.client.history import read_history, read_history_async
from nbengine.client.inproc import InprocClient
from nbengine.client.link.history_calls import PAUSE, HistoryCalls
from nbengine.errors import EngineStalledError, InvalidArgumentError, NBEngineError, NotSupportedError
from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.metrics.history import DAY, HistoryRow, MetricsHistory, seconds_of


def page(now: float) -> HistoryPage:
    return HistoryPage([], now)


def test_each_is_sent_after_the_answer_to_the_one_before_and_not_too_soon() -> None:
    calls = HistoryCalls()
    assert calls.next(5.0) is None
    assert calls.due == math.inf
    first, second = calls.begin(ReadHistory(1.0)), calls.begin(ReadHistory(2.0))
    # The link waits until this time, in whole milliseconds: infinitely long ago is none.
    assert 0.0 <= calls.due <= 5.0
    assert calls.next(5.0) == ReadHistory(1.0)
    assert calls.next(6.0) is None
    assert calls.due == math.inf
    calls.answered(page(5.001))
    assert first.result(0) == page(5.001)
    assert calls.due == 5.0 + PAUSE
    assert calls.next(5.0 + PAUSE / 2) is None
    assert calls.next(5.0 + PAUSE) == ReadHistory(2.0)
    calls.answered(page(7.0))
    # An answer that nobody waits for changes nothing.
    calls.answered(page(8.0))
    assert second.result(0) == page(7.0)


def test_one_that_was_given_up_leaves_its_answer_to_nobody_else() -> None:
    calls = HistoryCalls()
    first, second = calls.begin(ReadHistory(1.0)), calls.begin(ReadHistory(2.0))
    calls.next(0.0)
    first.cancel()
    calls.answered(page(1.0))
    assert not second.done()
    calls.next(1.0)
    calls.answered(page(2.0))
    assert second.result(0) == page(2.0)


def test_a_failure_ends_all_and_the_next_one_is_sent_again() -> None:
    calls = HistoryCalls()
    futures = [calls.begin(ReadHistory(1.0)) for _ in range(3)]
    calls.next(0.0)
    calls.fail(NBEngineError("broke"))
    for future in futures:
        with pytest.raises(NBEngineError, match="broke"):
            future.result(0)
    later = calls.begin(ReadHistory(4.0))
    assert calls.next(1.0) == ReadHistory(4.0)
    calls.answered(page(2.0))
    assert later.result(0) == page(2.0)


class Client:
    """A client whose host has these pages, and never answers when they have run out."""

    def __init__(self, pages: Iterator[HistoryPage]) -> None:
        self._pages = pages
        self.asked: list[ReadHistory] = []

    def check_alive(self) -> None: ...

    def describe_silence(self, missing: list[Future[object]]) -> str:
        return "the host (pid 7)"

    def submit_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        self.asked.append(asked)
        future: Future[HistoryPage] = Future()
        if (found := next(self._pages, None)) is not None:
            future.set_result(found)
        return future


async def read_either_way(is_async: bool, client: Client, timeout: float = 60.0) -> MetricsHistory:
    if is_async:
        return await read_history_async(client, "1m", None, timeout)  # type: ignore[arg-type]
    return read_history(client, "1m", None, timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [True, False])
async def test_pages_are_read_until_there_are_no_more(is_async: bool) -> None:
    rows = [HistoryRow(0, start, 1, start, generation_tokens=start) for start in (990, 995, 999)]
    client = Client(iter([HistoryPage(rows[:2], 1000.0, more=True), HistoryPage(rows[2:], 1000.5)]))
    history = await read_either_way(is_async, client)
    assert client.asked == [ReadHistory(60.0), ReadHistory(60.0, None, (0, 995))]
    assert [row["generation_tokens"] for row in history.rows()] == [990, 995, 999]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_host_that_does_not_answer_is_named(is_async: bool) -> None:
    client = Client(iter([]))
    with pytest.raises(EngineStalledError, match=r"no history within 0\.01 s: the host \(pid 7\)"):
        await read_either_way(is_async, client, 0.01)


def test_an_engine_in_this_process_has_none_and_says_so() -> None:
    with pytest.raises(NotSupportedError, match="multiprocess=False"):
        InprocClient.submit_history(None, ReadHistory(1.0)).result(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("10 min", 600),
        ("1.5h", 5400),
        ("1d", DAY),
        ("45", 45),
        (45, 45),
        (0.5, 0.5),
    ],
)
def test_the_time_to_go_back_can_be_said_in_words_or_seconds(last: object, seconds: float) -> None:
    assert seconds_of(last) == seconds


@pytest.mark.parametrize(
    "last",
    ["", "1 week", "-1h", "h", "1h30m", "2d", "0s", 0, -1, DAY + 1, None, True, [], "9" * 400, "1e3", "nan"],
)
def test_other_times_are_refused_by_name(last: object) -> None:
    with pytest.raises(InvalidArgumentError, match="last must be"):
        read_history(Client(iter([])), last, None, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 2**31, "x", 0.5, True])
def test_other_ranks_are_refused_by_name(rank: object) -> None:
    with pytest.raises(InvalidArgumentError, match="rank must be"):
        read_history(Client(iter([])), "1h", rank, 1.0)  # type: ignore[arg-type]
