"""Ranks that come and leave, independent ones and those in lock step, on a fake clock."""

from __future__ import annotations

import math
import signal

import pytest

from nbengine.engine.host.events import (
    CoreReady,
    End,
    RecordReady,
    ResizeCoordinator,
    SignalCores,
    StartCore,
    ToClient,
    ToCore,
)
from nbengine.engine.host.rank_table import MAX_DEATHS
from nbengine.engine.host.scaling import STOP_GRACE, LockStep
from nbengine.ipc.control_messages import (
    Attached,
    ChangeGroup,
    EngineDead,
    EngineHandshakeMetadata,
    EngineLost,
    Hello,
    RanksChanged,
    Scaled,
    Shutdown,
    ShutdownEngine,
)
from nbengine.ipc.protocol import PROTOCOL
from tests.unit.engine.host_rig import (
    KILLED,
    LOCK_STEP,
    MISFITS,
    Host,
    attach,
    come_up,
    confirm,
    kill,
    only,
    ready,
    ready_again,
    scale,
    started,
    tick,
    told,
)


def test_ranks_that_come_are_announced_one_by_one_and_the_asker_hears_when_all_have() -> None:
    host = started(ranks=1)
    actions = scale(host, 3)
    assert only(actions, ResizeCoordinator) == [ResizeCoordinator(3)]
    assert only(actions, StartCore) == [StartCore(1, 0), StartCore(2, 0)]
    assert told(actions) == []
    assert told(come_up(host, 2, 0)) == [ready(2), RanksChanged([0, 2])]
    actions = come_up(host, 1, 0)
    assert told(actions) == [ready(1), RanksChanged([0, 1, 2]), Scaled(3)]
    assert only(actions, RecordReady)[-1] == RecordReady([ready(0), ready(1), ready(2)], 3)


def test_ranks_that_leave_get_no_new_requests_before_they_are_asked_to_drain() -> None:
    host = started(ranks=3)
    actions = scale(host, 1)
    changed = actions.index(ToClient(b"a", RanksChanged([0])))
    farewells = [ToCore(rank, ShutdownEngine(drain=True, requeue=True)) for rank in (1, 2)]
    assert actions[-2:] == farewells
    assert changed < len(actions) - 2
    assert told(host.exit(2)) == []
    actions = host.exit(1)
    assert told(actions) == [Scaled(1)]
    assert only(actions, ResizeCoordinator) == [ResizeCoordinator(1)]
    assert only(actions, RecordReady) == [RecordReady([ready(0)], 1)]


def test_a_rank_that_comes_again_has_the_next_incarnation() -> None:
    host = started(ranks=2)
    scale(host, 1)
    host.exit(1)
    assert only(scale(host, 2), StartCore) == [StartCore(1, 1)]
    assert told(come_up(host, 1, 1)) == [ready_again(1, 1), RanksChanged([0, 1]), Scaled(2)]


def test_a_rank_that_does_not_come_up_leaves_the_others_as_they_are() -> None:
    host = started(ranks=1)
    scale(host, 3)
    come_up(host, 1, 0)
    assert told(host.core(EngineDead("late"), 2)) == [], "it has not said Hello"
    actions = host.exit(2, "exited with status 1", clean=False)
    assert told(actions) == [Scaled(2, "engine core 2 (pid 102) exited with status 1")]
    assert only(actions, RecordReady) == [RecordReady([ready(0), ready(1)], 2)]
    assert host.state._table.next_deadline() == math.inf


def test_a_scaling_lasts_until_the_process_of_a_failed_rank_is_gone() -> None:
    host = started(ranks=1)
    scale(host, 3)
    host.core(Hello(1, 101), 1)
    assert told(host.core(EngineDead("out of memory"), 1)) == []
    assert told(come_up(host, 2, 0)) == [ready(2), RanksChanged([0, 2])]
    assert told(host.exit(1, "exited with status 1", clean=False)) == [Scaled(2, "out of memory")]


def test_a_rank_that_dies_while_it_leaves_is_lost_and_not_started_again() -> None:
    host = started(ranks=2)
    scale(host, 1)
    cause = f"engine core 1 (pid 101) {KILLED}"
    assert told(kill(host, 1)) == [EngineLost(1, 0, cause, restarting=False), Scaled(1)]
    assert host.state._table.next_deadline() == math.inf


