"""The host's decisions, on a fake clock."""

from __future__ import annotations

import math
import signal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nbengine.engine.host.events import (
    Action,
    CoreReady,
    End,
    ForgetStats,
    HostStood,
    RecordReady,
    RemoveSockets,
    RemoveTensors,
    SignalCores,
    TellHistory,
    ToClient,
    ToCore,
)
from nbengine.engine.host.scaling import STOP_GRACE
from nbengine.engine.host.state import FIRST_ATTACH_GRACE, FIRST_WORDS_GRACE, HostPhase
from nbengine.ipc.control_messages import (
    AttachClient,
    Attached,
    ClientLost,
    Detach,
    DetachClient,
    EngineDead,
    EngineHandshakeMetadata,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LeaseLost,
    Progress,
    ReadHistory,
    Shutdown,
    ShutdownEngine,
)
from nbengine.ipc.protocol import PROTOCOL
from tests.support.thorough import amount
from tests.unit.engine.host_rig import (
    HANDSHAKE,
    LOCK_STEP,
    Host,
    attach,
    only,
    ready,
)

FAILED = EngineDead("it does not load", started=False)

# The history.


def test_any_client_is_told_of_the_history_at_any_time() -> None:
    asked = ReadHistory(60.0, 1)
    host = Host()
    assert host.client(asked, b"b") == [TellHistory(b"b", asked)]
    host.start()
    assert host.client(asked) == [TellHistory(b"a", asked)]


# The start.


def test_a_client_that_attaches_early_hears_everything_once() -> None:
    host = Host()
    assert host.client(attach()) == [ToClient(b"a", Attached(1, [0], protocol=PROTOCOL))]
    assert host.core(Hello(0, 100)) == [
        ToCore(0, HANDSHAKE),
        ToCore(0, AttachClient(1, "ipc:///run/s.in", "ipc:///run/s.out")),
    ]
    progress = Progress("load", "half", 0.5)
    assert host.core(progress) == [ToClient(b"a", progress)]
    assert host.core(ready()) == [RecordReady([ready()], 1), CoreReady(0), ToClient(b"a", ready())]


def test_a_client_that_attaches_while_loading_hears_each_stages_latest_progress_and_a_late_one_that_it_is_ready() -> (
    None
):
    host = Host()
    host.core(Hello(0, 100))
    for fraction in (0.1, 0.7):
        host.core(Progress("load", fraction=fraction))
    host.core(Progress("profile"))
    news = host.client(attach())
    reports = [Progress("load", fraction=0.7), Progress("profile")]
    assert [action.message for action in only(news, ToClient)][1:] == reports
    host.core(ready())
    late = host.client(attach("t"), b"b")
    assert [action.message for action in only(late, ToClient)] == [
        Attached(2, [0], protocol=PROTOCOL),
        ready(),
    ]
    assert only(late, ToCore) == [ToCore(0, AttachClient(2, "ipc:///run/t.in", "ipc:///run/t.out"))]


def test_the_first_client_hears_how_the_start_was_also_when_it_is_over() -> None:
    host = Host(ranks=2).greet()
    reports = [Progress("load", worker=0), Progress("load", worker=1), Progress("kv", "64 blocks", 1.0)]
    for rank in (1, 0):
        for report in reports:
            host.core(msgspec.structs.replace(report, rank=rank), rank)
        host.core(ready(rank), rank)
    host.core(Progress("load", "the weights again, after a sleep", rank=0))
    first, second = host.client(attach()), host.client(attach("t"), b"b")
    both_ready = [ready(0), ready(1)]
    assert [action.message for action in only(first, ToClient)][1:] == [
        *(msgspec.structs.replace(report, rank=rank) for rank in (0, 1) for report in reports),
        *both_ready,
    ]
    assert [action.message for action in only(second, ToClient)][1:] == both_ready


def test_an_engine_is_ready_when_every_rank_is() -> None:
    host = Host(ranks=2).greet()
    host.client(attach())
    assert host.core(ready(1), 1) == []
    actions = host.core(ready(0), 0)
    assert actions[0] == RecordReady([ready(0), ready(1)], 2)
    assert [action.message.rank for action in only(actions, ToClient)] == [0, 1]


# Leases.


def test_heartbeats_are_acknowledged_to_holders_only() -> None:
    host = Host().start()
    assert host.client(Heartbeat()) == [ToClient(b"a", LeaseLost("no lease is held here"))]
    host.client(attach())
    assert host.client(Heartbeat()) == [ToClient(b"a", HeartbeatAck())]


