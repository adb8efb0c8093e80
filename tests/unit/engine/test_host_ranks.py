"""Independent ranks that die, come back, come anew and leave, on a fake clock."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.config import ModelConfig
from nbengine.engine.host_events import (
    Action,
    CoreReady,
    End,
    ForgetStats,
    RecordReady,
    ResizeCoordinator,
    SignalCores,
    StartCore,
    StartFailed,
    ToClient,
    ToCore,
)
from nbengine.engine.host_state import HostPhase
from nbengine.engine.rank_table import FIRST_RESTART_DELAY, FORGIVEN_AFTER, MAX_DEATHS, RankPhase
from nbengine.engine.scaling import MAX_SIZE, STOP_GRACE, LockStep
from nbengine.ipc.control_messages import (
    Attached,
    ChangeGroup,
    Detach,
    EngineDead,
    EngineHandshakeMetadata,
    EngineLost,
    EngineReady,
    GroupChanged,
    Heartbeat,
    Hello,
    Progress,
    RanksChanged,
    Scaled,
    ScaleElasticEP,
    Shutdown,
    ShutdownEngine,
)
from tests.unit.engine.test_host_state import LOCK_STEP, MISFITS, Host, attach, only, ready

KILLED = "was killed by signal 9 (SIGKILL)"


def ready_again(rank: int, incarnation: int) -> EngineReady:
    return msgspec.structs.replace(ready(rank), incarnation=incarnation)


def told(actions: list[Action], identity: bytes = b"a") -> list:
    """What a client hears."""
    return [action.message for action in only(actions, ToClient) if action.identity == identity]


def started(ranks: int = 3, **config) -> Host:
    """An engine that takes requests, with a client."""
    host = Host(ranks=ranks, **config).start()
    host.client(attach())
    return host


def kill(host: Host, rank: int) -> list[Action]:
    return host.exit(rank, KILLED, clean=False)


def tick(host: Host) -> list[Action]:
    """Go to the next deadline that is not a lease's."""
    return host.at(host.state._table.next_deadline())


def come_up(host: Host, rank: int, incarnation: int) -> list[Action]:
    host.core(Hello(rank, 100 + rank), rank)
    return host.core(ready_again(rank, incarnation), rank)


def scale(host: Host, size: int, identity: bytes = b"a") -> list[Action]:
    return host.client(ScaleElasticEP(size), identity)


# A rank that dies.


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
    assert told(late, b"b") == [Attached(2, [0, 2]), ready(0), ready(2)]
    assert {action.rank for action in only(late, ToCore)} == {0, 2}
    tick(host)
    introductions = only(host.core(Hello(1, 7), 1), ToCore)
    assert [action.message.client_index for action in introductions[1:]] == [1, 2]
    assert told(host.core(ready_again(1, 1), 1), b"b") == [ready_again(1, 1), RanksChanged([0, 1, 2])]


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
    actions = host.state.handle(StartFailed(0, "no memory"), host.now)
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


# Scaling.


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


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_a_size_that_is_none_is_refused(size) -> None:
    refusal = Scaled(3, f"data_parallel_size must be 1 to {MAX_SIZE}, got {size}")
    assert scale(started(), size) == [ToClient(b"a", refusal)]


def test_the_present_size_is_reached_at_once() -> None:
    assert told(scale(started(), 3)) == [Scaled(3)]


def test_one_scaling_at_a_time() -> None:
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


def test_whoever_asked_for_a_scaling_hears_of_an_end_in_the_middle_of_it() -> None:
    host = started(ranks=1)
    scale(host, 2, b"stranger")
    host.client(Shutdown())
    kill(host, 1)
    (end,) = only(host.exit(0), End)
    assert end.audience == [b"a", b"stranger"]


# In lock step.


def confirm(host: Host, *ranks: int, size: int) -> list[Action]:
    return [action for rank in ranks for action in host.core(GroupChanged(rank, size), rank)]


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
    assert told(late, b"b") == [Attached(2, [0]), ready(0)]
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
def test_whoever_dies_after_the_change_was_announced_ends_the_engine(rank) -> None:
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


# Any history.


@dataclass
class Process:
    incarnation: int
    greeted: bool = False
    ready: bool = False
    asked: bool = False
    """It has been told to end, or has said that it does."""
    doomed: bool = False
    """It does not even drain."""


@dataclass
class View:
    """What a client has been told."""

    ranks: set[int] = field(default_factory=set)
    known: dict[int, int] = field(default_factory=dict)
    """Incarnation of the last `EngineReady` of each rank."""
    lost: set[tuple[int, int]] = field(default_factory=set)


