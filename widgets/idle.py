"""Since when a shell has had nothing to do."""

from __future__ import annotations

import time
from typing import ClassVar

from IPython.core.interactiveshell import InteractiveShell


class IdleClock:
    """Knows whether a cell runs. It only notes times: nothing may be shown from a shell's hooks."""

    _clocks: ClassVar[dict[InteractiveShell, IdleClock]] = {}

    def __init__(self) -> None:
        self._since: float | None = None
        """When the last cell ended, on `time.monotonic()`; None while one runs."""

    @classmethod
    def of(cls, shell: InteractiveShell) -> IdleClock:
        """The clock of a shell, which begins with the cell that is running now."""
        clock = cls._clocks.get(shell)
        if clock is None:
            clock = cls._clocks[shell] = cls()
            shell.events.register("pre_execute", clock.on_pre_execute)
            shell.events.register("post_execute", clock.on_post_execute)
        return clock

    @classmethod
    def forget(cls, shell: InteractiveShell) -> None:
        """Take the clock away from a shell."""
        clock = cls._clocks.pop(shell, None)
        if clock is not None:
            shell.events.unregister("pre_execute", clock.on_pre_execute)
            shell.events.unregister("post_execute", clock.on_post_execute)

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has run; 0 while a cell runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def on_pre_execute(self) -> None:
        """A cell begins."""
        self._since = None

    def on_post_execute(self) -> None:
        """A cell has ended."""
        self._since = time.monotonic()