def test_the_tensors_of_clients_that_left_are_removed_and_those_of_others_stay() -> None:
    host = Host().start()
    for name in (b"a", b"b", b"c"):
        host.client(attach(name.decode()), name)
    assert only(host.client(Detach(), b"b"), RemoveTensors) == [RemoveTensors(frozenset({1, 3}))]
    assert only(host.client(attach("c"), b"d"), RemoveTensors) == [RemoveTensors(frozenset({1, 4}))]
    assert only(host.client(Heartbeat(), b"a"), RemoveTensors) == []


def test_a_client_is_told_where_the_engine_takes_tensors() -> None:
    host = Host()
    host.state._handshake = EngineHandshakeMetadata("in", "out", "/dev/shm/nbe-x")
    assert only(host.client(attach()), ToClient)[0].message == Attached(1, [0], "/dev/shm/nbe-x", PROTOCOL)


def test_a_lapsed_lease_is_told_to_client_and_core_and_the_sockets_stay() -> None:
    host = Host().start()
    host.client(attach(pid=0))
    assert [action for half in range(60) for action in host.at(half / 2)] == []
    actions = host.at(30.0)
    assert actions == [
        ToClient(b"a", LeaseLost("no heartbeat for 30 s")),
        ToCore(0, DetachClient(1)),
        RemoveTensors(frozenset()),
    ]


def test_a_client_to_which_a_connection_broke_loses_its_lease_once() -> None:
    host = Host().start()
    host.client(attach())
    actions = host.core(ClientLost(1))
    assert actions == [
        ToClient(b"a", LeaseLost("the connection to engine core 0 broke")),
        ToCore(0, DetachClient(1)),
        RemoveTensors(frozenset()),
    ]
    assert host.core(ClientLost(1)) == []


def test_who_detaches_or_dies_leaves_no_sockets() -> None:
    host = Host().start()
    host.client(attach())
    sockets = [RemoveSockets(["ipc:///run/s.in", "ipc:///run/s.out"])]
    assert only(host.client(Detach()), RemoveSockets) == sockets
    host.client(attach(pid=5))
    host.dead.add(5)
    assert only(host.at(1.0), RemoveSockets) == sockets


def test_a_detached_client_is_not_introduced_to_a_core_that_comes_later() -> None:
    host = Host()
    host.client(attach())
    host.client(Detach())
    assert host.core(Hello(0, 100)) == [ToCore(0, HANDSHAKE)]


def test_an_older_attachment_of_a_session_is_ended_before_the_newer_is_introduced() -> None:
    host = Host().start()
    host.client(attach())
    actions = host.client(attach(), b"b")
    assert [type(action.message) for action in only(actions, ToCore)] == [DetachClient, AttachClient]
    assert only(actions, ToClient)[0] == ToClient(b"a", LeaseLost("session 's' attached again"))


# keep_alive.


def test_keep_alive_counts_from_the_last_client() -> None:
    host = Host(keep_alive=100.0).start()
    host.client(attach())
    host.now = 10.0
    host.client(Detach())
    assert host.state.next_deadline() == 110.0
    assert host.at(109.0) == []
    assert host.at(110.0) == [ToCore(0, ShutdownEngine())]
    assert "100 s (keep_alive)" in only(host.exit(), End)[0].notice.cause


def test_a_new_client_stops_the_countdown() -> None:
    host = Host(keep_alive=100.0).start()
    host.client(attach())
    host.client(Detach())
    host.now = 50.0
    host.client(attach())
    host.now = 51.0
    assert host.state.next_deadline() < 100.0
    assert host.at(51.0) == []
    host.client(Heartbeat())
    assert only(host.at(70.0), ToCore) == []


def test_the_first_client_may_take_its_time_however_short_keep_alive_is() -> None:
    host = Host(keep_alive=0.0).start()
    assert host.at(FIRST_ATTACH_GRACE - 1) == []
    host.client(attach())
    assert RemoveSockets(["ipc:///run/s.in", "ipc:///run/s.out"]) in host.client(Detach())
    assert host.at(host.now) == [ToCore(0, ShutdownEngine())]


def test_a_bound_engine_has_no_keep_alive() -> None:
    host = Host(bound=True, keep_alive=0.0).start()
    assert host.state.next_deadline() == math.inf
    host.client(attach())
    host.client(Detach())
    assert host.state.next_deadline() == math.inf


# The end.