def test_ranks_without_requests_are_ended_by_a_signal_or_not_started_at_all() -> None:
    host = started(ranks=3)
    kill(host, 1)
    tick(host)
    kill(host, 2)
    actions = scale(host, 1)
    assert only(actions, SignalCores) == [SignalCores(signal.SIGTERM, [1])]
    assert only(host.at(host.now + STOP_GRACE), (SignalCores, StartCore)) == [
        SignalCores(signal.SIGKILL, [1])
    ]
    assert told(kill(host, 1)) == [Scaled(1)]


def test_a_rank_that_was_given_up_is_started_when_the_engine_is_scaled() -> None:
    host = started(ranks=2)
    host.state._table[1].deaths = MAX_DEATHS
    kill(host, 1)
    assert told(scale(host, 2)) == []
    assert told(come_up(host, 1, 1)) == [ready_again(1, 1), RanksChanged([0, 1]), Scaled(2)]


def test_one_that_is_given_up_while_its_process_ends_is_wanted_again_by_a_scaling() -> None:
    host = started(ranks=2)
    host.state._table[1].deaths = MAX_DEATHS
    host.core(EngineDead("bye"), 1)
    assert told(scale(host, 2)) == []
    kill(host, 1)
    assert only(tick(host), StartCore) == [StartCore(1, 1)]
    assert told(come_up(host, 1, 1))[-1] == Scaled(2)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_none_is_refused(size) -> None:
    refusal = Scaled(3, f"data_parallel_size must be at least 1, got {size}")
    assert scale(started(), size) == [ToClient(b"a", refusal)]


def test_a_size_that_the_machine_has_no_room_for_is_refused() -> None:
    asked = []

    def lacks_room(before: int, after: int) -> str | None:
        asked.append((before, after))
        return f"no room for {after}" if after > 4 else None

    host = started(lacks_room=lacks_room)
    assert scale(host, 10**6) == [ToClient(b"a", Scaled(3, "no room for 1000000"))]
    assert only(scale(host, 4), StartCore) == [StartCore(3, 0)]
    assert asked == [(3, 10**6), (3, 4)]


def test_the_present_size_is_reached_at_once() -> None:
    assert told(scale(started(), 3)) == [Scaled(3)]


def test_a_second_scaling_is_refused_while_one_is_under_way() -> None:
    host = started()
    scale(host, 1)
    refusal = Scaled(1, "the engine is being scaled to 1 engine cores already")
    assert told(scale(host, 5, b"b"), b"b") == [refusal]


def test_an_engine_that_starts_or_ends_is_not_scaled() -> None:
    host = Host(ranks=2)
    assert told(scale(host, 1)) == [Scaled(2, "the engine is being started")]
    host.start().client(attach())
    host.client(Shutdown(drain=True))
    assert told(scale(host, 1))[0].error == "the engine is ending: the engine was shut down"


def test_somebody_must_take_requests_all_the_time() -> None:
    host = started(ranks=2)
    kill(host, 0)
    error = "none of the engine cores 0 to 0 takes requests now; try again when one does"
    assert told(scale(host, 1)) == [Scaled(2, error)]


def test_the_client_that_asked_for_a_scaling_hears_of_an_end_in_the_middle_of_it() -> None:
    host = started(ranks=1)
    scale(host, 2, b"stranger")
    host.client(Shutdown())
    kill(host, 1)
    (end,) = only(host.exit(0), End)
    assert end.audience == [b"a", b"stranger"]


# In lock step.


def test_in_lock_step_a_rank_that_dies_ends_the_engine() -> None:
    host = started(model=LOCK_STEP)
    actions = kill(host, 1)
    assert told(actions) == []
    assert only(actions, SignalCores) == [SignalCores(signal.SIGTERM, [0, 2])]


