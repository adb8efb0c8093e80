"""The host tells clients of engine cores that stand, and ends those that stand for too long."""

from __future__ import annotations

import signal

from nbengine.config.progress import ProgressDeadlines
from nbengine.engine.host.events import (
    GatherStacks,
    HostStood,
    RecordStalled,
    SignalCores,
    StacksGathered,
    StartCore,
)
from nbengine.engine.host.rank_table import RankPhase
from nbengine.engine.host.state import HostPhase
from nbengine.ipc.control_messages import (
    EngineLost,
    Heartbeat,
    HeartbeatAck,
    Pulse,
    RanksChanged,
    Recovered,
    Stalled,
    WorkerPulse,
)
from nbengine.ipc.liveness import ProcessState
from tests.unit.engine.host_rig import LOCK_STEP, Host, attach, come_up, kill, only, ready, started, told

TIMEOUT = 20.0
REPORTED = ProgressDeadlines.of_step_timeout(TIMEOUT).to_report("step")


def pulse(
    host: Host, rank: int, turns: int, doing: str = "step", *, incarnation: int = 0, waits: bool = False
):
    return host.core(Pulse(incarnation, turns, doing, f"in {doing}", [WorkerPulse(0, 1, waits)]), rank)


def engine(ranks: int, **config) -> Host:
    host = started(ranks, lease=1e9, step_timeout=TIMEOUT, **config)
    for rank in range(ranks):
        pulse(host, rank, 1)
    return host


def test_a_core_that_stands_is_told_to_all_clients_and_to_those_that_come_and_so_is_its_recovery() -> None:
    host = engine(1)
    actions = host.at(REPORTED)
    (stalled,) = told(actions)
    assert stalled == Stalled(0, REPORTED, "in step")
    assert only(actions, RecordStalled) == [RecordStalled([0])]
    host.now += 1
    assert Stalled(0, REPORTED + 1, "in step") in told(host.client(attach("b"), b"b"), b"b")
    actions = pulse(host, 0, 2)
    assert told(actions) == told(actions, b"b") == [Recovered(0)]
    assert only(actions, RecordStalled) == [RecordStalled([])]


def test_a_report_is_said_again_when_more_is_known_of_why_a_core_stands() -> None:
    host = engine(1)
    assert told(host.at(REPORTED)) == [Stalled(0, REPORTED, "in step")]
    assert told(pulse(host, 0, 1)) == []
    stopped = Pulse(0, 1, "step", "in step", [WorkerPulse(0, 1, state=ProcessState.STOPPED)])
    known = Stalled(0, REPORTED, "in step; worker 0 is stopped (SIGSTOP?)")
    assert told(host.core(stopped, 0)) == [known]
    assert told(host.core(stopped, 0)) == []
    assert known in told(host.client(attach("b"), b"b"), b"b")
    assert told(pulse(host, 0, 2)) == [Recovered(0)]


def test_an_independent_core_that_stands_for_too_long_is_asked_for_its_stacks_killed_and_started_again() -> (
    None
):
    host = engine(2)
    host.now = TIMEOUT - 1
    pulse(host, 1, 2)
    actions = host.at(TIMEOUT)
    assert only(actions, GatherStacks) == [GatherStacks(0)]
    assert not only(actions, SignalCores)
    actions = host.state.handle(StacksGathered(0, 0, "engine core 0 is in:\n  File"), host.now)
    (_, lost) = told(actions)
    assert told(actions)[0] == RanksChanged([1])
    assert isinstance(lost, EngineLost)
    assert lost.cause.startswith("engine core 0 made no progress for 20 s, in step (its log has")
    assert lost.log_tail.endswith("File")
    assert lost.restarting
    assert only(actions, SignalCores) == [SignalCores(signal.SIGKILL, [0])]
    kill(host, 0)
    assert only(host.at(host.state._table[0].restart_at), StartCore) == [StartCore(0, 1)]
    come_up(host, 0, 1)
    assert host.state._table.ready == [0, 1]


def test_the_only_core_that_stands_ends_the_engine_with_the_cause_and_the_stacks() -> None:
    host = engine(1)
    host.at(TIMEOUT)
    host.state.handle(StacksGathered(0, 0, "stacks"), host.now)
    assert host.state.phase is HostPhase.STOPPING
    (end,) = kill(host, 0)[-1:]
    assert end.notice.cause.startswith("engine core 0 made no progress for 20 s, in step")
    assert end.notice.log_tail == "stacks"


def test_in_lock_step_the_core_that_others_wait_for_is_named() -> None:
    host = engine(3, model=LOCK_STEP)
    for rank in range(3):
        pulse(host, rank, 2, waits=rank != 1)
    actions = host.at(TIMEOUT)
    assert only(actions, GatherStacks) == [GatherStacks(rank) for rank in range(3)]
    host.state.handle(StacksGathered(0, 0, ""), host.now)
    assert host.state._notice is not None
    assert host.state._notice.cause.startswith("engine core 1 made no progress for 20 s")


def test_stacks_of_a_core_that_has_ended_meanwhile_end_nobody() -> None:
    host = engine(2)
    host.at(TIMEOUT)
    kill(host, 0)
    assert host.state.handle(StacksGathered(0, 0, "late"), host.now) == []
    assert host.state._table[0].phase is RankPhase.DOWN


def test_a_pulse_of_an_earlier_process_is_none_of_its_successor() -> None:
    host = engine(2)
    kill(host, 0)
    host.at(host.state._table[0].restart_at)
    come_up(host, 0, 1)
    begun = host.now
    pulse(host, 0, 5, incarnation=1)
    pulse(host, 1, 9)
    host.now = begun + REPORTED - 0.1
    assert pulse(host, 0, 99, incarnation=0) == []
    pulse(host, 1, 10)
    assert told(host.at(begun + REPORTED)) == [Stalled(0, REPORTED, "in step")]


def test_a_core_that_stands_as_soon_as_it_is_ready_does_not_have_the_time_of_a_load() -> None:
    host = Host(1, lease=1e9, step_timeout=TIMEOUT).greet()
    pulse(host, 0, 1, "load")
    host.now = 100.0
    host.core(ready(0))
    assert only(host.at(host.now + TIMEOUT), GatherStacks) == [GatherStacks(0)]


def test_a_host_that_did_not_run_drops_no_lease_and_blames_no_core() -> None:
    host = started(1, lease=30.0, step_timeout=TIMEOUT)
    pulse(host, 0, 1)
    host.now = 1000.0
    host.state.handle(HostStood(999.0), host.now)
    assert host.at(1000.0) == []
    assert told(host.client(Heartbeat())) == [HeartbeatAck()]
