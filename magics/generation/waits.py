"""The lines of a waiting cell about its engine, which may be stalled, asleep, paused or busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from nbengine.errors import NBEngineError
from nbengine.frontend.control import Control
from nbengine.metrics.stats import EngineStats
from nbengine.widgets.words import count, print_quietly

LOOK_SECONDS = 1.0
"""Seconds between two looks at the engines that a cell waits for."""
HELD_UP = ", in another notebook or when this cell is interrupted"
QUIET_LOOKS = 5
"""Looks without an output of an engine, after each of which a cell asks what holds an answer up that has begun."""
PATIENCE = 0.3
"""Seconds that engine cores get to report what they do."""


class Watched(Protocol):
    """The part of `AsyncLLM` that a `WaitNotice` reads."""

    @property
    def name(self) -> str:
        """Return the name of the engine."""

    @property
    def stall(self) -> str | None:
        """Say in one line what makes no progress in the engine; None: nothing."""

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        """Return the state of the engine cores that report it in time, and the ranks of those that do not."""


class Rousable(Watched, Protocol):
    """The part of `AsyncLLM` that wakes its engine."""

    @property
    def control(self) -> Control:
        """Return the blocking controls of the engine."""


class WaitNotice:
    """A notice that an engine stalls, that it goes on, and why no output comes; each is printed once.

    `clients` are those that a cell waits for. A stall is an attribute of each client; other reasons are asked
    of the engine cores. Answers that have begun are held up by sleep or a pause alone.
    """

    def __init__(self, clients: Iterable[Watched] = ()) -> None:
        self.clients = {client.name: client for client in clients}
        self.has_begun = False
        """An output has come."""
        self.holds_up = True
        """No other cell of the notebook can run meanwhile."""
        self._told: set[str] = set()
        self._quiet = dict.fromkeys(self.clients, 0)
        """The looks since the last output, by engine."""
        self._reasons: dict[str, str] = {}
        """The reasons that were printed last, by engine."""
        self._due = time.monotonic() + LOOK_SECONDS

    def again(self) -> WaitNotice:
        """Make a notice for another cell that waits for what is still to come of the same engines."""
        notice = WaitNotice(list(self.clients.values()))
        notice.has_begun = self.has_begun
        return notice

    def note_output(self, name: str) -> None:
        """Note that an output of the engine of that name has come."""
        self.has_begun = True
        self._quiet[name] = 0
        # A reason that comes back is told again.
        self._reasons.pop(name, None)

    def leave(self, name: str) -> None:
        """Look at an engine no more: all that it was asked for has come."""
        self.clients.pop(name, None)

    def look(self) -> None:
        """Print what is new, unless the last look was less than `LOOK_SECONDS` ago."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        self._tell_stalls()
        if self._asks():
            self._tell_reasons(self._find_reasons())

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look every `LOOK_SECONDS` while the block waits; the lines belong to the cell that waits."""
        task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            task.cancel()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._tell_stalls()
            if self._asks():
                self._tell_reasons(await asyncio.to_thread(self._find_reasons))

    def _tell_stalls(self) -> None:
        for name, client in list(self.clients.items()):
            stall = client.stall
            if stall is not None and name not in self._told:
                self._told.add(name)
                print_quietly(f"engine {name!r} makes no progress: {stall}")
            elif stall is None and name in self._told:
                self._told.remove(name)
                print_quietly(f"engine {name!r} goes on")

    def _asks(self) -> bool:
        """Count a look, and return whether any engine is to be asked what it does."""
        for name in self._quiet:
            self._quiet[name] += 1
        return any(map(self._is_due, list(self.clients)))

    def _is_due(self, name: str) -> bool:
        quiet = self._quiet[name]
        return not self.has_begun or (quiet > 0 and quiet % QUIET_LOOKS == 0)

    def _find_reasons(self) -> dict[str, str]:
        due = [client for name, client in list(self.clients.items()) if self._is_due(name)]
        found = {c.name: reason_of(c, has_begun=self.has_begun) for c in due if c.stall is None}
        return {name: reason for name, reason in found.items() if reason}

    def _tell_reasons(self, reasons: dict[str, str]) -> None:
        # The number of waiting requests changes all the time, so only a new kind of reason is printed.
        for name, reason in reasons.items():
            kind = reason.partition(":")[0]
            # While the engine was asked, an output may have come.
            if self._is_due(name) and self._reasons.get(name) != kind:
                self._reasons[name] = kind
                hint = HELD_UP if self.holds_up and "`" in reason else ""
                print_quietly(f"engine {name!r} {reason}{hint}")


def reason_of(client: Watched, *, has_begun: bool = False) -> str:
    """Say why an engine may let a request wait, to follow its name; empty if nothing seems to hold it up, or if
    the request has begun, and the engine only takes its time."""
    try:
        stats, silent = client.stats_within(PATIENCE)
    except NBEngineError:
        # The request itself raises this error to its caller.
        return ""
    cores = stats.engines
    if any(core.is_sleeping for core in cores):
        return f"sleeps: `%engine wake {client.name}` wakes it"
    if any(core.is_paused for core in cores):
        return f"is paused: `%engine resume {client.name}` lets it go on"
    if has_begun:
        return ""
    num_waiting = sum(core.num_waiting_reqs for core in cores)
    num_running = sum(core.num_running_reqs for core in cores)
    # Without one that runs, what waits is about to begin.
    if num_waiting and num_running:
        waiting = count(num_waiting, "request waits", "requests wait")
        return f"is busy: {count(num_running, 'request runs', 'requests run')}, {waiting}"
    if silent and not cores:
        return "does not say what it does: it may be starting a core, or computing a long step"
    return ""
