"""A limit on how often something may be sent: a number of times, and of bytes, a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throttle:
    """A rate: after each message the next one is due when both limits allow it.

    Args:
        interval: the least seconds between two messages.
        bytes_per_second: the average rate.
        slack: seconds of either limit that are kept while nothing is sent, and may be used at once later: a
            caller that asks only now and then must not lose the room that was free meanwhile.
        clock: a clock in seconds.
    """

    def __init__(
        self,
        interval: float,
        bytes_per_second: float,
        slack: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._bytes_per_second = bytes_per_second
        self._slack = slack
        self._clock = clock
        self._due = clock()

    @property
    def is_due(self) -> bool:
        """Return whether something may be sent now."""
        return self._clock() >= self._due

    def sent(self, num_bytes: int) -> None:
        """Note that a message of `num_bytes` bytes has been sent."""
        pause = max(self._interval, num_bytes / self._bytes_per_second)
        self._due = max(self._due, self._clock() - self._slack) + pause
