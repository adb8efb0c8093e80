"""A client's wait until its engine takes requests, with its time limits and the reasons why it fails."""

from __future__ import annotations

import contextlib
import logging
import time
from queue import Empty, SimpleQueue

from nbengine.client.link.stalls import Stalls, stopped_process
from nbengine.client.routing.core_table import CoreTable
from nbengine.errors import EngineStalledError, EngineStartError, NBEngineError
from nbengine.ipc.control_messages import EngineReady, Progress
from nbengine.ipc.process_state import seconds_in_line
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.progress import ProgressCallback

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.25
"""Seconds between two looks, during the wait, at whether a process that is waited for is stopped."""
CONNECT_TIMEOUT = 30.0
"""Seconds that an engine core, once ready, may take to connect to the client that has started it."""
ATTACH_PATIENCE = 1.5
"""Seconds that a client that attaches waits for cores that are ready: some work may block their interpreters."""
HOST_PATIENCE = 1.5
"""Seconds that it waits before that for the first answer of a host on this machine, which computes nothing."""
BUSY_PATIENCE = 5.0
"""Seconds that it waits for a host that others keep from the processors, or may keep from them."""
_BUSY_SHARE = 0.1
"""The part of the wait that such a host has been ready to run."""

News = Progress | EngineReady | NBEngineError | None
"""News for a waiting client; None: the table has changed."""


class ReadyWait:
    """A wait for an engine: it is told of news on any thread (`tell`), and waits on one.

    Args:
        table: the engine cores that have connected.
        stalls: the processes that are reported to make no progress.
        is_owner: the client has started the engine, and has it to itself.
    """

    def __init__(self, info: ConnectionInfo, table: CoreTable, stalls: Stalls, *, is_owner: bool) -> None:
        self._info = info
        self._table = table
        self._stalls = stalls
        self._is_owner = is_owner
        self._news: SimpleQueue[News] = SimpleQueue()
        self._ready: dict[int, EngineReady] = {}
        self.is_attached = False
        """The host has given this client a lease."""

    def tell(self, news: News) -> None:
        """Take in news."""
        self._news.put(news)

    def wait(self, progress: ProgressCallback | None) -> list[EngineReady]:
        """Wait for every core's READY and its first messages on both sockets; return the READYs, by rank.

        A client that attaches does not wait long for these messages: its requests wait for the core instead.

        Raises:
            EngineStartError, EngineDeadError: the engine has ended, or a core does not connect.
            EngineStalledError: a client that attaches finds that the host or a core stands.
        """
        ready, table = self._ready, self._table
        deadline: float | None = None
        ranks = table.ranks
        # A rank that joins meanwhile may connect before this wait hears of it.
        while deadline is None or not (table.all_connected and ready.keys() >= set(ranks)):
            if deadline is not None and self._may_do_without(deadline):
                break
            news = self._next(deadline)
            if isinstance(news, NBEngineError):
                raise news
            if isinstance(news, Progress) and progress is not None:
                progress(news)
            if isinstance(news, EngineReady):
                ready[news.rank] = news
            ranks = table.ranks
            if deadline is None and ranks and set(ranks) <= ready.keys():
                deadline = time.monotonic() + (CONNECT_TIMEOUT if self._is_owner else ATTACH_PATIENCE)
        return [ready[rank] for rank in ranks if rank in ready]

    def _next(self, deadline: float | None) -> News:
        stopped_before: str | None = None
        looks, line = 0, seconds_in_line(self._info.host_pid)
        while deadline is None or time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                return self._news.get(timeout=LOOK_INTERVAL)
            if self._is_owner:
                continue
            # Only a process that two looks find stopped counts: it may be stopped for a moment.
            stopped = self._what_holds_up()
            if stopped is not None and stopped == stopped_before:
                raise self._cannot_be_attached_to(stopped)
            stopped_before = stopped
            # Looks are counted, since this process may itself have got no time for a while.
            looks += 1
            waited = looks * LOOK_INTERVAL
            if self._info.is_here and not self.is_attached and waited >= self._host_patience(waited, line):
                host = f"its host (pid {self._info.host_pid})"
                raise self._cannot_be_attached_to(f"{host} has not answered for {waited:g} s")
        if not self._is_owner:
            return None
        raise EngineStartError(
            f"engine {self._info.name} is ready but did not connect within {CONNECT_TIMEOUT:g} s"
        )

    def _host_patience(self, waited: float, line: float | None) -> float:
        """Return how long to wait for the host's first answer: `waited` seconds ago it had been ready to run, without
        a processor, for `line` seconds in all."""
        now = seconds_in_line(self._info.host_pid)
        is_idle = line is not None and now is not None and now - line < _BUSY_SHARE * waited
        return HOST_PATIENCE if is_idle else BUSY_PATIENCE

    def _cannot_be_attached_to(self, why: str) -> EngineStalledError:
        return EngineStalledError(f"engine {self._info.name} cannot be attached to: {why}")

    def _may_do_without(self, deadline: float) -> bool:
        """Return whether the cores that have not connected may do so later."""
        if self._is_owner or time.monotonic() < deadline:
            return False
        logger.warning(
            "engine %s: cores %s are ready and have not connected yet; they may be busy, and requests wait for them",
            self._info.name,
            sorted(set(self._table.ranks) - self._table.usable.keys()),
        )
        return True

    def _what_holds_up(self) -> str | None:
        """Say what keeps this client from being attached; None if nothing is known to."""
        waited_for = sorted(self._ready.keys() - self._table.usable.keys())
        standing = [line for rank in waited_for if (line := self._stalls.describe(rank)) is not None]
        return stopped_process(self._info, waited_for, self._ready.values()) or "; ".join(standing) or None
