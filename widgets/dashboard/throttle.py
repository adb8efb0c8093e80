"""How often something may be sent: no more than so many times, and so many bytes, a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throttle:
    """Keeps a rate: after each message the next one is due when both limits allow it.

    Args:
        interval: seconds between two messages at least.
        bytes_per_second: on average.
        slack: seconds of either limit that are kept while nothing is sent, and may be used at once later: who looks only now
            and then is not to lose what was free meanwhile.
        clock: in seconds.
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
        """Whether something may be sent now."""
        return self._clock() >= self._due

    def sent(self, num_bytes: int) -> None:
        """Something has been sent."""
        pause = max(self._interval, num_bytes / self._bytes_per_second)
        self._due = max(self._due, self._clock() - self._slack) + pause
