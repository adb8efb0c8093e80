"""A host's state machine on a fake clock, and what its ranks and clients do to it."""

from __future__ import annotations

import msgspec

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.engine.host_events import (
    Action,
    ClientSpoke,
    CoreExited,
    CoreSpoke,
    StopAsked,
    TimePassed,
    ToClient,
)
from nbengine.engine.host_state import HostPhase, HostState
from nbengine.engine.scaling import LockStep
from nbengine.ipc.control_messages import (
    Attach,
    EngineHandshakeMetadata,
    EngineReady,
    GroupChanged,
    Hello,
    ScaleElasticEP,
)

HANDSHAKE = EngineHandshakeMetadata("in", "out")
LOCK_STEP = ModelConfig(is_moe=True)
MISFITS = {7: "data_parallel_size must be 1, 2 or 4, got 7"}
"""Sizes that the model in lock step cannot be divided by."""


def ready(rank: int = 0) -> EngineReady:
    return EngineReady(rank, 8, 16, 128, 1, 1, "cpu", "float32", ["generate"], 100 + rank)


def attach(session: str = "s", pid: int = 1) -> Attach:
    return Attach(session, pid, 0.0, f"ipc:///run/{session}.in", f"ipc:///run/{session}.out")


class Host:
    """A `HostState` with a clock that the test moves."""

    def __init__(self, ranks: int = 1, *, dead: set[int] | None = None, **config) -> None:
        config = {"bound": False, "keep_alive": 100.0, "lease": 30.0} | config
        parallel = ParallelConfig(data_parallel_size=ranks)
        self.ranks = range(ranks)
        self.now = 0.0
        self.dead = set() if dead is None else dead
        engine = EngineConfig(parallel=parallel, **config)
        lock_step = LockStep("file:///place", MISFITS.get) if engine.lock_step else None
        self.state = HostState(engine, HANDSHAKE, lambda pid, _: pid not in self.dead, 0.0, lock_step)

    def client(self, message, identity: bytes = b"a") -> list[Action]:
        return self.state.handle(ClientSpoke(identity, message), self.now)

    def core(self, message, rank: int = 0) -> list[Action]:
        return self.state.handle(CoreSpoke(rank, message), self.now)

    def exit(self, rank: int = 0, how: str = "exited with status 0", clean: bool = True) -> list[Action]:
        return self.state.handle(CoreExited(rank, 100 + rank, how, clean), self.now)

    def stop(self, cause: str = "asked") -> list[Action]:
        return self.state.handle(StopAsked(cause), self.now)

    def at(self, now: float) -> list[Action]:
        self.now = now
        return self.state.handle(TimePassed(), now)

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


def confirm(host: Host, *ranks: int, size: int) -> list[Action]:
    return [action for rank in ranks for action in host.core(GroupChanged(rank, size), rank)]
