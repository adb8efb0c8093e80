"""This module measures how long a shell has had nothing to do."""

from __future__ import annotations

import time
from typing import ClassVar

from IPython.core.interactiveshell import InteractiveShell


class IdleClock:
    """A clock that knows whether a cell runs; it only notes times: a shell's hooks must not show anything."""

    _clocks: ClassVar[dict[InteractiveShell, IdleClock]] = {}

    def __init__(self) -> None:
        self._since: float | None = None
        """The time when the last cell ended, on `time.monotonic()`; None while one runs."""

    @classmethod
    def of(cls, shell: InteractiveShell) -> IdleClock:
        """Find the clock of a shell; a new one begins with the cell that is running now."""
        clock = cls._clocks.get(shell)
        if clock is None:
            clock = cls._clocks[shell] = cls()
            shell.events.register("pre_execute", clock.on_pre_execute)
            shell.events.register("post_execute", clock.on_post_execute)
        return clock

    @classmethod
    def forget(cls, shell: InteractiveShell) -> None:
        """Remove the clock of a shell."""
        clock = cls._clocks.pop(shell, None)
        if clock is not None:
            shell.events.unregister("pre_execute", clock.on_pre_execute)
            shell.events.unregister("post_execute", clock.on_post_execute)

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since the last cell ended; 0 while a cell runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def on_pre_execute(self) -> None:
        """Note that a cell begins."""
        self._since = None

    def on_post_execute(self) -> None:
        """Note that a cell has ended."""
        self._since = time.monotonic()
