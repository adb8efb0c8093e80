"""The change of the number of engine cores while the engine runs; pure like `HostState`.

Independent cores come and go one by one. Cores in lock step change their number together, between two waves:
newcomers load the model and wait, leaving ones finish their requests, and a `ChangeGroup` tells all of them
the new number. From then on none of them can do without the others; until then a newcomer that fails changes
nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from nbengine.engine.host.events import (
    Action,
    RecordReady,
    ResizeCoordinator,
    SignalCores,
    ToClient,
    ToCore,
)
from nbengine.engine.host.rank_table import RankLife, RankPhase, RankTable
from nbengine.ipc.control_messages import ChangeGroup, Scaled, ShutdownEngine

LacksRoom = Callable[[int, int], str | None]
"""A function that says why an engine with a first number of engine cores cannot have a second one, None if it
can."""
STOP_GRACE = 3.0
"""Seconds that an engine core has to end when it need not finish requests; then it is killed."""


@dataclass(frozen=True, slots=True)
class LockStep:
    """The rules for a change of the number of engine cores in lock step."""

    meeting_place: str = ""
    """Place where the workers meet after a change; a number is added to make it another place every time.
    Empty if there is none."""
    misfit: Callable[[int], str | None] = lambda _: None
    """A function that says why the model cannot be divided among a number of engine cores, None if it can."""


@dataclass(slots=True)
class Scaling:
    """A change to `size` ranks under way: what is still to happen, and the client that asked for it."""

    asker: bytes
    size: int
    coming: set[int]
    """Ranks that are being started."""
    going: set[int]
    """Ranks whose processes are to end."""
    unconfirmed: set[int] = field(default_factory=set)
    """In lock step: ranks that have been told of the change and have not made it yet."""
    failures: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Tell whether nothing is left to happen."""
        return not (self.coming or self.going or self.unconfirmed)

    @property
    def error(self) -> str | None:
        """Say what went wrong, None if nothing did."""
        return "; ".join(self.failures) or None


