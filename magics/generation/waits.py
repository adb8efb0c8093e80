"""The lines of a waiting cell about its engine, which may be stalled, asleep, paused or busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from nbengine.errors import NBEngineError, UtilityError
from nbengine.frontend.control import Control
from nbengine.ipc.utilities import QueuePlace
from nbengine.metrics.stats import EngineStats
from nbengine.widgets.words import count, joined, print_quietly

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

    @property
    def engine_ranks(self) -> Sequence[int]:
        """Return the ranks of the engine cores that take requests now."""

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        """Return the state of the engine cores that report it in time, and the ranks of those that do not."""

    def place_within(self, request_ids: Sequence[str], timeout: float) -> QueuePlace | None:
        """Return the place in the queue of the first of these requests; None if none waits or nobody tells in time."""


@dataclass(frozen=True)
class Reason:
    """The reason why an engine lets a request wait."""

    kind: str
    """"asleep", "paused", "starting", "queue" or "silent"; a printed reason is printed again when this changes."""
    said: str
    """A line for what is printed, to follow the engine's name."""
    shown: str
    """A line for the output in which the answer is going to stand."""
    has_command: bool = False
    """The line names a command that lets the request go on."""


class Rousable(Watched, Protocol):
    """The part of `AsyncLLM` that wakes its engine."""

    @property
    def control(self) -> Control:
        """Return the blocking controls of the engine."""


def _no_requests(name: str) -> Sequence[str]:
    del name
    return ()


class WaitNotice:
    """A notice that an engine stalls, that it goes on, and why no output comes; each is printed once.

    `clients` are those that a cell waits for. A stall is an attribute of each client; other reasons are asked
    of the engine cores. Answers that have begun are held up by sleep or a pause alone. Before that, the output
    in which the answer is going to stand shows the reason, as it is at each look, if `show` can do that.
    """

    def __init__(self, clients: Iterable[Watched] = ()) -> None:
        self.clients = {client.name: client for client in clients}
        self.has_begun = False
        """An output has come."""
        self.holds_up = True
        """No other cell of the notebook can run meanwhile."""
        self.show: Callable[[str], bool] | None = None
        """Shows a line in the place of the answer, none if it is empty; returns whether it can. It is called by `look`
        and `note_output` in their thread, and by `looking` in that of its loop."""
        self.requests: Callable[[str], Sequence[str]] = _no_requests
        """Returns the ids of the requests that an engine has been sent, by the engine's name."""
        self._line = ""
        """The line that is shown."""
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
        notice.requests = self.requests
        return notice

    def note_output(self, name: str) -> None:
        """Note that an output of the engine of that name has come."""
        self.has_begun = True
        self._quiet[name] = 0
        # A reason that comes back is told again.
        self._reasons.pop(name, None)
        self._show("")

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

    def _find_reasons(self) -> dict[str, Reason]:
        due = [client for name, client in list(self.clients.items()) if self._is_due(name)]
        found = {
            c.name: reason_of(c, self.requests(c.name), has_begun=self.has_begun)
            for c in due
            if c.stall is None
        }
        return {name: reason for name, reason in found.items() if reason is not None}

    def _tell_reasons(self, reasons: dict[str, Reason]) -> None:
        # While the engines were asked, an output may have come.
        reasons = {name: reason for name, reason in reasons.items() if self._is_due(name)}
        if not self.has_begun and self._show(self._line_of(reasons)):
            return
        # The number of waiting requests changes all the time, so only a new kind of reason is printed.
        for name, reason in reasons.items():
            if self._reasons.get(name) != reason.kind:
                self._reasons[name] = reason.kind
                print_quietly(f"engine {name!r} {reason.said}{self._hint(reason)}")

    def _show(self, line: str) -> bool:
        """Show a line in the place of the answer, and return whether that can be done."""
        if self.show is None:
            return False
        if line == self._line:
            return True
        self._line = line
        return self.show(line)

    def _line_of(self, reasons: dict[str, Reason]) -> str:
        several = len(self.clients) > 1
        return joined(
            *(
                f"{f'engine {name!r}' if several else 'waiting'}: {reason.shown}{self._hint(reason)}"
                for name, reason in reasons.items()
            )
        )

    def _hint(self, reason: Reason) -> str:
        return HELD_UP if self.holds_up and reason.has_command else ""


def reason_of(client: Watched, request_ids: Sequence[str] = (), *, has_begun: bool = False) -> Reason | None:
    """Return why an engine may let the requests of these ids wait; None if nothing seems to hold them up, or if
    they have begun, and the engine only takes its time."""
    try:
        stats, silent = client.stats_within(PATIENCE)
    except UtilityError:
        # Its cores take no calls, nor requests: they have yet to connect, as after their start.
        return None if has_begun else Reason("starting", "is starting", "engine starting")
    except NBEngineError:
        # The request itself raises this error to its caller.
        return None
    cores = stats.engines
    if any(core.is_sleeping for core in cores):
        wakes = f"`%engine wake {client.name}` wakes it"
        return Reason("asleep", f"sleeps: {wakes}", f"asleep: {wakes}", has_command=True)
    if any(core.is_paused for core in cores):
        resumes = f"paused: `%engine resume {client.name}` lets it go on"
        return Reason("paused", f"is {resumes}", resumes, has_command=True)
    if has_begun:
        return None
    num_waiting = sum(core.num_waiting_reqs for core in cores)
    num_running = sum(core.num_running_reqs for core in cores)
    # Without one that runs, what waits is about to begin.
    if num_waiting and num_running:
        return _in_queue(client, request_ids, num_running, num_waiting)
    if silent and not cores:
        says = "does not say what it does: it may be starting a core, or computing a long step"
        return Reason("silent", says, "the engine may be starting a core, or computing a long step")
    return None


def _in_queue(
    client: Watched, request_ids: Sequence[str], num_running: int, num_waiting: int
) -> Reason | None:
    """Return the place of the first of the requests in its queue; None if none of them waits there."""
    try:
        place = client.place_within(request_ids, PATIENCE) if request_ids else None
    except NBEngineError:
        return None
    running = count(num_running, "request runs", "requests run")
    waiting = count(num_waiting, "request waits", "requests wait")
    if place is None:
        return None
    ahead = f"{place.num_ahead:,} ahead" if place.num_ahead else "next in the queue"
    where = f" on rank {place.rank}" if len(client.engine_ranks) > 1 else ""
    return Reason("queue", f"is busy: {running}, {waiting}, {ahead}{where}", f"{ahead}{where}, {running}")
