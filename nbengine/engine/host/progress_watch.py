"""The watch over the engine cores' progress: pulses and looks in, verdicts out; no I/O, and no clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nbengine.config.progress import ProgressDeadlines
from nbengine.ipc.control_messages import Pulse, Stalled, WorkerPulse
from nbengine.ipc.liveness import ProcessState

Look = Callable[[int], ProcessState]
"""A function that returns the state of the process of a rank's engine core."""
Counters = tuple[int, ...]


LONGEST_TURN = 0.5
"""Most seconds that a turn of the host may take longer than planned; with more, the host did not run."""


class OwnTurns:
    """The turns of the watcher, which show whether it runs: a turn takes its waiting time, and a little."""

    def __init__(self, now: float) -> None:
        self.last = now
        """Time at which the last turn began."""

    def gap(self, allowed: float, now: float) -> float:
        """Begin a turn after a wait of at most `allowed` seconds; return the seconds without a turn, or 0."""
        gap = now - self.last - allowed
        self.last = now
        return gap if gap > LONGEST_TURN else 0.0


@dataclass(slots=True)
class _Watched:
    """One engine core's process."""

    since: float
    """Time at which its last progress was heard of."""
    pulse: Pulse | None = None
    counters: Counters = ()
    state: ProcessState = ProcessState.RUNNING
    """The state at the last look, which is taken only when a deadline has passed."""
    is_reported: bool = False
    is_overdue: bool = False
    said: str = ""
    """The words of its last report: what it does, and why it stands."""

    @property
    def kind(self) -> str:
        """Return the kind of deadline, that of a step while a worker is stopped, whatever the core does."""
        if self.pulse is None:
            return "start"
        stopped = any(worker.state is ProcessState.STOPPED for worker in self.pulse.workers)
        return "step" if stopped else self.pulse.doing

    def moves(self, pulse: Pulse) -> bool:
        """Tell whether a pulse shows progress: something was counted, or there is nothing to count.

        While a worker is stopped there is no progress, whatever the core counts. A process that a debugger
        holds counts as one that moves.
        """
        states = _states(pulse)
        if ProcessState.TRACED in states or self.pulse is None:
            return True
        if ProcessState.STOPPED in states:
            return False
        changes = pulse.doing != self.pulse.doing or _counters(pulse) != self.counters
        return changes or pulse.doing == "idle"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The result of a look at the deadlines: cores to report, and cores to end."""

    stalled: list[Stalled]
    overdue: list[Stalled]


class ProgressWatch:
    """A watch over the cores that have a process. Times are those of one monotonic clock.

    A core is *reported* when it has stood for a while, and *overdue* when it has stood longer than its
    activity allows. Each is said once; a core can be reported again after it has moved, or when more is known of
    why it stands.
    """

    def __init__(self, deadlines: ProgressDeadlines) -> None:
        self._deadlines = deadlines
        self._watched: dict[int, _Watched] = {}

    def begin(self, rank: int, now: float) -> None:
        """Note that a core's process has been started."""
        self._watched[rank] = _Watched(now)

    def forget(self, rank: int) -> None:
        """Note that a core's process is gone, or is about to be."""
        self._watched.pop(rank, None)

    def take(self, rank: int, pulse: Pulse, now: float) -> bool:
        """Take in a pulse of a core; return whether the core moves again after it was reported."""
        watched = self._watched.get(rank)
        if watched is None:
            return False
        # A pulse of a core that a debugger held shows that the debugger has let it go.
        moves = watched.state is ProcessState.TRACED or watched.moves(pulse)
        watched.pulse, watched.counters = pulse, _counters(pulse)
        watched.state = ProcessState.RUNNING
        if not moves:
            return False
        watched.since = max(watched.since, now)
        recovers, watched.is_reported = watched.is_reported, False
        # A core that is overdue is being ended, and does not recover any more.
        return recovers and not watched.is_overdue

    def loaded(self, rank: int, now: float) -> None:
        """Note that a core has loaded everything, and waits for work until its next pulse says otherwise."""
        watched = self._watched.get(rank)
        if watched is not None:
            watched.pulse = Pulse(0, 0, "idle", "waiting for work")
            watched.since = max(watched.since, now)

    def excuse(self, seconds: float, now: float) -> None:
        """Forgive silence in the last `seconds` seconds, in which the watcher itself did not run."""
        for watched in self._watched.values():
            watched.since = min(now, watched.since + seconds)

    def next_deadline(self) -> float:
        """Return the time at which `verdicts` has something to say unless a core moves; infinity if never."""
        return min(map(self._due, self._watched.values()), default=math.inf)

    def verdicts(self, now: float, look: Look) -> Verdicts:
        """Find the cores that have stood for too long; those that a debugger holds have not stood at all."""
        found = Verdicts([], [])
        for rank, watched in self._watched.items():
            if self._due(watched) > now:
                continue
            watched.state = look(rank)
            if watched.state is ProcessState.TRACED:
                watched.since = now
            elif now - watched.since >= self._deadlines.to_end(watched.kind):
                watched.is_reported = watched.is_overdue = True
                found.overdue.append(self._stalled(rank, now))
            else:
                watched.is_reported = True
                found.stalled.append(self._report(rank, now))
        if found.stalled:
            found.stalled.extend(self._stopped_before_due(now, look))
            found.stalled.sort(key=lambda stalled: not self._is_stopped(stalled.rank))
        return found

    def learned(self, rank: int, now: float) -> Stalled | None:
        """Return the report of a core that still stands if its last pulse says something new of it, else None."""
        watched = self._watched.get(rank)
        if watched is None or not watched.is_reported or watched.is_overdue:
            return None
        said = watched.said
        report = self._report(rank, now)
        return None if report.doing == said else report

    def reported(self, now: float) -> list[Stalled]:
        """Return the cores that have been reported and still stand."""
        return [self._stalled(rank, now) for rank, watched in self._watched.items() if watched.is_reported]

    def behind(self, rank: int, now: float) -> Stalled:
        """Find the core for which `rank` waits: one that stands and waits for nobody, else `rank` itself."""
        own = self._watched[rank]
        if own.pulse is not None and any(worker.waits for worker in own.pulse.workers):
            for other, watched in self._watched.items():
                waits = watched.pulse is not None and all(w.waits for w in watched.pulse.workers)
                if other != rank and not waits and now - watched.since >= self._patience(watched):
                    return self._stalled(other, now)
        return self._stalled(rank, now)

    def _stopped_before_due(self, now: float, look: Look) -> list[Stalled]:
        """Report the other cores that are stopped, or have a stopped worker, before they are due.

        The core that is reported may wait for them, and its report alone would name no cause: the last pulse of
        what is stopped is up to an interval younger than the last progress of what waits for it.
        """
        found = []
        for rank, watched in self._watched.items():
            if not watched.is_reported:
                watched.state = look(rank)
                if self._is_stopped(rank):
                    watched.is_reported = True
                    found.append(self._report(rank, now))
        return found

    def _is_stopped(self, rank: int) -> bool:
        watched = self._watched[rank]
        states = set() if watched.pulse is None else _states(watched.pulse)
        return ProcessState.STOPPED in {watched.state, *states}

    def _due(self, watched: _Watched) -> float:
        if watched.is_overdue:
            return math.inf
        if watched.is_reported:
            return watched.since + self._deadlines.to_end(watched.kind)
        return watched.since + self._patience(watched)

    def _patience(self, watched: _Watched) -> float:
        return self._deadlines.to_report(watched.kind)

    def _report(self, rank: int, now: float) -> Stalled:
        report = self._stalled(rank, now)
        self._watched[rank].said = report.doing
        return report

    def _stalled(self, rank: int, now: float) -> Stalled:
        watched = self._watched[rank]
        return Stalled(rank, now - watched.since, describe(watched.pulse, watched.state))


