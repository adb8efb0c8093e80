"""The events that reach the host's state machine, and the actions that it wants done."""

from __future__ import annotations

import signal

import msgspec

from nbengine.ipc.control_messages import (
    ClientToHost,
    CoreToHost,
    EngineDead,
    EngineReady,
    HostToClient,
    HostToCore,
    ReadHistory,
)


class ClientSpoke(msgspec.Struct, frozen=True):
    """Event: a message came on the clients' socket."""

    identity: bytes
    message: ClientToHost


class CoreSpoke(msgspec.Struct, frozen=True):
    """Event: a message came from an engine core."""

    rank: int
    message: CoreToHost


class CoreExited(msgspec.Struct, frozen=True):
    """Event: an engine core's process is gone. `how` follows "engine core 0 (pid 1)"; `clean`: status 0."""

    rank: int
    pid: int
    how: str
    clean: bool
    log_tail: str = ""


class StartFailed(msgspec.Struct, frozen=True):
    """Event: the process of an engine core could not be started."""

    rank: int
    cause: str


class StopAsked(msgspec.Struct, frozen=True):
    """Event: somebody other than a client wants the engine to end now; `cause` says who or why."""

    cause: str


class HostStood(msgspec.Struct, frozen=True):
    """Event: the host itself did not run for `seconds`: it was stopped, or the machine had no time for it."""

    seconds: float


class StacksGathered(msgspec.Struct, frozen=True):
    """Event, after `GatherStacks`: a core that stands has written the stacks of its threads, if it could."""

    rank: int
    incarnation: int
    stacks: str


class RecordFailed(msgspec.Struct, frozen=True):
    """Event: `RecordReady` or `RecordStalled` could not be carried out, as on a full disk."""


class TimePassed(msgspec.Struct, frozen=True):
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


class ToClient(msgspec.Struct, frozen=True):
    """Action: send a message to a client."""

    identity: bytes
    message: HostToClient


class ToCore(msgspec.Struct, frozen=True):
    """Action: send a message to an engine core."""

    rank: int
    message: HostToCore


class StartCore(msgspec.Struct, frozen=True):
    """Action: start the process of an engine core."""

    rank: int
    incarnation: int


class SignalCores(msgspec.Struct, frozen=True):
    """Action: send a signal to engine cores."""

    signal: signal.Signals
    ranks: list[int]


class GatherStacks(msgspec.Struct, frozen=True):
    """Action: have an engine core's processes write stacks to their logs; `StacksGathered` follows."""

    rank: int


class RecordStalled(msgspec.Struct, frozen=True):
    """Action: note the engine cores without progress in the connection file, for those who are no clients."""

    ranks: list[int]


class RemoveSockets(msgspec.Struct, frozen=True):
    """Action: remove the socket files of a client that has left; ZMQ does not."""

    addresses: list[str]


class RemoveTensors(msgspec.Struct, frozen=True):
    """Action: remove the tensors on their way to an engine core, except those of the clients in `live`."""

    live: frozenset[int]


class RecordReady(msgspec.Struct, frozen=True):
    """Action: note in the connection file which engine cores take requests; `size` are or will be there."""

    engines: list[EngineReady]
    size: int


class CoreReady(msgspec.Struct, frozen=True):
    """Action: tell an engine core that takes messages from now on what it could not be told before."""

    rank: int


class ForgetStats(msgspec.Struct, frozen=True):
    """Action: drop the statistics of an engine core that is gone; its successor counts from the beginning."""

    rank: int


class TellHistory(msgspec.Struct, frozen=True):
    """Action: answer a client's question for the history."""

    identity: bytes
    asked: ReadHistory


class ResizeCoordinator(msgspec.Struct, frozen=True):
    """Action: collect the statistics of the engine cores 0 to `size` - 1."""

    size: int


class End(msgspec.Struct, frozen=True):
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
    | TellHistory
    | ResizeCoordinator
    | End
)
