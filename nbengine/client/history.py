"""The reading of an engine's history from its host, page by page."""

from __future__ import annotations

import asyncio

from nbengine.checks import checked_timeout, require, require_int
from nbengine.client.base import EngineCoreClient
from nbengine.errors import EngineStalledError
from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.metrics.history import HistoryRow, MetricsHistory, seconds_of

DEFAULT_HISTORY_TIMEOUT = 30.0
"""Seconds in which a host that runs has answered."""


class _Pages:
    """The pages of one reading: `asked` is the next message; None: all have come."""

    def __init__(self, last: object, rank: object, timeout: object) -> None:
        self.timeout = checked_timeout("timeout", timeout)
        seconds = seconds_of(last)
        number = None if rank is None else require_int("rank", rank)
        require("rank", rank, number is None or 0 <= number < 2**31, "None, or the rank of an engine core")
        self.asked: ReadHistory | None = ReadHistory(seconds, number)
        self._rows: list[HistoryRow] = []
        self._seconds = seconds
        self._now = 0.0

    def take(self, asked: ReadHistory, page: HistoryPage) -> None:
        """Take in the answer to `asked`."""
        self._rows += page.rows
        self._now = page.now
        last = page.rows[-1] if page.rows else None
        self.asked = None
        if page.more and last is not None:
            self.asked = ReadHistory(asked.last, asked.rank, (last.rank, last.start))

    @property
    def history(self) -> MetricsHistory:
        """Return what has come."""
        return MetricsHistory(self._rows, self._now - self._seconds, self._now)


def read_history(client: EngineCoreClient, last: object, rank: object, timeout: object) -> MetricsHistory:
    """Return what the engine's host has kept of the last time.

    Args:
        last: a number of seconds, or a text such as "90s", "10m", "1h", "1d"; a day at most.
        rank: the engine core; None: all.
        timeout: seconds for each of the host's answers.

    Raises:
        EngineDeadError: the engine has ended.
        EngineStalledError: the host has not answered in time.
        InvalidArgumentError: an argument.
        NotSupportedError: the engine is in this process, and has no host.
    """
    pages = _Pages(last, rank, timeout)
    while (asked := pages.asked) is not None:
        client.check_alive()
        answer = client.submit_history(asked)
        try:
            page = answer.result(pages.timeout)
        except TimeoutError:
            raise _silence(client, pages) from None
        pages.take(asked, page)
    return pages.history


async def read_history_async(
    client: EngineCoreClient, last: object, rank: object, timeout: object
) -> MetricsHistory:
    """Do what `read_history` does, for coroutines, on any event loop."""
    pages = _Pages(last, rank, timeout)
    while (asked := pages.asked) is not None:
        client.check_alive()
        answer = asyncio.wrap_future(client.submit_history(asked))
        try:
            page = await asyncio.wait_for(answer, pages.timeout)
        except TimeoutError:
            raise _silence(client, pages) from None
        pages.take(asked, page)
    return pages.history


def _silence(client: EngineCoreClient, pages: _Pages) -> EngineStalledError:
    return EngineStalledError(f"no history within {pages.timeout:g} s: {client.describe_silence([])}")
