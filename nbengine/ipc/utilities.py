"""Arguments and results of an engine core's utilities, beside plain values."""

from __future__ import annotations

import msgspec

PAUSE_MODES = ("abort", "wait", "keep")
"""The ways to treat unfinished requests: abort them; let those that have begun go on to their end; or hold
them back, to go on later."""
SLEEP_LEVELS = (1, 2)
SLEEP_TAGS = ("weights", "kv_cache")
"""The parts that a sleeping engine has given back, in the order in which they are restored."""
DEFAULT_PROFILE_STEPS = 200


class QueuePlace(msgspec.Struct):
    """The place of a request in the queue of its engine core."""

    rank: int
    num_ahead: int
    """The requests that are to be admitted before it, of all clients."""


class ProfileReport(msgspec.Struct):
    """A report of what the profiler recorded until `stop_profile`."""

    paths: list[str]
    """One Chrome trace (gzipped JSON, for Perfetto or chrome://tracing) for each worker."""
    num_steps: int
    summary: str
    """A table of the operations that took the most time of the first worker."""

    @property
    def path(self) -> str:
        """Return the path of the first worker's trace."""
        return self.paths[0]

    def __str__(self) -> str:
        return f"{self.num_steps} steps in {', '.join(self.paths)}\n{self.summary}"
