"""A process that moves is left alone; one that stands is told of in time, and ended in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.config.progress import LOAD_SECONDS, ProgressDeadlines
from nbengine.engine.host.progress_watch import LONGEST_TURN, OwnTurns, ProgressWatch
from nbengine.ipc.control_messages import Pulse, WorkerPulse
from nbengine.ipc.liveness import ProcessState

DEADLINES = ProgressDeadlines.of_step_timeout(20.0)
INTERVAL = DEADLINES.pulse_interval
KINDS = st.sampled_from(["load", "step", "call", "idle"])
STATES = {"runs": ProcessState.RUNNING, "stopped": ProcessState.STOPPED, "traced": ProcessState.TRACED}


def pulse(turns: int = 0, doing: str = "step", *workers: WorkerPulse) -> Pulse:
    return Pulse(0, turns, doing, f"in {doing}", list(workers))


class Core:
    """A core that pulses on time, unless it is held, and a host that looks when a deadline has come."""

    def __init__(self, doing: str = "step", *workers: WorkerPulse) -> None:
        self.watch = ProgressWatch(DEADLINES)
        self.now = self.turns = 0
        self.now = 0.0
        self.doing = doing
        self.workers = list(workers)
        self.state = ProcessState.RUNNING
        self.is_silent = False
        self.told: list[tuple[str, float]] = []
        self.watch.begin(0, self.now)
        self.pulses()

    def pulses(self) -> None:
        if self.watch.take(0, pulse(self.turns, self.doing, *self.workers), self.now):
            self.told.append(("recovered", self.now))

    def lives(self, seconds: float, *, moves: bool) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            self.turns += moves
            if not self.is_silent:
                self.pulses()
            self.looks()

    def looks(self) -> None:
        if self.watch.next_deadline() <= self.now:
            verdicts = self.watch.verdicts(self.now, lambda _: self.state)
            self.told += [("stalled", self.now) for _ in verdicts.stalled]
            self.told += [("overdue", self.now) for _ in verdicts.overdue]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@given(KINDS, st.lists(st.floats(0.01, 4.0), max_size=60), st.sampled_from(["turns", "worker"]))
def test_there_is_no_verdict_while_anything_is_counted(doing: str, pauses: list[float], who: str) -> None:
    watch, now, turns, ticks = ProgressWatch(DEADLINES), 0.0, 0, 0
    watch.begin(0, now)
    watch.take(0, pulse(0, doing, WorkerPulse(0, 0)), now)
    for pause in pauses:
        now += pause
        turns, ticks = turns + (who == "turns"), ticks + (who == "worker")
        watch.take(0, pulse(turns, doing, WorkerPulse(0, ticks), WorkerPulse(1, 7)), now)
        verdicts = watch.verdicts(now, lambda _: ProcessState.RUNNING)
        assert not verdicts.stalled
        assert not verdicts.overdue


@given(
    KINDS.filter(lambda doing: doing != "idle"),
    st.floats(0, 50),
    st.booleans(),
)
def test_what_stands_is_told_of_and_then_overdue_within_an_interval_of_its_deadlines(
    doing: str, moved_for: float, is_silent: bool
) -> None:
    core = Core(doing)
    core.lives(moved_for, moves=True)
    assert core.told == []
    stood_from, core.is_silent = core.now, is_silent
    core.lives(LOAD_SECONDS + 2 * INTERVAL, moves=False)
    assert core.kinds == ["stalled", "overdue"]
    for (_, at), deadline in zip(
        core.told, (DEADLINES.to_report(doing), DEADLINES.to_end(doing)), strict=True
    ):
        assert stood_from + deadline <= at <= stood_from + deadline + 2 * INTERVAL


def test_an_idle_core_that_pulses_stands_for_nobody_and_one_that_is_silent_or_has_a_stopped_worker_does() -> (
    None
):
    core = Core("idle", WorkerPulse(0, 5))
    core.lives(1000, moves=False)
    assert core.told == []
    core.is_silent = True
    core.lives(30, moves=False)
    assert core.kinds == ["stalled", "overdue"]
    core = Core("idle", WorkerPulse(0, 5), WorkerPulse(1, 5, state=ProcessState.STOPPED))
    core.lives(30, moves=False)
    assert core.kinds == ["stalled", "overdue"]


@given(st.lists(st.sampled_from(["idle", "step", "call"]), min_size=60, max_size=60))
def test_where_a_worker_is_stopped_calls_that_its_core_takes_are_no_progress(doing: list[str]) -> None:
    core = Core("idle", WorkerPulse(0, 5), WorkerPulse(1, 5))
    core.workers[1].state = ProcessState.STOPPED
    for kind in doing:
        core.doing = kind
        core.lives(0.5, moves=True)
    assert core.kinds == ["stalled", "overdue"]


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e4)), max_size=30))
def test_a_turn_that_takes_much_longer_than_its_wait_is_a_gap_and_no_other_is(
    turns: list[tuple[float, float]],
) -> None:
    own, now = OwnTurns(0.0), 0.0
    for allowed, took in turns:
        now += took
        gap = own.gap(allowed, now)
        assert gap == (pytest.approx(took - allowed, abs=1e-6) if took - allowed > LONGEST_TURN else 0)
    assert own.gap(math.inf, now + 1e9) == 0


def test_what_moves_again_before_the_deadline_has_recovered_and_may_stand_again() -> None:
    core = Core()
    core.lives(DEADLINES.step - 2, moves=False)
    core.lives(2, moves=True)
    core.lives(DEADLINES.step - 2, moves=False)
    assert core.kinds == ["stalled", "recovered", "stalled"]


@given(st.lists(st.tuples(st.floats(0.6, 1e5), st.floats(0, 4)), max_size=20))
def test_a_host_that_did_not_run_blames_nobody_for_it(gaps: list[tuple[float, float]]) -> None:
    core = Core()
    for gap, ran in gaps:
        # Stopped, or asleep: messages may lie there unread.
        core.now += gap
        core.watch.excuse(gap, core.now)
        core.looks()
        core.is_silent = True
        core.lives(min(ran, DEADLINES.to_report("step") - 2 * INTERVAL), moves=False)
        core.is_silent = False
        core.lives(2 * INTERVAL, moves=True)
    assert core.told == []


@given(st.floats(0, 1000), st.sampled_from(["core", "worker"]))
def test_what_a_debugger_holds_does_not_stand(held_for: float, who: str) -> None:
    core = Core("step", WorkerPulse(0, 1))
    if who == "core":
        core.state, core.is_silent = ProcessState.TRACED, True
    else:
        core.workers[0].state = ProcessState.TRACED
    core.lives(held_for, moves=False)
    assert core.told == []
    core.state, core.is_silent, core.workers[0].state = ProcessState.RUNNING, False, ProcessState.RUNNING
    # One looks when it is due to be told of: a hold that is over by then may count as long as that.
    core.lives(DEADLINES.step - DEADLINES.to_report("step") - 2 * INTERVAL, moves=False)
    assert "overdue" not in core.kinds


def test_a_start_without_a_pulse_is_overdue_after_its_own_deadline() -> None:
    watch = ProgressWatch(DEADLINES)
    watch.begin(3, 100.0)
    assert watch.next_deadline() == 100.0 + DEADLINES.to_report("start")
    now = 100.0 + DEADLINES.start
    (overdue,) = watch.verdicts(now, lambda _: ProcessState.RUNNING).overdue
    assert (overdue.rank, overdue.doing) == (3, "starting")
    watch.forget(3)
    assert watch.next_deadline() == math.inf


def test_without_a_limit_nothing_is_watched() -> None:
    watch = ProgressWatch(ProgressDeadlines.of_step_timeout(0))
    watch.begin(0, 0.0)
    watch.take(0, pulse(), 0.0)
    assert watch.next_deadline() == math.inf


@pytest.mark.parametrize(
    ("workers", "state", "expected"),
    [
        ([], "runs", "in step"),
        ([], "stopped", "in step; its process is stopped (SIGSTOP?)"),
        (
            [WorkerPulse(0, 1, waits=True), WorkerPulse(1, 1, state=ProcessState.STOPPED)],
            "runs",
            "in step; worker 1 is stopped (SIGSTOP?)",
        ),
        (
            [WorkerPulse(rank, 1, waits=rank != 2) for rank in range(4)],
            "runs",
            "in step; worker 2 is behind, the others wait",
        ),
        (
            [WorkerPulse(rank, 1, waits=rank > 1) for rank in range(4)],
            "runs",
            "in step; workers 0, 1 are behind, the others wait",
        ),
        (
            [WorkerPulse(0, 1, waits=True)],
            "runs",
            "in step; its workers wait for those of other engine cores",
        ),
    ],
)
def test_who_waits_is_told_from_who_is_waited_for(
    workers: list[WorkerPulse], state: str, expected: str
) -> None:
    core = Core("step", *workers)
    core.state = STATES[state]
    core.now = 6.0
    (stalled,) = core.watch.verdicts(core.now, lambda _: core.state).stalled
    assert (stalled.rank, stalled.seconds, stalled.doing) == (0, 6.0, expected)


def test_of_cores_in_lock_step_the_one_that_waits_for_nobody_is_to_blame() -> None:
    watch = ProgressWatch(DEADLINES)
    for rank in range(3):
        watch.begin(rank, 0.0)
        watch.take(rank, pulse(1, "step", WorkerPulse(0, 1, waits=rank != 2)), 0.0)
    watch.verdicts(30.0, lambda _: ProcessState.RUNNING)
    assert [watch.behind(rank, 30.0).rank for rank in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("late", [0.0, INTERVAL])
@pytest.mark.parametrize("what", ["core", "worker", "nothing"])
def test_what_is_stopped_is_told_of_before_the_cores_that_wait_for_it(
    what: str, late: float, place: int
) -> None:
    """Its last pulse may be an interval younger than the last progress of the core that waits for it."""
    watch, other = ProgressWatch(DEADLINES), 1 - place
    for rank in range(2):
        watch.begin(rank, 0.0)
    watch.take(other, pulse(1, "step", WorkerPulse(0, 1, waits=True)), 0.0)
    watch.take(place, pulse(1, "step", WorkerPulse(0, 1)), late)
    if what == "worker":
        watch.take(place, pulse(2, "step", WorkerPulse(0, 1, state=ProcessState.STOPPED)), 2 * INTERVAL)
    now = DEADLINES.to_report("step")

    def look(rank: int) -> ProcessState:
        return ProcessState.STOPPED if what == "core" and rank == place else ProcessState.RUNNING

    stalled = watch.verdicts(now, look).stalled
    again = watch.verdicts(now + INTERVAL, look).stalled
    if what == "nothing":
        assert {each.rank for each in stalled + again} == {other, place}, (
            "what is not stopped is not told of early"
        )
        assert len(stalled) == (1 if late else 2)
    else:
        assert [each.rank for each in stalled] == [place, other]
        assert "SIGSTOP?" in stalled[0].doing
        assert not again
    assert watch.take(place, pulse(3, "step", WorkerPulse(0, 2)), now + INTERVAL), "it recovers"
