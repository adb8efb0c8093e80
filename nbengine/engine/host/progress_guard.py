"""The guard against engine cores that stand: it tells the clients, has stacks written, then ends the core;
pure like `HostState`."""

from __future__ import annotations

from collections.abc import Callable

from nbengine.config.progress import ProgressDeadlines
from nbengine.engine.host.events import Action, GatherStacks, RecordStalled
from nbengine.engine.host.progress_watch import Look, ProgressWatch
from nbengine.engine.host.rank_table import RankLife, RankTable
from nbengine.ipc.control_messages import EngineDead, HostToClient, Pulse, Recovered, Stalled


class ProgressGuard:
    """A `ProgressWatch` over the ranks of a table. `tell` returns actions that send all clients a message."""

    def __init__(
        self,
        table: RankTable,
        deadlines: ProgressDeadlines,
        look: Look,
        tell: Callable[[HostToClient], list[Action]],
        *,
        in_lock_step: bool,
    ) -> None:
        self._table = table
        self._watch = ProgressWatch(deadlines)
        self._look = look
        self._tell = tell
        self._in_lock_step = in_lock_step
        self._overdue: dict[int, Stalled] = {}
        """By rank, the reason why its core is about to be ended."""

    def begin(self, rank: int, now: float) -> None:
        """Note that the process of a core is started."""
        self._watch.begin(rank, now)

    def forget(self, rank: int) -> None:
        """Note that the process of a core is gone."""
        self._watch.forget(rank)
        self._overdue.pop(rank, None)

    def loaded(self, rank: int, now: float) -> None:
        """Note that a core is ready."""
        self._watch.loaded(rank, now)

    def excuse(self, seconds: float, now: float) -> None:
        """Note that the host itself did not run for `seconds`: silence during that time does not count."""
        self._watch.excuse(seconds, now)

    def next_deadline(self) -> float:
        """Return the time at which `judge` has something to say unless a core moves, infinity if never."""
        return self._watch.next_deadline()

    def news(self, now: float) -> list[Stalled]:
        """Return the messages that a client that comes now has to get."""
        return self._watch.reported(now)

    def on_pulse(self, life: RankLife, pulse: Pulse, now: float) -> list[Action]:
        """Take in the pulse of a core, and tell the clients if it moves again, or more is known of why it stands."""
        if pulse.incarnation != life.incarnation:
            return []
        if self._watch.take(life.rank, pulse, now):
            return [*self._tell(Recovered(life.rank)), self._record(now)]
        learned = self._watch.learned(life.rank, now)
        return [] if learned is None else self._tell(learned)

    def judge(self, now: float) -> list[Action]:
        """Report the cores that have stood for a while, and begin to end those that have for too long."""
        verdicts = self._watch.verdicts(now, self._look)
        actions = [action for stalled in verdicts.stalled for action in self._tell(stalled)]
        if verdicts.stalled:
            actions.append(self._record(now))
        for stalled in verdicts.overdue:
            life = self._table[stalled.rank]
            if life.is_unaware:
                blamed = self._watch.behind(life.rank, now) if self._in_lock_step else stalled
                self._overdue[life.rank] = blamed
                actions.append(GatherStacks(life.rank))
        return actions

    def conclude(self, life: RankLife, incarnation: int, stacks: str) -> EngineDead | None:
        """Say why an overdue core, whose stacks are there now, is ended; None if it has ended already."""
        stalled = self._overdue.pop(life.rank, None)
        if stalled is None or life.incarnation != incarnation or not life.is_unaware:
            return None
        self._watch.forget(life.rank)
        cause = f"engine core {stalled.rank} made no progress for {stalled.seconds:.0f} s, {stalled.doing}"
        return EngineDead(cause + (" (its log has the stacks of its threads)" if stacks else ""), stacks)

    def _record(self, now: float) -> RecordStalled:
        return RecordStalled([stalled.rank for stalled in self._watch.reported(now)])
