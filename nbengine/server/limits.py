"""The admission of requests: how many are in the engine, how many wait, and when the others may come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from nbengine.server.protocol.errors import ApiError, bad_request

LONGEST_RETRY = 60
_MEMORY = 0.9
"""The weight of the past in the mean duration."""


class Ticket:
    """The admission of one request; `release` gives its places back."""

    __slots__ = ("_entered", "_limits", "_places")

    def __init__(self, limits: Limits, places: int) -> None:
        self._limits: Limits | None = limits
        self._places = places
        self._entered = limits.clock()

    def release(self) -> None:
        """Give the places to those who wait; another call does nothing."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.leave(self._places, limits.clock() - self._entered)


class Limits:
    """The places that requests take, for one event loop: one a completion.

    Requests get places in the order in which they have come. At most `max_queued` of them wait.
    """

    def __init__(
        self, max_concurrent: int, max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._mean_seconds = 1.0
        self.clock = clock
        self.num_running = 0
        """Places that are taken."""

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for places."""
        return len(self._waiting)

    async def enter(self, places: int = 1) -> Ticket:
        """Take places, as soon as there are any.

        Raises:
            ApiError: the request wants more places than there are (400), or too many wait already (429).
        """
        if places > self._max_concurrent:
            raise bad_request(
                f"a request may have at most {self._max_concurrent} completions (prompts times n), this one asks "
                f"for {places}",
                "n",
                "too_many_completions",
            )
        if not self._waiting and self.num_running + places <= self._max_concurrent:
            self.num_running += places
            return Ticket(self, places)
        if len(self._waiting) >= self._max_queued:
            raise ApiError(
                429,
                "rate_limit_error",
                "too_many_requests",
                None,
                f"the server is busy: {self.num_running} completions are being made and {len(self._waiting)} requests "
                "wait",
                self.retry_after(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (places, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The places came in the same moment.
                self.num_running -= places
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._admit()
            raise
        return Ticket(self, places)

    def leave(self, places: int, seconds: float) -> None:
        """Take note of the end of a request that had `places`, `seconds` after it got them."""
        self._mean_seconds = _MEMORY * self._mean_seconds + (1 - _MEMORY) * seconds
        self.num_running -= places
        self._admit()

    def retry_after(self) -> int:
        """Return the seconds after which a place is likely to be free."""
        rounds = 1 + len(self._waiting) / self._max_concurrent
        return min(LONGEST_RETRY, max(1, math.ceil(self._mean_seconds * rounds)))

    def _admit(self) -> None:
        while self._waiting and self.num_running + self._waiting[0][0] <= self._max_concurrent:
            places, turn = self._waiting.popleft()
            # One who has been cancelled takes no place.
            if not turn.done():
                self.num_running += places
                turn.set_result(None)
