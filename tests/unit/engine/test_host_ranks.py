"""Independent ranks that die and come back, on a fake clock."""

from __future__ import annotations

import math
import signal

from nbengine.engine.host.events import (
    CoreReady,
    End,
    ForgetStats,
    HostStood,
    RecordReady,
    SignalCores,
    StartCore,
    ToCore,
)
from nbengine.engine.host.rank_table import FIRST_RESTART_DELAY, FORGIVEN_AFTER, MAX_DEATHS
from nbengine.engine.host.scaling import STOP_GRACE
from nbengine.engine.host.state import HostPhase
from nbengine.ipc.control_messages import (
    Attached,
    EngineDead,
    EngineHandshakeMetadata,
    EngineLost,
    Heartbeat,
    Hello,
    Progress,
    RanksChanged,
    Shutdown,
    ShutdownEngine,
)
from nbengine.ipc.protocol import PROTOCOL
from tests.unit.engine.host_rig import (
    KILLED,
    Host,
    attach,
    come_up,
    kill,
    only,
    ready,
    ready_again,
    started,
    tick,
    told,
)


def test_a_dead_rank_is_left_out_then_named_then_started_again_with_the_next_incarnation() -> None:
    host = started()
    actions = kill(host, 1)
    assert told(actions) == [
        RanksChanged([0, 2]),
        EngineLost(1, 0, f"engine core 1 (pid 101) {KILLED}", restarting=True),
    ]
    assert only(actions, RecordReady) == [RecordReady([ready(0), ready(2)], 3)]
    assert only(actions, ForgetStats) == [ForgetStats(1)]
    host.client(Heartbeat())
    assert only(host.at(FIRST_RESTART_DELAY / 2), StartCore) == []
    assert only(tick(host), StartCore) == [StartCore(1, 1)]
    assert host.core(Hello(1, 7), 1)[0] == ToCore(1, EngineHandshakeMetadata("in", "out", "", 1, 3))
    actions = host.core(ready_again(1, 1), 1)
    assert told(actions) == [ready_again(1, 1), RanksChanged([0, 1, 2])]
    assert only(actions, CoreReady) == [CoreReady(1)]
    assert host.state.phase is HostPhase.READY


def test_last_words_take_a_rank_out_before_its_process_has_ended() -> None:
    host = started()
    lost = EngineLost(1, 0, "engine core 1 failed: boom", "log")
    assert told(host.core(EngineDead("engine core 1 failed: boom", "log"), 1)) == [RanksChanged([0, 2]), lost]
    assert only(host.at(STOP_GRACE), SignalCores) == [SignalCores(signal.SIGKILL, [1])]
    assert told(kill(host, 1)) == []
    assert only(tick(host), StartCore) == [StartCore(1, 1)]


def test_a_rank_that_ends_has_its_whole_time_though_the_host_did_not_run_meanwhile() -> None:
    host = started()
    host.core(EngineDead("engine core 1 failed: boom", "log"), 1)
    host.now = 100.0
    host.state.handle(HostStood(99.0), host.now)
    assert only(host.at(99.0 + STOP_GRACE - 0.1), SignalCores) == []
    assert only(host.at(99.0 + STOP_GRACE), SignalCores) == [SignalCores(signal.SIGKILL, [1])]


def test_what_a_dead_process_has_left_under_way_changes_nothing() -> None:
    host = started()
    kill(host, 1)
    for message in (Progress("load"), ready(1), EngineDead("bye"), Hello(1, 101)):
        assert host.core(message, 1) == []
    tick(host)
    host.core(Hello(1, 7), 1)
    assert host.core(ready(1), 1) == [], "of the incarnation before"
    assert host.state._table.ready == [0, 2]


def test_a_client_that_attaches_meanwhile_knows_the_ranks_that_take_requests() -> None:
    host = started()
    kill(host, 1)
    late = host.client(attach("late"), b"b")
    assert told(late, b"b") == [Attached(2, [0, 2], protocol=PROTOCOL), ready(0), ready(2)]
    assert {action.rank for action in only(late, ToCore)} == {0, 2}
    tick(host)
    introductions = only(host.core(Hello(1, 7), 1), ToCore)
    assert [action.message.client_index for action in introductions[1:]] == [1, 2]
    assert told(host.core(ready_again(1, 1), 1), b"b") == [ready_again(1, 1), RanksChanged([0, 1, 2])]