IDENTITIES = st.sampled_from([b"a", b"b", b"c"])
RANKS = st.integers(0, 4)


class Histories(RuleBasedStateMachine):
    """Any order of events, with a model of its own of processes and clients."""

    model = ModelConfig()

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(ranks=3, bound=True, lease=1e9, model=self.model)
        self.group = {0, 1, 2}
        """In lock step: the ranks that step together."""
        self.changes: dict[int, int] = {}
        """By rank, the size of the group that it has been told of."""
        self.confirmed: set[int] = set()
        self.processes: dict[int, Process] = {}
        self.incarnations: dict[int, int] = {}
        self.views: dict[bytes, View] = {}
        self.asked: list[bytes] = []
        self.answered: list[bytes] = []
        self.ends: list[End] = []
        self.recorded: tuple[set[int], int] = (set(), 3)
        self.take(self.host.state.begin())

    @initialize(attached=st.sets(IDENTITIES))
    def starts(self, attached) -> None:
        for identity in sorted(attached):
            self.attaches(identity)
        self.all_get_ready()

    @property
    def is_running(self) -> bool:
        return self.host.state.phase in (HostPhase.STARTING, HostPhase.READY)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartCore(rank, incarnation):
                    assert rank not in self.processes
                    assert incarnation > self.incarnations.get(rank, -1)
                    self.incarnations[rank] = incarnation
                    self.processes[rank] = Process(incarnation)
                case ToCore(rank, message):
                    process = self.processes[rank]
                    assert process.greeted
                    if isinstance(message, ShutdownEngine):
                        process.asked = True
                    if isinstance(message, ChangeGroup):
                        self.changes[rank] = message.after
                case SignalCores(_, ranks):
                    assert set(ranks) <= self.processes.keys()
                    for rank in ranks:
                        self.processes[rank].asked = self.processes[rank].doomed = True
                case RecordReady(engines, size):
                    self.recorded = {engine.rank for engine in engines}, size
                case ToClient(identity, message):
                    self.hear(identity, message)
                case End():
                    self.ends.append(action)

    def hear(self, identity: bytes, message) -> None:
        if isinstance(message, Scaled):
            self.answered.append(identity)
        if isinstance(message, Attached):
            self.views[identity] = View(set(message.engine_ranks))
        view = self.views.get(identity)
        match message:
            case EngineReady():
                view.known[message.rank] = message.incarnation
            case RanksChanged(ranks):
                for rank in set(ranks) - view.ranks:
                    assert view.known[rank] == self.processes[rank].incarnation
                view.ranks = set(ranks)
            case EngineLost(rank, incarnation):
                assert rank not in view.ranks
                assert (rank, incarnation) not in view.lost
                view.lost.add((rank, incarnation))

    @rule(identity=IDENTITIES)
    def attaches(self, identity) -> None:
        self.take(self.host.client(attach(identity.decode()), identity))

    @rule(identity=IDENTITIES)
    def detaches(self, identity) -> None:
        self.views.pop(identity, None)
        self.take(self.host.client(Detach(), identity))

    @rule(rank=RANKS)
    def greets(self, rank) -> None:
        process = self.processes.get(rank)
        if process is not None and not process.greeted and not process.asked:
            process.greeted = True
            self.take(self.host.core(Hello(rank, 1), rank))

    @rule(rank=RANKS)
    def gets_ready(self, rank) -> None:
        process = self.processes.get(rank)
        if process is not None and process.greeted and not process.ready and not process.asked:
            process.ready = True
            self.take(self.host.core(ready_again(rank, process.incarnation), rank))

    @rule()
    def all_get_ready(self) -> None:
        for rank in sorted(self.processes):
            self.greets(rank)
            self.gets_ready(rank)

    @rule(rank=RANKS)
    def confirms(self, rank) -> None:
        size = self.changes.pop(rank, None)
        if size is None or rank >= size:
            return
        self.confirmed.add(rank)
        if self.confirmed == set(range(size)):
            self.group, self.confirmed = self.confirmed, set()
        self.take(self.host.core(GroupChanged(rank, size), rank))

    @rule()
    def all_confirm(self) -> None:
        for rank in sorted(self.changes):
            self.confirms(rank)

    @rule(rank=RANKS)
    def says_good_bye(self, rank) -> None:
        process = self.processes.get(rank)
        if process is not None and process.greeted and not process.doomed:
            process.asked = process.doomed = True
            self.take(self.host.core(EngineDead("bye"), rank))

    @rule(rank=RANKS)
    def dies_as_soon_as_it_is_ready(self, rank) -> None:
        for _ in range(4):
            self.time_passes(2.0)
            self.all_get_ready()
            self.exits(rank, clean=False)

    @rule(rank=RANKS, clean=st.booleans())
    def exits(self, rank, clean) -> None:
        if rank in self.processes:
            del self.processes[rank]
            self.take(self.host.exit(rank, clean=clean))

    @precondition(lambda self: self.is_running)
    @rule(rank=RANKS)
    def says_something_late(self, rank) -> None:
        process = self.processes.get(rank)
        if rank in self.incarnations and (process is None or process.doomed):
            late = ready_again(rank, self.incarnations[rank])
            for message in (late, Progress("load"), Hello(rank, 1), EngineDead("bye")):
                assert self.host.core(message, rank) == []

    @rule(identity=IDENTITIES, size=st.integers(0, 5))
    def scales(self, identity, size) -> None:
        self.asked.append(identity)
        self.take(scale(self.host, size, identity))

    @precondition(lambda self: self.host.now > 3)
    @rule(drain=st.booleans())
    def shuts_down(self, drain) -> None:
        self.take(self.host.client(Shutdown(drain), b"a"))

    @rule(seconds=st.floats(0.05, 3))
    def time_passes(self, seconds) -> None:
        until = self.host.now + seconds
        for _ in range(1000):
            due = self.host.state.next_deadline()
            if due > until:
                break
            self.take(self.host.at(max(due, self.host.now)))
        assert self.host.state.next_deadline() > self.host.now, "the host would spin"
        self.host.now = until

    @invariant()
    def every_client_knows_the_ranks_that_take_requests(self) -> None:
        if self.host.state.phase is not HostPhase.READY:
            return
        taking = {rank for rank, process in self.processes.items() if process.ready and not process.asked}
        if self.model.is_moe:
            taking &= self.group
        assert taking, "an engine without any must end"
        assert all(view.ranks == taking for view in self.views.values())
        assert self.recorded[0] == taking

    @invariant()
    def processes_are_those_that_the_host_knows(self) -> None:
        assert self.host.state._table.running == sorted(self.processes)

    @invariant()
    def what_is_not_ready_has_a_process_or_a_date(self) -> None:
        if self.is_running:
            for life in self.host.state._table.all():
                assert (life.restart_at < math.inf) == (life.phase is RankPhase.DOWN)

    @invariant()
    def ends_once_and_leaves_no_core_behind(self) -> None:
        assert len(self.ends) == (1 if not self.processes else 0)
        assert (self.host.state.phase is HostPhase.ENDED) == bool(self.ends)

    def teardown(self) -> None:
        """Whatever has happened: if all goes well from now on, all is well in the end."""
        for _ in range(10):
            for rank in sorted(self.processes):
                if self.processes[rank].asked:
                    self.exits(rank, clean=True)
            self.all_get_ready()
            self.all_confirm()
            self.time_passes(3.0)
            self.every_client_knows_the_ranks_that_take_requests()
        if not self.is_running:
            assert self.ends
            return
        table = self.host.state._table
        assert table.ready == table.running == table.members
        assert self.recorded == (set(table.ready), table.size)
        assert sorted(self.answered) == sorted(self.asked)
        assert self.host.state.next_deadline() == math.inf or self.host.state.leases


class LockStepHistories(Histories):
    """The same in lock step, where those that step together mostly live."""

    model = LOCK_STEP

    @rule(rank=RANKS)
    def says_good_bye(self, rank) -> None:
        if rank not in self.group:
            super().says_good_bye(rank)

    @rule(rank=RANKS, clean=st.booleans())
    def exits(self, rank, clean) -> None:
        process = self.processes.get(rank)
        if process is None or not (process.asked or rank not in self.group):
            return
        if rank in self.changes or rank in self.confirmed:
            # It makes the change with the others.
            return
        super().exits(rank, clean=clean or process.asked)

    @rule(rank=RANKS)
    def dies_as_soon_as_it_is_ready(self, rank) -> None:
        super().dies_as_soon_as_it_is_ready(rank)

    @precondition(lambda self: self.host.now > 10)
    @rule(rank=RANKS)
    def is_killed(self, rank) -> None:
        super().exits(rank, clean=False)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLockStepHistories = LockStepHistories.TestCase
TestLockStepHistories.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