class Scaler:
    """A scaler that carries out one change at a time.

    `announce` returns the actions that tell everybody which ranks take requests now, and that introduce to
    the clients the ranks that it is given.
    """

    def __init__(
        self,
        table: RankTable,
        lock_step: LockStep | None,
        announce: Callable[[list[int]], list[Action]],
        lacks_room: LacksRoom,
    ) -> None:
        self._table = table
        self._lock_step = lock_step
        self._lacks_room = lacks_room
        self._announce = announce
        self._current: Scaling | None = None
        self._num_changes = 0

    # The wishes of clients.

    def refusal(self, size: int) -> str | None:
        """Say why a running engine cannot be scaled to `size`, None if it can."""
        if size < 1:
            return f"data_parallel_size must be at least 1, got {size}"
        if self._current is not None:
            return f"the engine is being scaled to {self._current.size} engine cores already"
        if min(self._table.ready) >= size:
            return f"none of the engine cores 0 to {size - 1} takes requests now; try again when one does"
        no_room = self._lacks_room(self._table.size, size)
        if no_room is not None or self._lock_step is None or size == self._table.size:
            return no_room
        if not self._lock_step.meeting_place:
            return (
                "the number of engine cores in lock step cannot be changed where they are on several machines"
            )
        return self._lock_step.misfit(size)

    def begin(self, asker: bytes, size: int, now: float) -> list[Action]:
        """Start the ranks that come, and end those that go, after `refusal` has returned None."""
        table, before = self._table, self._table.size
        # Both are found before `dismiss_from` changes the phases.
        leaving = [rank for rank in table.ready if rank >= size]
        starting = [life for life in table.all() if life.phase is RankPhase.STARTING and life.rank >= size]
        table.size = max(size, before)
        self._current = Scaling(asker, size, table.recall(size), table.dismiss_from(size))
        actions: list[Action] = [ResizeCoordinator(table.size)]
        if leaving:
            actions += self._announce([])
            actions += [ToCore(rank, ShutdownEngine(drain=True, requeue=True)) for rank in leaving]
            actions += self._change_group(before) if self._lock_step is not None else []
        actions += [action for life in starting for action in _end(life, now)]
        for rank in self._current.coming:
            if table[rank].phase is RankPhase.GONE:
                table[rank].queue()
        return actions + self._finish_if_done()

    def cancel(self) -> bytes | None:
        """Forget the change, because the engine ends; return the client that waits for its answer, if any."""
        scaling, self._current = self._current, None
        return None if scaling is None else scaling.asker

    # The reports of cores.

    def newcomer_is_ready(self, life: RankLife) -> list[Action]:
        """Let a core that has loaded the model take requests or, in lock step, wait for the change."""
        if self._lock_step is None:
            life.phase = RankPhase.READY
            return self._announce([life.rank]) + self._note(arrived=life.rank)
        life.phase = RankPhase.WAITING
        scaling = self._current
        if scaling is None or set(self._table.ranks(RankPhase.WAITING)) != scaling.coming:
            return []
        return self._change_group(self._table.size - len(scaling.coming))

    def group_changed(self, rank: int, size: int) -> list[Action]:
        """Note that a core in lock step is one of `size` now; finish the change when all of them are."""
        scaling = self._current
        if scaling is None or size != scaling.size:
            return []
        scaling.unconfirmed.discard(rank)
        if scaling.unconfirmed:
            return []
        newcomers = sorted(scaling.coming)
        for newcomer in newcomers:
            self._table[newcomer].phase = RankPhase.READY
        scaling.coming.clear()
        return (self._announce(newcomers) if newcomers else []) + self._finish_if_done()

    def can_do_without(self, rank: int) -> bool:
        """Tell whether a core may fail, or end when it was told to, without an effect on the others."""
        if self._lock_step is None:
            return True
        scaling = self._current
        return scaling is not None and rank in scaling.coming and not scaling.unconfirmed

    def newcomer_failed(self, life: RankLife, cause: str, now: float) -> list[Action] | None:
        """Give up a core that dies while it is being started; return None if the core is not being started.

        It is not tried again. In lock step the cores that were to come with it do not come either.
        """
        scaling = self._current
        if scaling is None or life.rank not in scaling.coming:
            return None
        scaling.failures.append(cause)
        life.dismiss()
        given_up = {life.rank} if self._lock_step is None else scaling.coming.copy()
        scaling.coming -= given_up
        running = [self._table[rank] for rank in sorted(given_up) if self._table[rank].runs]
        scaling.going |= {other.rank for other in running}
        for rank in given_up:
            self._table[rank].dismiss()
        return [action for other in running if other is not life for action in _end(other, now)]

    def has_left(self, rank: int) -> list[Action]:
        """Note that the process of a core is gone."""
        return self._note(left=rank)

    def _note(self, *, arrived: int | None = None, left: int | None = None) -> list[Action]:
        if self._current is None:
            return []
        self._current.coming.discard(arrived)
        self._current.going.discard(left)
        return self._finish_if_done()

    def _change_group(self, before: int) -> list[Action]:
        scaling, lock_step = self._current, self._lock_step
        if scaling is None or lock_step is None:
            return []
        self._num_changes += 1
        scaling.unconfirmed = set(range(scaling.size))
        place = f"{lock_step.meeting_place}-{self._num_changes}"
        change = ChangeGroup(before, scaling.size, place)
        return [ToCore(rank, change) for rank in self._table.unaware]

    def _finish_if_done(self) -> list[Action]:
        scaling = self._current
        if scaling is None or not scaling.is_done:
            return []
        self._current = None
        members = self._table.members
        self._table.size = max(members) + 1
        return [
            ResizeCoordinator(self._table.size),
            RecordReady(self._table.ready_messages(), self._table.size),
            ToClient(scaling.asker, Scaled(len(members), scaling.error)),
        ]


def _end(life: RankLife, now: float) -> list[Action]:
    """End a core that has no requests."""
    waits = life.phase is RankPhase.WAITING
    life.dismiss()
    life.die(now + STOP_GRACE)
    return [ToCore(life.rank, ShutdownEngine()) if waits else SignalCores(signal.SIGTERM, [life.rank])]
