"""The life of every data-parallel rank, seen from the host; pure like `HostState`.

STARTING ──► READY ──► LEAVING ──► GONE          scaled down: it drains, and its process ends
    │           └────► DYING ────► DOWN          its process ends; then it waits to be started again,
    ├────────────────►   │           └─► STARTING    with the next incarnation
    │                    └───────► GONE          it is not wanted any more, or has died too often
    └─► WAITING ──► READY                        in lock step: it comes to others that step already
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from nbengine.ipc.control_messages import EngineReady, Progress

FIRST_RESTART_DELAY = 0.25
"""Seconds until a rank that has died is started again; twice as long each further time."""
MAX_DEATHS = 3
"""How often a rank may die before it is given up."""
FORGIVEN_AFTER = 60.0
"""Seconds of taking requests after which a rank's earlier deaths do not count any more."""


class RankPhase(enum.Enum):
    """Life of a rank."""

    STARTING = "starting"
    WAITING = "waiting"
    """It has loaded the model, and is about to join others in lock step."""
    READY = "ready"
    LEAVING = "leaving"
    """It finishes what runs and takes nothing new."""
    DYING = "dying"
    """Its process has been told to end, or has said that it will."""
    DOWN = "down"
    """It has no process, and will have one again."""
    GONE = "gone"
    """It has no process."""


_WITHOUT_PROCESS = (RankPhase.DOWN, RankPhase.GONE)


@dataclass(slots=True)
class RankLife:
    """One rank. Times are those that the caller of `HostState` gives."""

    rank: int
    incarnation: int = 0
    phase: RankPhase = RankPhase.STARTING
    greeted: bool = False
    """Its present process has said Hello."""
    ready: EngineReady | None = None
    """What it said when it last became ready."""
    progress: Progress | None = None
    kill_at: float = math.inf
    restart_at: float = math.inf
    wanted: bool = True
    """It is to be started again when its process has ended."""
    deaths: int = 0
    ready_since: float = math.inf

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.phase not in _WITHOUT_PROCESS

    @property
    def is_unaware(self) -> bool:
        """Whether it has a process, and that does not know yet that it is to end now."""
        return self.runs and self.phase is not RankPhase.DYING

    def become_ready(self, message: EngineReady, now: float) -> None:
        """Take requests from now on."""
        self.phase, self.ready, self.ready_since = RankPhase.READY, message, now

    def start(self) -> None:
        """Get a process, of the next incarnation."""
        self.incarnation += 1
        self.phase, self.greeted, self.ready, self.progress = RankPhase.STARTING, False, None, None
        self.restart_at, self.wanted = math.inf, True

    def count_death(self, now: float) -> None:
        """Note that it has died, or is about to; too many deaths, and it is not wanted any more."""
        lasted = now - self.ready_since if self.phase is RankPhase.READY else 0.0
        self.deaths = 1 if lasted >= FORGIVEN_AFTER else self.deaths + 1
        self.wanted = self.wanted and self.deaths <= MAX_DEATHS

    def die(self, kill_at: float) -> None:
        """Its process ends, at the latest when it is killed."""
        self.phase, self.kill_at = RankPhase.DYING, kill_at

    def end(self, now: float) -> None:
        """Its process is gone: wait to be started again if it is wanted."""
        self.kill_at = math.inf
        if self.wanted:
            self.phase = RankPhase.DOWN
            self.restart_at = now + FIRST_RESTART_DELAY * 2 ** max(0, self.deaths - 1)
        else:
            self.phase = RankPhase.GONE

    def dismiss(self) -> None:
        """Not to be started again; a rank without a process is gone at once."""
        self.wanted, self.restart_at = False, math.inf
        if self.phase is RankPhase.DOWN:
            self.phase = RankPhase.GONE


class RankTable:
    """All ranks that there have ever been, so that no incarnation comes twice; `size` of them are meant to be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lives = {rank: RankLife(rank) for rank in range(size)}

    def __getitem__(self, rank: int) -> RankLife:
        return self._lives[rank]

    def all(self) -> list[RankLife]:
        """Every rank, in order."""
        return sorted(self._lives.values(), key=lambda life: life.rank)

    def ranks(self, *phases: RankPhase) -> list[int]:
        """The ranks in any of some phases, in order."""
        return [life.rank for life in self.all() if life.phase in phases]

    @property
    def ready(self) -> list[int]:
        """The ranks that take requests."""
        return self.ranks(RankPhase.READY)

    @property
    def running(self) -> list[int]:
        """The ranks that have a process."""
        return [life.rank for life in self.all() if life.runs]

    @property
    def hearing(self) -> list[int]:
        """The ranks that are told of clients that go."""
        return [life.rank for life in self.all() if life.greeted and life.runs]

    @property
    def welcoming(self) -> list[int]:
        """The ranks that are told of clients that come."""
        known = (RankPhase.STARTING, RankPhase.WAITING, RankPhase.READY)
        return [rank for rank in self.ranks(*known) if self[rank].greeted]

    @property
    def members(self) -> list[int]:
        """The ranks that take requests, or will."""
        return [life.rank for life in self.all() if life.phase is not RankPhase.GONE and life.wanted]

    @property
    def unaware(self) -> list[int]:
        """The ranks that have a process which does not know yet that it is to end now."""
        return [life.rank for life in self.all() if life.is_unaware]

    def ready_messages(self) -> list[EngineReady]:
        """What the ranks that take requests said when they became ready."""
        return [life.ready for life in self.all() if life.phase is RankPhase.READY and life.ready is not None]

    def recall(self, size: int) -> set[int]:
        """Want all ranks below `size`; returns those that were not wanted. Whoever is GONE is to be started."""
        recalled = set()
        for rank in range(size):
            life = self._lives.setdefault(rank, RankLife(rank, incarnation=-1, phase=RankPhase.GONE))
            if life.phase is RankPhase.GONE or not life.wanted:
                life.wanted, life.deaths = True, 0
                recalled.add(rank)
        return recalled

    def dismiss_from(self, size: int) -> set[int]:
        """Want no rank from `size` on; returns those that still run. What takes messages is LEAVING from now on."""
        dismissed = [life for life in self.all() if life.rank >= size]
        for life in dismissed:
            life.dismiss()
            if life.phase in (RankPhase.READY, RankPhase.WAITING):
                life.phase = RankPhase.LEAVING
        return {life.rank for life in dismissed if life.runs}

    def next_deadline(self) -> float:
        """When a process is to be killed or started, infinity if none is."""
        return min(min(life.kill_at, life.restart_at) for life in self._lives.values())

    def due_restarts(self, now: float) -> list[RankLife]:
        """The ranks that are to be started again now."""
        return [life for life in self.all() if life.restart_at <= now]

    def take_due_kills(self, now: float) -> list[int]:
        """The ranks whose processes are to be killed now, which is told once."""
        due = [life for life in self.all() if life.kill_at <= now]
        for life in due:
            life.kill_at = math.inf
        return [life.rank for life in due]
