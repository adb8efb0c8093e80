"""The time limits of an engine's processes that make no progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_STEP_TIMEOUT_SECONDS = 300.0
"""A worker counts every layer of a step, and a laptop's CPU computes one layer of a 7B model for 2,048 tokens
in 10 to 20 s: a worker that has counted nothing for this time does not compute any more."""
START_SECONDS = 300.0
"""Time for an interpreter and the import of torch, during which nothing is counted: they take 60 s from a
cold hard disk, for one process."""
LOAD_SECONDS = 600.0
"""Time for the parts of a load during which nothing is counted: reading a tensor of a gigabyte from a slow
network disk, filling a large KV cache."""
_PATIENCE = {"start": 60.0, "load": 30.0}
"""Seconds of silence after which these are reported; they are often silent for longer than a step, though all
is well."""


@dataclass(frozen=True, slots=True)
class ProgressDeadlines:
    """Seconds without progress after which an engine core is ended, by what it is doing; infinity: never.

    `step` is also the limit of an idle core that has fallen silent, and `load` that of utility calls, which
    may load, too.
    """

    start: float = START_SECONDS
    load: float = LOAD_SECONDS
    step: float = DEFAULT_STEP_TIMEOUT_SECONDS

    @classmethod
    def of_step_timeout(cls, seconds: float) -> ProgressDeadlines:
        """Make the deadlines of an engine whose steps may stand for `seconds`; 0 switches them off."""
        if not seconds:
            return cls(math.inf, math.inf, math.inf)
        return cls(max(START_SECONDS, seconds), max(LOAD_SECONDS, seconds), seconds)

    def to_end(self, doing: str) -> float:
        """Return the seconds until a core that stands in `doing` is ended."""
        if doing == "start":
            return self.start
        return self.load if doing in ("load", "call") else self.step

    def to_report(self, doing: str) -> float:
        """Return the seconds until a core that stands in `doing` is reported, long before its end.

        They are infinity where it would never be ended.
        """
        patience = _PATIENCE.get(doing, 10.0)
        deadline = self.to_end(doing)
        return math.inf if deadline == math.inf else min(patience, deadline / 4)

    @property
    def pulse_interval(self) -> float:
        """Return the seconds between two pulses of an engine core."""
        return min(1.0, max(0.05, self.to_report("step") / 4))
