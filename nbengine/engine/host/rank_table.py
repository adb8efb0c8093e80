"""The lives of all data-parallel ranks, as the host sees them; pure like `HostState`.

QUEUED ──► STARTING                              few are started at a time
STARTING ──► READY ──► LEAVING ──► GONE          scaled down: it drains, and its process ends
    │           └────► DYING ────► DOWN          its process ends; then it waits to be started again,
    ├────────────────►   │           └─► QUEUED      with the next incarnation
    │                    └───────► GONE          it is not wanted any more, or has died too often
    └─► WAITING ──► READY                        in lock step: it comes to others that step already
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass, field

from nbengine.ipc.control_messages import EngineReady, Progress

FIRST_RESTART_DELAY = 0.25
"""Seconds until a rank that has died is started again; they double with each further death."""
MAX_DEATHS = 3
"""Number of deaths after which a rank is started again; with one more it is given up."""
FORGIVEN_AFTER = 60.0
"""Seconds of taking requests after which a rank's earlier deaths do not count any more."""


class RankPhase(enum.Enum):
    """The phases of a rank's life."""

    QUEUED = "queued"
    """The rank has no process, and gets one as soon as others have started."""
    STARTING = "starting"
    WAITING = "waiting"
    """The rank has loaded the model, and is about to join others in lock step."""
    READY = "ready"
    LEAVING = "leaving"
    """The rank finishes its running requests and takes no new ones."""
    DYING = "dying"
    """The rank's process has been told to end, or has said that it will."""
    DOWN = "down"
    """The rank has no process, and will have one again."""
    GONE = "gone"
    """The rank has no process, and will not have one unless it is recalled."""


_WITHOUT_PROCESS = (RankPhase.QUEUED, RankPhase.DOWN, RankPhase.GONE)


@dataclass(slots=True)
class RankLife:
    """The life of one rank. Times are those that the caller of `HostState` gives."""

    rank: int
    incarnation: int = -1
    """Number of the start that made the present or last process; -1 before the first."""
    phase: RankPhase = RankPhase.GONE
    greeted: bool = False
    """True if the present process has said Hello."""
    ready: EngineReady | None = None
    """The message with which the present process became ready."""
    reports: dict[tuple[str, int | None], Progress] = field(default_factory=dict)
    """The latest reports of the present process on its start, by stage and worker."""
    kill_at: float = math.inf
    restart_at: float = math.inf
    wanted: bool = True
    """True if the rank is to be started again when its process has ended."""
    deaths: int = 0
    ready_since: float = math.inf

    @property
    def runs(self) -> bool:
        """Tell whether the rank has a process."""
        return self.phase not in _WITHOUT_PROCESS

    @property
    def is_unaware(self) -> bool:
        """Tell whether the rank has a process that does not know yet that it is to end now."""
        return self.runs and self.phase is not RankPhase.DYING

    def become_ready(self, message: EngineReady, now: float) -> None:
        """Note that the rank takes requests from now on."""
        self.phase, self.ready, self.ready_since = RankPhase.READY, message, now

    def queue(self) -> None:
        """Wait for a process until it is this rank's turn."""
        self.phase, self.restart_at, self.wanted = RankPhase.QUEUED, math.inf, True

    def start(self) -> None:
        """Begin the next incarnation, for which a process is started."""
        self.incarnation += 1
        self.phase, self.greeted, self.ready = RankPhase.STARTING, False, None
        self.reports = {}

    def take_report(self, report: Progress) -> None:
        """Keep a report of the start; those of later loads concern clients that are attached."""
        if self.phase is RankPhase.STARTING:
            self.reports[report.stage, report.worker] = report

    def count_death(self, now: float) -> None:
        """Note that the rank has died, or is about to; after too many deaths it is not wanted any more."""
        lasted = now - self.ready_since if self.phase is RankPhase.READY else 0.0
        self.deaths = 1 if lasted >= FORGIVEN_AFTER else self.deaths + 1
        self.wanted = self.wanted and self.deaths <= MAX_DEATHS

    def die(self, kill_at: float) -> None:
        """Note that the process ends, at the latest at `kill_at`, when it is killed."""
        self.phase, self.kill_at = RankPhase.DYING, kill_at

    def end(self, now: float) -> None:
        """Note that the process is gone: wait to be started again if the rank is wanted."""
        self.kill_at = math.inf
        if self.wanted:
            self.phase = RankPhase.DOWN
            self.restart_at = now + FIRST_RESTART_DELAY * 2 ** max(0, self.deaths - 1)
        else:
            self.phase = RankPhase.GONE

    def dismiss(self) -> None:
        """Want the rank no more, so that it is not started again; without a process it is gone at once."""
        self.wanted, self.restart_at = False, math.inf
        if not self.runs:
            self.phase = RankPhase.GONE


