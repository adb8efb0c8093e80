"""The items that pass between the engine core's busy loop and its I/O threads."""

from __future__ import annotations

from collections.abc import Collection
from queue import SimpleQueue

import msgspec

from nbengine.errors import EngineDeadError
from nbengine.ipc.control_messages import (
    AttachClient,
    ChangeGroup,
    DetachClient,
    ShutdownEngine,
    WantEvents,
)
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityRequest
from nbengine.ipc.refusals import refused
from nbengine.kv_cache.events import KVCacheSnapshot, KVEventBatch
from nbengine.metrics.trace import TraceBatch, TraceSnapshot
from nbengine.runtime.logs import describe_exception
from nbengine.scheduler.request import Request

COORDINATOR_INDEX = -1
"""Stands for the coordinator where a client index is meant; clients' indices are positive."""


class AddRequest(msgspec.Struct, frozen=True):
    """A preprocessed request for the scheduler."""

    request: Request
    wave: int


class AbortRequests(msgspec.Struct, frozen=True):
    """Requests of one client to be aborted, all of them if `request_ids` is None; it has found a stop string in
    those that are `stopped`, too."""

    client_index: int
    request_ids: list[str] | None
    stopped: tuple[str, ...] = ()


class GiveUpClient(msgspec.Struct, frozen=True):
    """A client leaves too much unread: its requests end with an error that has this `reason`."""

    client_index: int
    reason: str


class StartWave(msgspec.Struct, frozen=True):
    """The coordinator says that a wave has begun, or is to."""

    wave: int


class Wakeup(msgspec.Struct, frozen=True):
    """An item that only ends the busy loop's wait: there is something to notice."""


class ThreadFailed(msgspec.Struct, frozen=True):
    """An I/O thread has ended by an exception, and so must the engine."""

    thread: str
    error: BaseException


class ExecutorFailed(msgspec.Struct, frozen=True):
    """The workers have ended by themselves, and so must the engine."""

    error: EngineDeadError


InputItem = (
    AddRequest
    | AbortRequests
    | GiveUpClient
    | UtilityRequest
    | DetachClient
    | WantEvents
    | ShutdownEngine
    | ChangeGroup
    | StartWave
    | Wakeup
    | ThreadFailed
    | ExecutorFailed
)
InputQueue = SimpleQueue[InputItem]
OutputItem = (
    tuple[int, EngineCoreOutputs]
    | KVEventBatch
    | KVCacheSnapshot
    | TraceBatch
    | TraceSnapshot
    | AttachClient
    | DetachClient
    | bytes
)
"""Outputs by client index, events to publish, clients that come and go, and ENGINE_CORE_DEAD as the last
item."""
OutputQueue = SimpleQueue[OutputItem]
AbortsQueue = SimpleQueue[tuple[int, list[str] | None, Collection[str]]]
"""Aborts like `AbortRequests`, which the busy loop sees in the middle of a step."""


def failure(request_id: str, reason: str) -> EngineCoreOutput:
    """Return the output that ends a request with an error."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=reason)


def refusal(client_index: int, request_id: str, error: BaseException) -> tuple[int, EngineCoreOutputs]:
    """Return the output that ends one request with an error, for its client alone."""
    return client_index, EngineCoreOutputs(outputs=[refused(request_id, error, describe_exception(error))])
