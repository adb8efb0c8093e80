"""The connections of a server: those that say nothing, or read nothing, are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

SWEEP_INTERVAL = 1.0
"""Seconds between two looks at the connections."""


class Transport(Protocol):
    """The part of `asyncio.Transport` that is needed here."""

    def get_write_buffer_size(self) -> int:
        """Return the bytes that wait to be sent."""

    def abort(self) -> None:
        """Close the connection at once, and lose what waits to be sent."""


class Connection(Protocol):
    """A connection of uvicorn's, with either of its parsers."""

    transport: Any
    cycle: Any
    """The request that is answered, or was answered last; None before the first."""
    timeout_keep_alive_task: Any
    """The timer that ends the connection after an answer; None once more has come, or before the first request."""


class Sweeper:
    """A state machine that finds connections that stand still, from one look to the next.

    One that reads nothing of what waits for it is aborted after `write_timeout` seconds, one that does not
    complete a request's headers after `read_timeout`. Bodies are watched where they are read.
    """

    def __init__(self, read_timeout: float, write_timeout: float) -> None:
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._silent_since: dict[Connection, float] = {}
        self._unread: dict[Connection, tuple[int, float]] = {}

    def sweep(self, connections: Iterable[Connection], now: float) -> list[Connection]:
        """Look at the connections at the time `now`; return those that it has aborted."""
        present = set(connections)
        for known in (self._silent_since, self._unread):
            for gone in known.keys() - present:
                del known[gone]
        stalled = [connection for connection in present if self._stands_still(connection, now)]
        for connection in stalled:
            connection.transport.abort()
        return stalled

    def _stands_still(self, connection: Connection, now: float) -> bool:
        return self._reads_nothing(connection, now) or self._says_nothing(connection, now)

    def _reads_nothing(self, connection: Connection, now: float) -> bool:
        size = connection.transport.get_write_buffer_size()
        before, since = self._unread.get(connection, (0, now))
        if not size or size != before:
            since = now
        self._unread[connection] = (size, since)
        return bool(size) and now - since >= self._write_timeout

    def _says_nothing(self, connection: Connection, now: float) -> bool:
        cycle = connection.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering or connection.timeout_keep_alive_task is not None:
            self._silent_since.pop(connection, None)
            return False
        return now - self._silent_since.setdefault(connection, now) >= self._read_timeout


async def sweep_forever(sweeper: Sweeper, connections: Iterable[Connection]) -> None:
    """Look at a set of connections again and again, until this is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_INTERVAL)
        if stalled := sweeper.sweep(connections, loop.time()):
            logger.info("%d connections that stood still were ended", len(stalled))
