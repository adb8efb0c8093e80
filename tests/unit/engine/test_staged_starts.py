"""Few engine cores start at a time, whatever happens meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.engine.host.events import Action, End, SignalCores, StartCore, StopAsked, TimePassed, ToCore
from nbengine.engine.host.state import HostPhase, HostState
from nbengine.ipc.control_messages import ChangeGroup, GroupChanged, Hello, ShutdownEngine
from nbengine.ipc.liveness import ProcessState
from tests.unit.engine.host_rig import HANDSHAKE, LOCK_STEP, Host, attach, only, ready_again, scale, told

SIZES = st.integers(1, 12)
LIMITS = st.integers(1, 5)


class Cores:
    """The processes that a host has started, each of which does the next thing when it is told to."""

    def __init__(self, ranks: int, max_starting: int, lock_step: bool) -> None:
        model = LOCK_STEP if lock_step else ModelConfig()
        self.lock_step = lock_step
        self.host = Host(ranks=ranks, max_starting=max_starting, bound=True, lease=1e9, model=model)
        self.max_starting = max_starting
        self.incarnations: dict[int, int] = {}
        self.greeted: set[int] = set()
        self.ready: set[int] = set()
        self.num_started = 0
        self.take(self.host.begun)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartCore(rank, incarnation):
                    assert rank not in self.incarnations
                    self.incarnations[rank] = incarnation
                    self.num_started += 1
                case SignalCores(_, ranks):
                    for rank in ranks:
                        self.end(rank)
                case ToCore(rank, ShutdownEngine()):
                    self.end(rank)
                case ToCore(rank, ChangeGroup(after=size)) if rank < size:
                    self.take(self.host.core(GroupChanged(rank, size), rank))
        over = self.greeted if self.lock_step else self.ready
        assert len(self.incarnations.keys() - over) <= self.max_starting

    def end(self, rank: int) -> None:
        if self.incarnations.pop(rank, None) is not None:
            self.greeted.discard(rank)
            self.ready.discard(rank)
            self.take(self.host.exit(rank))

    def go_on(self, rank: int) -> None:
        """Say Hello; and then, in lock step when all have a process, READY."""
        if rank not in self.greeted:
            self.greeted.add(rank)
            self.take(self.host.core(Hello(rank, 100 + rank), rank))
        elif rank not in self.ready and (not self.lock_step or self.all_have_met):
            self.ready.add(rank)
            self.take(self.host.core(ready_again(rank, self.incarnations[rank]), rank))

    @property
    def all_have_met(self) -> bool:
        """Return whether nobody waits for a core that has not been started."""
        return self.incarnations.keys() == set(self.host.state._table.members) == self.greeted

    def get_ready(self) -> None:
        # Each has two things to do, and those that it makes room for.
        for _ in range(3 * len(self.host.state._table.all())):
            for rank in sorted(self.incarnations.keys() - self.ready):
                self.go_on(rank)


@given(SIZES, LIMITS, st.booleans())
def test_all_get_ready_in_the_end_also_those_that_meet_before(ranks, max_starting, lock_step):
    cores = Cores(ranks, max_starting, lock_step)
    cores.get_ready()
    assert cores.ready == set(range(ranks))
    assert cores.host.state.phase is HostPhase.READY


@given(SIZES, LIMITS, st.booleans(), st.lists(st.integers(0, 11), max_size=40))
def test_who_is_asked_to_end_starts_no_more(ranks, max_starting, lock_step, progress):
    cores = Cores(ranks, max_starting, lock_step)
    for rank in progress:
        if rank in cores.incarnations:
            cores.go_on(rank)
    before = cores.num_started
    actions = cores.host.stop()
    cores.take(actions)
    for rank in list(cores.incarnations):
        cores.end(rank)
    assert cores.num_started == before
    assert cores.host.state.phase is HostPhase.ENDED


def fresh(ranks: int, max_starting: int) -> HostState:
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=ranks))
    return HostState(config, HANDSHAKE, lambda process: ProcessState.RUNNING, 0.0, max_starting=max_starting)


def test_one_event_starts_one_core():
    """The caller that performs the actions can look in between whether the engine is to end."""
    state = fresh(4, 3)
    for rank in range(3):
        assert state.next_deadline() == 0
        assert state.handle(TimePassed(), 1.0) == [StartCore(rank, 0)]
    assert state.next_deadline() > 0
    assert state.handle(TimePassed(), 1.0) == []


def test_who_is_asked_to_end_before_anything_has_started_starts_nothing():
    state = fresh(4, 3)
    assert [type(action) for action in state.handle(StopAsked("asked"), 0.0)] == [End]
    assert state.handle(TimePassed(), 1.0) == []


@given(SIZES, LIMITS, st.booleans(), st.integers(0, 4), st.data())
def test_newcomers_are_started_few_at_a_time_and_if_one_fails_nobody_is_waited_for(
    size, max_starting, lock_step, num_steps, data
):
    cores = Cores(2, max_starting, lock_step)
    cores.get_ready()
    cores.take(cores.host.client(attach()))
    asked = scale(cores.host, size)
    cores.take(asked)
    for _ in range(num_steps):
        coming = sorted(cores.incarnations.keys() - cores.ready)
        if coming:
            cores.go_on(data.draw(st.sampled_from(coming)))
    coming = sorted(cores.incarnations.keys() - cores.ready)
    if coming and size != 7:
        victim = data.draw(st.sampled_from(coming))
        del cores.incarnations[victim]
        cores.greeted.discard(victim)
        cores.take(cores.host.exit(victim, "was killed", clean=False))
    cores.get_ready()
    table = cores.host.state._table
    assert table.coming == table.ready == sorted(cores.incarnations)
    assert cores.host.state._scaler._current is None
    assert not only(told(asked), End)