def test_the_first_client_hears_nothing_of_the_start_of_a_process_that_is_gone() -> None:
    host = Host(ranks=2).greet()
    for rank in (0, 1):
        for stage in ("load", "kv"):
            host.core(Progress(stage, rank=rank), rank)
        host.core(ready(rank), rank)
    kill(host, 1)
    tick(host)
    host.core(Hello(1, 7), 1)
    host.core(Progress("load", "again", rank=1), 1)
    reports = [Progress("load", rank=0), Progress("kv", rank=0), Progress("load", "again", rank=1)]
    assert told(host.client(attach())) == [Attached(1, [0], protocol=PROTOCOL), *reports, ready(0)]


def test_a_rank_that_dies_too_often_is_given_up_and_the_others_go_on() -> None:
    host = started()
    delays = []
    for death in range(1, MAX_DEATHS + 1):
        (lost,) = [m for m in told(kill(host, 2)) if isinstance(m, EngineLost)]
        assert (lost.incarnation, lost.restarting) == (death - 1, True)
        died_at = host.now
        tick(host)
        delays.append(host.now - died_at)
        host.core(Hello(2, 7), 2)
        if death % 2:
            host.core(ready_again(2, death), 2)
    assert delays == [FIRST_RESTART_DELAY * factor for factor in (1, 2, 4)]
    (lost,) = [m for m in told(kill(host, 2)) if isinstance(m, EngineLost)]
    assert (lost.incarnation, lost.restarting) == (MAX_DEATHS, False)
    assert host.state._table.next_deadline() == math.inf
    assert host.state.phase is HostPhase.READY


def test_deaths_long_ago_do_not_count() -> None:
    host = started(lease=1e6)
    for death in range(3 * MAX_DEATHS):
        host.now += FORGIVEN_AFTER
        (lost,) = [m for m in told(kill(host, 0)) if isinstance(m, EngineLost)]
        assert lost.restarting
        tick(host)
        come_up(host, 0, death + 1)


def test_a_rank_that_never_comes_up_again_is_given_up_however_long_each_start_takes() -> None:
    host = started(lease=1e6)
    kill(host, 0)
    for _ in range(MAX_DEATHS):
        assert only(tick(host), StartCore)
        host.now += 10 * FORGIVEN_AFTER
        actions = host.exit(0, "exited with status 1", clean=False)
    assert [message.restarting for message in told(actions)] == [False]


def test_a_process_that_cannot_be_started_is_a_death() -> None:
    host = started()
    kill(host, 0)
    tick(host)
    actions = host.fail_to_start(0, "no memory")
    assert told(actions) == [EngineLost(0, 1, "no memory")]
    assert only(tick(host), StartCore) == [StartCore(0, 2)]


def test_the_engine_ends_with_the_last_rank_that_takes_requests() -> None:
    host = started(ranks=2)
    kill(host, 0)
    tick(host)
    actions = kill(host, 1)
    assert told(actions) == []
    assert only(actions, SignalCores) == [SignalCores(signal.SIGTERM, [0])]
    (end,) = only(host.exit(0, "was killed by signal 15 (SIGTERM)", clean=False), End)
    assert end.notice == EngineDead(f"engine core 1 (pid 101) {KILLED}")
    assert end.audience == [b"a"]


def test_nothing_is_started_again_when_the_engine_ends() -> None:
    host = started(ranks=2)
    kill(host, 0)
    assert host.client(Shutdown(drain=True)) == [ToCore(1, ShutdownEngine(drain=True))]
    assert only(host.at(10.0), StartCore) == []
    (end,) = only(host.exit(1), End)
    assert end.notice.expected


def test_a_drain_ends_the_ranks_that_are_being_started_at_once() -> None:
    host = started(ranks=2)
    kill(host, 0)
    tick(host)
    actions = host.client(Shutdown(drain=True))
    assert only(actions, SignalCores) == [SignalCores(signal.SIGTERM, [0])]
    assert only(host.exit(0, "was killed by signal 15 (SIGTERM)", clean=False), End) == []
    assert only(host.exit(1), End)