def test_a_shutdown_is_asked_of_the_cores_then_enforced() -> None:
    host = Host().start()
    host.client(attach())
    assert host.client(Shutdown()) == [ToCore(0, ShutdownEngine())]
    assert only(host.at(STOP_GRACE - 0.1), SignalCores) == []
    assert only(host.at(STOP_GRACE), SignalCores) == [SignalCores(signal.SIGKILL, [0])]
    (end,) = only(host.exit(how="was killed", clean=False), End)
    assert end == End(EngineDead("the engine was shut down", expected=True), [b"a"])
    assert host.state.phase is HostPhase.ENDED


def test_a_host_that_did_not_run_gives_its_cores_that_time_to_end() -> None:
    host = Host().start()
    host.client(attach())
    host.client(Shutdown())
    host.now = 100.0
    host.state.handle(HostStood(99.0), host.now)
    assert only(host.at(99.0 + STOP_GRACE - 0.1), SignalCores) == []
    assert only(host.at(99.0 + STOP_GRACE), SignalCores) == [SignalCores(signal.SIGKILL, [0])]


def test_a_drain_has_no_deadline_until_it_is_cut_short() -> None:
    host = Host().start()
    assert host.client(Shutdown(drain=True)) == [ToCore(0, ShutdownEngine(drain=True))]
    assert host.state.next_deadline() == math.inf
    assert host.client(Shutdown(drain=True)) == []
    assert host.stop() == [ToCore(0, ShutdownEngine())]
    assert host.state.next_deadline() == STOP_GRACE
    assert host.stop() == []
    assert only(host.exit(), End) == [End(EngineDead("the engine was shut down", expected=True), [b"a"])]


def test_a_core_that_dies_in_a_drain_is_a_failure() -> None:
    host = Host().start()
    host.client(attach())
    host.client(Shutdown(drain=True))
    (end,) = only(host.exit(how="was killed by signal 9 (SIGKILL)", clean=False), End)
    assert end.notice == EngineDead("engine core 0 (pid 100) was killed by signal 9 (SIGKILL)")


def test_while_loading_cores_are_terminated() -> None:
    host = Host()
    host.client(attach())
    assert host.client(Shutdown()) == [SignalCores(signal.SIGTERM, [0])]
    (end,) = only(host.exit(how="was killed by signal 15 (SIGTERM)", clean=False), End)
    assert end.notice == EngineDead("the engine was shut down", started=False, expected=True)


def test_a_cores_own_words_are_the_cause_and_its_exit_is_awaited() -> None:
    host = Host().start()
    host.client(attach())
    assert host.core(EngineDead("engine core 0 failed: boom", "log")) == []
    assert host.state.next_deadline() <= STOP_GRACE
    (end,) = only(host.exit(how="exited with status 1", clean=False), End)
    assert end.notice == EngineDead("engine core 0 failed: boom", "log")


def test_a_failed_start_says_that_it_never_started() -> None:
    host = Host()
    host.client(attach())
    (end,) = only(host.exit(how="exited with status 1", clean=False), End)
    assert end.notice == EngineDead("engine core 0 (pid 100) exited with status 1", started=False)


def test_one_dead_core_of_two_in_lock_step_ends_the_other_and_the_first_cause_counts() -> None:
    host = Host(ranks=2, model=LOCK_STEP).start()
    host.client(attach())
    actions = host.exit(1, "was killed by signal 9 (SIGKILL)", clean=False)
    assert actions == [SignalCores(signal.SIGTERM, [0]), ForgetStats(1)]
    (end,) = only(host.exit(0, "exited with status 1", clean=False), End)
    assert end.notice.cause == "engine core 1 (pid 101) was killed by signal 9 (SIGKILL)"


def failed_start() -> Host:
    """A host whose engine core has failed before any client was attached."""
    host = Host().greet()
    host.core(FAILED)
    assert only(host.exit(clean=False), End) == []
    return host


def test_a_start_that_fails_before_its_client_is_attached_is_told_to_it() -> None:
    host = failed_start()
    host.now = FIRST_WORDS_GRACE - 0.1
    assert host.client(attach()) == [End(FAILED, [b"a"])]
    assert host.state.phase is HostPhase.ENDED
    assert host.client(attach("t"), b"b") == [ToClient(b"b", FAILED)]
    assert only(host.at(FIRST_WORDS_GRACE), End) == []


def test_a_start_that_fails_ends_soon_where_no_client_comes() -> None:
    host = failed_start()
    assert host.state.next_deadline() == FIRST_WORDS_GRACE
    assert only(host.at(FIRST_WORDS_GRACE - 0.1), End) == []
    assert host.at(FIRST_WORDS_GRACE) == [End(FAILED, [])]


