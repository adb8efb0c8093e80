"""Any history of ranks, clients and scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.config import ModelConfig
from nbengine.engine.host.events import (
    Action,
    End,
    RecordReady,
    SignalCores,
    StartCore,
    ToClient,
    ToCore,
)
from nbengine.engine.host.rank_table import RankPhase
from nbengine.engine.host.state import HostPhase
from nbengine.ipc.control_messages import (
    Attached,
    ChangeGroup,
    Detach,
    EngineDead,
    EngineLost,
    EngineReady,
    GroupChanged,
    Hello,
    Progress,
    RanksChanged,
    Scaled,
    Shutdown,
    ShutdownEngine,
)
from tests.support.thorough import amount
from tests.unit.engine.host_rig import (
    LOCK_STEP,
    Host,
    attach,
    ready_again,
    scale,
)


@dataclass
class Process:
    incarnation: int
    greeted: bool = False
    ready: bool = False
    asked: bool = False
    """It has been told to end, or has said that it does."""
    doomed: bool = False
    """It does not even drain."""

    @property
    def may_get_ready(self) -> bool:
        return not self.ready and not self.asked


@dataclass
class View:
    """The view that a client has, by what it has been told."""

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

    @initialize(attached=st.sets(IDENTITIES), max_starting=st.sampled_from([1, 2, 100]))
    def starts(self, attached, max_starting) -> None:
        self.max_starting = max_starting
        self.host = Host(ranks=3, max_starting=max_starting, bound=True, lease=1e9, model=self.model)
        self.take(self.host.begun)
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
                    assert self.is_running
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
        # Those that are ready make room for others to be started.
        while waiting := [rank for rank, process in self.processes.items() if process.may_get_ready]:
            for rank in sorted(waiting):
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
    def few_start_at_a_time(self) -> None:
        under_way = [
            process
            for process in self.processes.values()
            if process.may_get_ready and not (self.model.is_moe and process.greeted)
        ]
        assert len(under_way) <= self.max_starting
        if self.is_running and len(under_way) < self.max_starting:
            assert not self.host.state._table.ranks(RankPhase.QUEUED)

    @invariant()
    def what_is_not_ready_has_a_process_or_a_date(self) -> None:
        if self.is_running:
            for life in self.host.state._table.all():
                assert (life.restart_at < math.inf) == (life.phase is RankPhase.DOWN)

    @invariant()
    def ends_once_and_leaves_no_core_behind(self) -> None:
        state = self.host.state
        # A failed start waits for a client that it can tell.
        waits = state._tell_until < math.inf
        assert not waits or (not self.processes and not state.leases.leases)
        assert len(self.ends) == (1 if not self.processes and not waits else 0)
        assert (self.host.state.phase is HostPhase.ENDED) == bool(self.ends)

    def teardown(self) -> None:
        """Check that all is well in the end if all goes well from now on, whatever has happened."""
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
TestHistories.settings = settings(
    max_examples=amount(25, thorough=3000), stateful_step_count=40, deadline=None
)
TestLockStepHistories = LockStepHistories.TestCase
TestLockStepHistories.settings = settings(
    max_examples=amount(20, thorough=2000), stateful_step_count=40, deadline=None
)