class RankTable:
    """All ranks that have ever been, so that no incarnation comes twice; `size` of them are meant to be.

    At most `max_starting` start at a time. A start is over when the rank is ready, or with `until_hello` when
    its process has said Hello: ranks that meet each other before they get ready must all have a process.
    """

    def __init__(self, size: int, max_starting: int = sys.maxsize, *, until_hello: bool = False) -> None:
        self.size = size
        self._max_starting = max_starting
        self._until_hello = until_hello
        self._lives = {rank: RankLife(rank, phase=RankPhase.QUEUED) for rank in range(size)}
        """In the order of their ranks, because only higher ones come, one after the other, and none goes."""

    def __getitem__(self, rank: int) -> RankLife:
        return self._lives[rank]

    def all(self) -> list[RankLife]:
        """Return the lives of all ranks, in order."""
        return list(self._lives.values())

    def ranks(self, *phases: RankPhase) -> list[int]:
        """Return the ranks that are in one of `phases`, in order."""
        return [life.rank for life in self.all() if life.phase in phases]

    @property
    def ready(self) -> list[int]:
        """Return the ranks that take requests."""
        return self.ranks(RankPhase.READY)

    @property
    def running(self) -> list[int]:
        """Return the ranks that have a process."""
        return [life.rank for life in self.all() if life.runs]

    @property
    def coming(self) -> list[int]:
        """Return the ranks that have a process, or will have their first one."""
        return [life.rank for life in self.all() if life.runs or life.phase is RankPhase.QUEUED]

    @property
    def hearing(self) -> list[int]:
        """Return the ranks that are told of clients that go."""
        return [life.rank for life in self.all() if life.greeted and life.runs]

    @property
    def welcoming(self) -> list[int]:
        """Return the ranks that are told of clients that come."""
        known = (RankPhase.STARTING, RankPhase.WAITING, RankPhase.READY)
        return [rank for rank in self.ranks(*known) if self[rank].greeted]

    @property
    def members(self) -> list[int]:
        """Return the ranks that take requests, or will."""
        return [life.rank for life in self.all() if life.phase is not RankPhase.GONE and life.wanted]

    @property
    def unaware(self) -> list[int]:
        """Return the ranks that have a process which does not know yet that it is to end now."""
        return [life.rank for life in self.all() if life.is_unaware]

    def ready_messages(self) -> list[EngineReady]:
        """Return the messages with which the ranks that take requests became ready."""
        return [life.ready for life in self.all() if life.phase is RankPhase.READY and life.ready is not None]

    def start_reports(self) -> list[Progress]:
        """Return what the ranks' present processes have reported of their starts."""
        return [report for life in self.all() for report in life.reports.values()]

    def recall(self, size: int) -> set[int]:
        """Want all ranks below `size`, and return those that were not wanted; GONE ones are to be queued."""
        recalled = set()
        for rank in range(size):
            life = self._lives.setdefault(rank, RankLife(rank))
            if life.phase is RankPhase.GONE or not life.wanted:
                life.wanted, life.deaths = True, 0
                recalled.add(rank)
        return recalled

    def dismiss_from(self, size: int) -> set[int]:
        """Want no rank from `size` on, and return those that run; READY and WAITING ones become LEAVING."""
        dismissed = [life for life in self.all() if life.rank >= size]
        for life in dismissed:
            life.dismiss()
            if life.phase in (RankPhase.READY, RankPhase.WAITING):
                life.phase = RankPhase.LEAVING
        return {life.rank for life in dismissed if life.runs}

    def next_start(self) -> RankLife | None:
        """Return the rank whose process is to be started now, None if there is none."""
        lives = self._lives.values()
        queued = next((life for life in lives if life.phase is RankPhase.QUEUED), None)
        if queued is None:
            return None
        under_way = [
            rank
            for rank in self.ranks(RankPhase.STARTING)
            if not (self._until_hello and self._lives[rank].greeted)
        ]
        return queued if len(under_way) < self._max_starting else None

    def next_deadline(self) -> float:
        """Return when a process is to be killed or started, 0 for a start now, infinity for never."""
        if self.next_start() is not None:
            return 0.0
        return min([min(life.kill_at, life.restart_at) for life in self._lives.values()])

    def excuse(self, seconds: float) -> None:
        """Give processes that are to end `seconds` more: the host did not run for that time."""
        for life in self._lives.values():
            life.kill_at += seconds

    def due_restarts(self, now: float) -> list[RankLife]:
        """Return the ranks that are to be started again now."""
        return [life for life in self.all() if life.restart_at <= now]

    def take_due_kills(self, now: float) -> list[int]:
        """Return the ranks whose processes are to be killed now; each is returned once."""
        due = [life for life in self.all() if life.kill_at <= now]
        for life in due:
            life.kill_at = math.inf
        return [life.rank for life in due]
