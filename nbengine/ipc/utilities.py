"""What the utilities of an engine core take and give, beside plain values."""

from __future__ import annotations

import msgspec

PAUSE_MODES = ("abort", "wait", "keep")
"""What becomes of unfinished requests: they are aborted; those that have begun go on to their end; or they are held
back and go on later."""
SLEEP_LEVELS = (1, 2)
SLEEP_TAGS = ("weights", "kv_cache")
"""What a sleeping engine has given back, in the order in which it is restored."""
DEFAULT_PROFILE_STEPS = 200


class ProfileReport(msgspec.Struct):
    """What `stop_profile` has recorded."""

    paths: list[str]
    """A Chrome trace (gzipped JSON, for Perfetto or chrome://tracing) a worker."""
    num_steps: int
    summary: str
    """The operations that took the most time of the first worker, as a table."""

    @property
    def path(self) -> str:
        """The trace of the first worker."""
        return self.paths[0]

    def __str__(self) -> str:
        return f"{self.num_steps} steps in {', '.join(self.paths)}\n{self.summary}"