@pytest.mark.parametrize("ends", ["by a signal", "by a client"])
def test_a_start_that_has_failed_ends_at_once_where_that_is_wanted(ends: str) -> None:
    host = failed_start()
    if ends == "by a signal":
        assert host.stop() == [End(FAILED, [])]
    else:
        assert host.client(Shutdown(), b"stranger") == [End(FAILED, [b"stranger"])]


def test_who_comes_too_late_is_told_why() -> None:
    host = Host().start()
    host.stop("asked")
    assert host.client(attach()) == [ToClient(b"a", EngineDead("asked", expected=True))]


def test_everyone_who_asked_for_the_end_hears_of_it_once() -> None:
    host = Host().start()
    host.client(attach())
    host.client(Shutdown())
    host.client(Shutdown(), b"stranger")
    (end,) = only(host.exit(), End)
    assert end.audience == [b"a", b"stranger"]


IDENTITIES = st.sampled_from([b"a", b"b", b"c"])


class Histories(RuleBasedStateMachine):
    """Any order of events: the engine ends once, only when no core runs, and never talks to the dead."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(ranks=2, keep_alive=20.0, lease=10.0, model=LOCK_STEP)
        self.running = {0, 1}
        self.greeted: set[int] = set()
        self.introduced: dict[int, set[int]] = {0: set(), 1: set()}
        self.ends: list[End] = []
        self.signalled: set[int] = set()
        self.killed = False

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToCore(rank, message):
                    assert rank in self.greeted
                    self.note(rank, message)
                case SignalCores(number, ranks):
                    assert set(ranks) <= self.running
                    self.signalled.update(ranks)
                    self.killed = self.killed or number is signal.SIGKILL
                case End():
                    self.ends.append(action)

    def note(self, rank: int, message) -> None:
        introduced = self.introduced[rank]
        if isinstance(message, AttachClient):
            assert message.client_index not in introduced
            introduced.add(message.client_index)
        elif isinstance(message, DetachClient):
            introduced.discard(message.client_index)

    @rule(identity=IDENTITIES, session=st.sampled_from("xy"), pid=st.integers(1, 3))
    def attaches(self, identity, session, pid) -> None:
        self.take(self.host.client(attach(session, pid), identity))

    @rule(identity=IDENTITIES, message=st.sampled_from([Heartbeat(), Detach()]))
    def speaks(self, identity, message) -> None:
        self.take(self.host.client(message, identity))

    @rule(identity=IDENTITIES, drain=st.booleans())
    def shuts_down(self, identity, drain) -> None:
        self.take(self.host.client(Shutdown(drain), identity))

    @rule(rank=st.sampled_from([0, 1]))
    def greets(self, rank) -> None:
        if rank in self.running - self.greeted:
            actions = self.host.core(Hello(rank, 100 + rank), rank)
            if rank in self.signalled:
                assert actions == []
                return
            self.greeted.add(rank)
            self.take(actions)

    @rule(rank=st.sampled_from([0, 1]))
    def gets_ready(self, rank) -> None:
        if rank in self.running & self.greeted:
            self.take(self.host.core(ready(rank), rank))

    @rule(rank=st.sampled_from([0, 1]), expected=st.booleans())
    def says_good_bye(self, rank, expected) -> None:
        if rank in self.running & self.greeted:
            self.take(self.host.core(EngineDead("bye", expected=expected), rank))

    @rule(rank=st.sampled_from([0, 1]), clean=st.booleans())
    def core_exits(self, rank, clean) -> None:
        if rank in self.running:
            self.running.discard(rank)
            self.take(self.host.exit(rank, clean=clean))

    @rule(pid=st.integers(1, 3))
    def client_dies(self, pid) -> None:
        self.host.dead.add(pid)

    @rule(seconds=st.floats(0.1, 30))
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
    def ends_once_and_leaves_no_core_behind(self) -> None:
        state = self.host.state
        # A failed start waits for a client that it can tell.
        waits = state._tell_until < math.inf
        assert not waits or (not self.running and not state.leases.leases)
        assert len(self.ends) == (1 if not self.running and not waits else 0)
        assert (self.host.state.phase is HostPhase.ENDED) == bool(self.ends)

    @invariant()
    def cores_know_exactly_the_attached_clients(self) -> None:
        attached = {lease.client_index for lease in self.host.state.leases.leases}
        for rank in self.greeted & self.running:
            assert self.introduced[rank] == attached

    @invariant()
    def a_stopping_engine_has_a_deadline_or_drains(self) -> None:
        if self.host.state.phase is HostPhase.STOPPING and not self.killed:
            assert self.host.state.next_deadline() < math.inf or self.host.state._draining


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=amount(20, thorough=1600), stateful_step_count=40, deadline=None
)