def describe(pulse: Pulse | None, state: ProcessState) -> str:
    """Say what a core is doing, and what is known of why it stands: "in step 1,234; worker 1 is stopped
    (SIGSTOP?)"."""
    doing = "starting" if pulse is None else pulse.detail
    if state is ProcessState.STOPPED:
        return f"{doing}; its process is stopped (SIGSTOP?)"
    workers = [] if pulse is None else pulse.workers
    stopped = [worker for worker in workers if worker.state is ProcessState.STOPPED]
    if stopped:
        return f"{doing}; {_named(stopped)} stopped (SIGSTOP?)"
    held_up = [worker for worker in workers if not worker.waits]
    if workers and not held_up:
        return f"{doing}; its workers wait for those of other engine cores"
    if len(held_up) < len(workers):
        return f"{doing}; {_named(held_up)} behind, the others wait"
    return doing


def _named(workers: list[WorkerPulse]) -> str:
    ranks = ", ".join(str(worker.rank) for worker in workers)
    return f"worker {ranks} is" if len(workers) == 1 else f"workers {ranks} are"


def _states(pulse: Pulse) -> set[ProcessState]:
    return {worker.state for worker in pulse.workers}


def _counters(pulse: Pulse) -> Counters:
    return (pulse.turns, *(worker.ticks for worker in pulse.workers))
