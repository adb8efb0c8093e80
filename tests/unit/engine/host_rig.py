"""A host's state machine on a fake clock, and what its ranks and clients do to it."""

from __future__ import annotations

import msgspec

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.engine.host.events import (
    Action,
    ClientSpoke,
    CoreExited,
    CoreSpoke,
    Event,
    StartFailed,
    StopAsked,
    TimePassed,
    ToClient,
)
from nbengine.engine.host.scaling import LacksRoom, LockStep
from nbengine.engine.host.state import HostPhase, HostState
from nbengine.ipc.control_messages import (
    Attach,
    EngineHandshakeMetadata,
    EngineReady,
    GroupChanged,
    Hello,
    ScaleElasticEP,
)
from nbengine.ipc.liveness import ProcessIdentity, ProcessState

HANDSHAKE = EngineHandshakeMetadata("in", "out")
LOCK_STEP = ModelConfig(is_moe=True)
MISFITS = {7: "data_parallel_size must be 1, 2 or 4, got 7"}
"""Sizes that the model in lock step cannot be divided by."""


def ready(rank: int = 0) -> EngineReady:
    return EngineReady(rank, 8, 16, 128, 1, 1, "cpu", "float32", ["generate"], 100 + rank)


def attach(session: str = "s", pid: int = 1) -> Attach:
    return Attach(session, ProcessIdentity(pid, 1), f"ipc:///run/{session}.in", f"ipc:///run/{session}.out")


class Host:
    """A `HostState` with a clock that the test moves; `begun` is what it does first. What is to be done at once is done."""

    def __init__(
        self,
        ranks: int = 1,
        *,
        dead: set[int] | None = None,
        max_starting: int = 100,
        lacks_room: LacksRoom = lambda before, after: None,
        **config,
    ) -> None:
        config = {"bound": False, "keep_alive": 100.0, "lease": 30.0, "step_timeout": 0.0} | config
        parallel = ParallelConfig(data_parallel_size=ranks)
        self.ranks = range(ranks)
        self.now = 0.0
        self.dead = set() if dead is None else dead
        engine = EngineConfig(parallel=parallel, **config)
        lock_step = LockStep("file:///place", MISFITS.get) if engine.lock_step else None
        self.state = HostState(
            engine,
            HANDSHAKE,
            self._process_state,
            0.0,
            lock_step,
            max_starting=max_starting,
            lacks_room=lacks_room,
        )
        self.begun = self._follow_up()

    def _process_state(self, process: ProcessIdentity) -> ProcessState:
        return ProcessState.GONE if process.pid in self.dead else ProcessState.RUNNING

    def client(self, message, identity: bytes = b"a") -> list[Action]:
        return self._take(ClientSpoke(identity, message))

    def core(self, message, rank: int = 0) -> list[Action]:
        return self._take(CoreSpoke(rank, message))

    def exit(self, rank: int = 0, how: str = "exited with status 0", clean: bool = True) -> list[Action]:
        return self._take(CoreExited(rank, 100 + rank, how, clean))

    def fail_to_start(self, rank: int, cause: str) -> list[Action]:
        return self._take(StartFailed(rank, cause))

    def stop(self, cause: str = "asked") -> list[Action]:
        return self._take(StopAsked(cause))

    def at(self, now: float) -> list[Action]:
        self.now = now
        return self._take(TimePassed())

    def _take(self, event: Event) -> list[Action]:
        return self.state.handle(event, self.now) + self._follow_up()

    def _follow_up(self) -> list[Action]:
        actions: list[Action] = []
        while self.state._table.next_start() is not None:
            assert self.state.next_deadline() == 0
            actions += self.state.handle(TimePassed(), self.now)
        return actions

    def greet(self) -> Host:
        for rank in self.ranks:
            self.core(Hello(rank, 100 + rank), rank)
        return self

    def start(self) -> Host:
        self.greet()
        for rank in self.ranks:
            self.core(ready(rank), rank)
        assert self.state.phase is HostPhase.READY
        return self


def only(actions: list[Action], kind: type) -> list:
    return [action for action in actions if isinstance(action, kind)]


KILLED = "was killed by signal 9 (SIGKILL)"


def ready_again(rank: int, incarnation: int) -> EngineReady:
    return msgspec.structs.replace(ready(rank), incarnation=incarnation)


def told(actions: list[Action], identity: bytes = b"a") -> list:
    """List the messages that a client hears."""
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


def confirm(host: Host, *ranks: int, size: int) -> list[Action]:
    return [action for rank in ranks for action in host.core(GroupChanged(rank, size), rank)]
