"""The events that reach the host's state machine, and the actions that it wants done."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from nbengine.ipc.control_messages import (
    ClientToHost,
    CoreToHost,
    EngineDead,
    EngineReady,
    HostToClient,
    HostToCore,
)


@dataclass(frozen=True, slots=True)
class ClientSpoke:
    """Event: a message came on the clients' socket."""

    identity: bytes
    message: ClientToHost


@dataclass(frozen=True, slots=True)
class CoreSpoke:
    """Event: a message came from an engine core."""

    rank: int
    message: CoreToHost


@dataclass(frozen=True, slots=True)
class CoreExited:
    """Event: an engine core's process is gone. `how` follows "engine core 0 (pid 1)"; `clean`: status 0."""

    rank: int
    pid: int
    how: str
    clean: bool
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Event: the process of an engine core could not be started."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Event: somebody other than a client wants the engine to end now; `cause` says who or why."""

    cause: str


@dataclass(frozen=True, slots=True)
class HostStood:
    """Event: the host itself did not run for `seconds`: it was stopped, or the machine had no time for it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StacksGathered:
    """Event, after `GatherStacks`: a core that stands has written the stacks of its threads, if it could."""

    rank: int
    incarnation: int
    stacks: str


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """Event: `RecordReady` or `RecordStalled` could not be carried out, as on a full disk."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Event: `HostState.next_deadline` may have come."""


Event = (
    ClientSpoke
    | CoreSpoke
    | CoreExited
    | StartFailed
    | StopAsked
    | HostStood
    | StacksGathered
    | RecordFailed
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class ToClient:
    """Action: send a message to a client."""

    identity: bytes
    message: HostToClient


@dataclass(frozen=True, slots=True)
class ToCore:
    """Action: send a message to an engine core."""

    rank: int
    message: HostToCore


@dataclass(frozen=True, slots=True)
class StartCore:
    """Action: start the process of an engine core."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SignalCores:
    """Action: send a signal to engine cores."""

    signal: signal.Signals
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class GatherStacks:
    """Action: have an engine core's processes write stacks to their logs; `StacksGathered` follows."""

    rank: int


@dataclass(frozen=True, slots=True)
class RecordStalled:
    """Action: note the engine cores without progress in the connection file, for those who are no clients."""

    ranks: list[int]


@dataclass(frozen=True, slots=True)
class RemoveSockets:
    """Action: remove the socket files of a client that has left; ZMQ does not."""

    addresses: list[str]


@dataclass(frozen=True, slots=True)
class RemoveTensors:
    """Action: remove the tensors on their way to an engine core, except those of the clients in `live`."""

    live: frozenset[int]


@dataclass(frozen=True, slots=True)
class RecordReady:
    """Action: note in the connection file which engine cores take requests; `size` are or will be there."""

    engines: list[EngineReady]
    size: int


@dataclass(frozen=True, slots=True)
class CoreReady:
    """Action: tell an engine core that takes messages from now on what it could not be told before."""

    rank: int


@dataclass(frozen=True, slots=True)
class ForgetStats:
    """Action: drop the statistics of an engine core that is gone; its successor counts from the beginning."""

    rank: int


@dataclass(frozen=True, slots=True)
class ResizeCoordinator:
    """Action: collect the statistics of the engine cores 0 to `size` - 1."""

    size: int


@dataclass(frozen=True, slots=True)
class End:
    """Action, the last one: remove everything, tell the audience, exit."""

    notice: EngineDead
    audience: list[bytes]


Action = (
    ToClient
    | ToCore
    | StartCore
    | SignalCores
    | GatherStacks
    | RecordStalled
    | RemoveSockets
    | RemoveTensors
    | RecordReady
    | CoreReady
    | ForgetStats
    | ResizeCoordinator
    | End
)
