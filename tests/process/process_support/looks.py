"""Tests look again and again for what nothing announces, and leave the processor to what they wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator

SHARE = 0.2
"""The part of a processor that looks may take."""
LONGEST = 0.25


def looks(pause: float = 0.005) -> Iterator[float]:
    """Yield the seconds since the first look before each look, with a pause between two: at least this long, and longer
    where a look takes long."""
    first = time.monotonic()
    while True:
        began = time.monotonic()
        yield began - first
        taken = time.monotonic() - began
        time.sleep(max(pause, min(LONGEST, taken * (1 / SHARE - 1))))