def test_newcomers_wait_for_each_other_then_all_change_then_clients_hear_of_it() -> None:
    host = started(ranks=1, model=LOCK_STEP)
    assert only(scale(host, 3), StartCore) == [StartCore(1, 0), StartCore(2, 0)]
    handshake = EngineHandshakeMetadata("in", "out", "", 0, 3, joins_later=True)
    assert host.core(Hello(1, 101), 1)[0] == ToCore(1, handshake)
    assert host.core(ready(1), 1) == [CoreReady(1)]
    late = host.client(attach("late"), b"b")
    assert told(late, b"b") == [Attached(2, [0], protocol=PROTOCOL), ready(0)]
    assert {action.rank for action in only(late, ToCore)} == {0, 1}
    change = ChangeGroup(1, 3, "file:///place-1")
    assert only(come_up(host, 2, 0), ToCore)[-3:] == [ToCore(rank, change) for rank in range(3)]
    assert confirm(host, 2, 0, size=3) == []
    assert told(confirm(host, 1, size=3)) == [ready(1), ready(2), RanksChanged([0, 1, 2]), Scaled(3)]


def test_in_lock_step_ranks_that_leave_are_waited_for_and_so_is_the_change_of_the_others() -> None:
    for exits_first in (False, True):
        host = started(model=LOCK_STEP)
        actions = scale(host, 2)
        assert told(actions) == [RanksChanged([0, 1])]
        farewell = ToCore(2, ShutdownEngine(drain=True, requeue=True))
        change = ChangeGroup(3, 2, "file:///place-1")
        assert only(actions, ToCore) == [farewell, *(ToCore(rank, change) for rank in range(3))]
        if exits_first:
            assert told(host.exit(2)) == []
            assert told(confirm(host, 0, 1, size=2)) == [Scaled(2)]
        else:
            assert confirm(host, 0, 1, size=2) == []
            assert told(host.exit(2)) == [Scaled(2)]


def test_every_change_meets_at_another_place() -> None:
    host = started(ranks=2, model=LOCK_STEP)
    places = []
    for size in (1, 2, 1):
        actions = scale(host, size)
        if size == 2:
            actions = come_up(host, 1, 1)
        places.append(only(actions, ToCore)[-1].message.init_method)
        confirm(host, *range(size), size=size)
        if size == 1:
            host.exit(1)
    assert len(set(places)) == 3


def test_a_newcomer_that_fails_before_the_change_takes_only_the_newcomers_with_it() -> None:
    host = started(ranks=1, model=LOCK_STEP)
    scale(host, 4)
    come_up(host, 1, 0)
    actions = kill(host, 2)
    assert only(actions, ToCore) == [ToCore(1, ShutdownEngine())]
    assert only(actions, SignalCores) == [SignalCores(signal.SIGTERM, [3])]
    assert told(host.exit(1) + kill(host, 3)) == [Scaled(1, f"engine core 2 (pid 102) {KILLED}")]
    assert only(scale(host, 2), StartCore) == [StartCore(1, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_core_that_dies_after_the_change_was_announced_ends_the_engine(rank) -> None:
    host = started(ranks=1, model=LOCK_STEP)
    scale(host, 2)
    come_up(host, 1, 0)
    confirm(host, 0, size=2)
    kill(host, rank)
    (end,) = only(kill(host, 1 - rank), End)
    assert end.notice == EngineDead(f"engine core {rank} (pid {100 + rank}) {KILLED}")


def test_in_lock_step_a_rank_that_dies_while_it_leaves_ends_the_engine() -> None:
    host = started(ranks=2, model=LOCK_STEP)
    scale(host, 1)
    assert only(kill(host, 1), SignalCores) == [SignalCores(signal.SIGTERM, [0])]


def test_who_waits_for_a_change_that_will_not_come_is_asked_to_end_like_the_others() -> None:
    host = started(ranks=1, model=LOCK_STEP)
    scale(host, 2)
    come_up(host, 1, 0)
    assert host.client(Shutdown(drain=True)) == [ToCore(rank, ShutdownEngine(drain=True)) for rank in (0, 1)]
    assert confirm(host, 0, 1, size=2) == []


def test_a_size_that_the_model_in_lock_step_cannot_be_divided_by_is_refused() -> None:
    assert told(scale(started(model=LOCK_STEP), 7)) == [Scaled(3, MISFITS[7])]


def test_in_lock_step_nothing_changes_where_there_is_no_place_to_meet() -> None:
    host = started(model=LOCK_STEP)
    host.state._scaler._lock_step = LockStep()
    error = "the number of engine cores in lock step cannot be changed where they are on several machines"
    assert told(scale(host, 2)) == [Scaled(3, error)]
