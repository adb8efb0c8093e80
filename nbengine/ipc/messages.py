"""Every message between processes.

Frontend and engine core exchange `(identity, request type, msgpack, *aux frames)`: see
`EngineCoreRequestType` and the structs below it. Frontend, host and engine core exchange the tagged
control messages in the second half over their control sockets.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from nbengine.errors import WireError
from nbengine.metrics.stats import SchedulerStats
from nbengine.sampling_params import PoolingParams, SamplingParams

STATS_TOPIC = b"stats"
"""First frame on the coordinator's `stats.sock`; the second is a msgpack `EngineStats`."""
KV_TOPIC = b"kv"
"""First frame on `stats.sock`; the second is a msgpack `KVEventBatch` or `KVCacheSnapshot`."""
FIRST_REQ = b"FIRST_REQ"
"""First frame of what a client writes to `stats.sock` when it has sent a request to an engine core that it believes to
be paused; the second is a msgpack `(rank, wave)`, the rank being that of the core that has the request."""
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""First frame of the last message of an engine core on every output socket; its identity and its
`encode_incarnation` follow."""


class EngineCoreRequestType(enum.Enum):
    """First frame of a message to an engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    WAKEUP = b"\x04"
    """Local to the engine core: ends the busy loop's wait, never sent."""


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(enum.IntEnum):
    """Stations of a request inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """A station of a request; `timestamp` is `time.monotonic()` of the engine core."""

    type: EngineCoreEventType
    timestamp: float


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request as the engine core takes it: validated, tokenized, its parameters completed.

    `prompt_embeds`, where given, has shape (prompt length, hidden size).
    """

    request_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None = None
    arrival_time: float = 0.0
    cache_salt: str | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    client_index: int = 0
    """The client's epoch: the host gives every attachment a new one."""
    current_wave: int = 0
    external_req_id: str | None = None


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at N positions of one request, natural logarithms of the model's own distribution.

    Row i has the token at position i first, then the K most likely tokens in descending order, so that the
    token may occur twice; `sampled_token_ranks[i]` is how many tokens are at least as likely as it (1: none other).
    """

    logprob_token_ids: list[list[int]]
    """N rows of K + 1."""
    logprobs: list[list[float]]
    """N rows of K + 1."""
    sampled_token_ranks: list[int]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought to one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    """With `FinishReason.ERROR`: why the request was refused, for its caller alone."""
    new_logprobs: LogprobsLists | None = None
    """Of `new_token_ids`."""
    new_prompt_logprobs: LogprobsLists | None = None
    """Of all prompt tokens but the first; comes once, when the prompt has been computed."""
    pooling_output: Any = None
    """Of a pooling request: a float32 array, which comes with its end."""
    lost_rank: int | None = None
    """With an error of the client's own making: the engine core that had the request and has ended."""

    @property
    def finished(self) -> bool:
        """Whether the request has left the engine core."""
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call: `failure_message` is None on success."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought to one client; `timestamp` is `time.monotonic()` of the engine core."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    """Requests of this client that ended without an output of their own."""
    wave_complete: int | None = None
    start_wave: int | None = None
    incarnation: int = 0
    """Which start of this rank they come from: a core that took the place of a dead one has the next number."""
    returned: list[str] | None = None
    """Requests of this client that the core has not begun and will not, because it leaves: for another rank."""


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """Call of an engine core method by name."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


# Control messages. Client and host: DEALER to ROUTER on `host.sock` of the run directory.


class Attach(msgspec.Struct, tag="attach"):
    """Client to host, first message: become a client. `session` names the notebook across kernel restarts:
    a new attachment of a session ends the older one."""

    session: str
    pid: int
    """0 on another machine than the host's: its heartbeats alone say whether the client lives."""
    create_time: float
    input_address: str
    output_address: str
    replaces: int = 0
    """Index of this client's lease before, if it has lost one; that ends, too."""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Client to host: renew the lease."""


class Detach(msgspec.Struct, tag="detach"):
    """Client to host: end the lease, abort what is unfinished."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Client to host: end everything, at once or (`drain`) when what runs has finished."""

    drain: bool = False


class ScaleElasticEP(msgspec.Struct, tag="SCALE_ELASTIC_EP"):
    """Client to host: have this many engine cores. The last ranks come or go; `Scaled` is the answer."""

    data_parallel_size: int


class Scaled(msgspec.Struct, tag="scaled"):
    """Host to client, answer to `ScaleElasticEP`, when it is done or has failed (`error`)."""

    data_parallel_size: int
    """How many engine cores there are now."""
    error: str | None = None


class RanksChanged(msgspec.Struct, tag="ranks_changed"):
    """Host to client: requests may be sent to these engine cores from now on, and to no others."""

    engine_ranks: list[int]


class EngineLost(msgspec.Struct, tag="engine_lost"):
    """Host to client: one engine core among independent ones has ended, and with it what it was doing.

    A `RanksChanged` without it comes first. If it is started again (`restarting`), an `EngineReady` and a `RanksChanged`
    with it follow.
    """

    rank: int
    incarnation: int
    cause: str
    log_tail: str = ""
    restarting: bool = True


class Attached(msgspec.Struct, tag="attached"):
    """Host to client, answer to `Attach`: the client's epoch and the engines that will connect to it."""

    client_index: int
    engine_ranks: list[int]
    tensor_dir: str = ""
    """Where this client may leave large tensors for the engines (`ShmTensorSender`), if it is on this machine;
    empty: nowhere."""


class HeartbeatAck(msgspec.Struct, tag="heartbeat_ack"):
    """Host to client, answer to `Heartbeat`."""


class LeaseLost(msgspec.Struct, tag="lease_lost"):
    """Host to client: no lease is held any more; whatever it had asked for was aborted."""

    reason: str


class Progress(msgspec.Struct, tag="progress"):
    """A stage of start-up: fetch, load, profile, kv, ready. `fraction` is None where it is not known."""

    stage: str
    detail: str = ""
    fraction: float | None = None
    seconds: float = 0.0
    """Since the start of the stage."""
    rank: int | None = None
    """Of the engine core; None: of none, but of whoever starts them."""
    worker: int | None = None
    """Rank of the worker that reports, where there are several."""


class WorkerInfo(msgspec.Struct, array_like=True):
    """A worker of an engine core, as it is once the engine takes requests."""

    rank: int
    tp_rank: int
    pp_rank: int
    pid: int
    device: str
    weights_bytes: int
    kv_cache_bytes: int
    first_layer: int
    num_layers: int
    communicator: str = ""
    """Class of its end of the tensor-parallel group, if there are others in it."""
    link: str = ""
    """Class of its ends of the lines between stages, if there are any."""


class EngineReady(msgspec.Struct, tag="ready"):
    """Engine core to host (READY of the handshake), host to client: the engine takes requests.

    `kv_cache_bytes` and `weights_bytes` are those of all its workers together; `device` is that of the first.
    """

    rank: int
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_bytes: int
    weights_bytes: int
    device: str
    dtype: str
    supported_tasks: list[str]
    pid: int
    workers: list[WorkerInfo] = []
    """By rank."""
    incarnation: int = 0
    """See `EngineCoreOutputs`."""
    machine: str = ""
    """`machine_id` of where the pids mean something."""


class EngineDead(msgspec.Struct, tag="dead"):
    """Host to client (and engine core to host, when it can still tell): the engine has ended.

    `started` is False when it never became ready.
    """

    cause: str
    log_tail: str = ""
    started: bool = True
    expected: bool = False
    """The end was asked for."""


# Host and engine core: DEALER (identity: 2-byte little-endian rank) to ROUTER on `core.sock`.


class Hello(msgspec.Struct, tag="hello"):
    """Engine core to host: first message of the handshake."""

    rank: int
    pid: int


class EngineHandshakeMetadata(msgspec.Struct, tag="handshake"):
    """Host to engine core, answer to `Hello`: the coordinator's sockets."""

    coordinator_input: str
    """XPUB of the coordinator, which engine cores subscribe to."""
    coordinator_output: str
    """PULL of the coordinator, which engine cores push their stats to."""
    tensor_dir: str = ""
    """Where clients leave large tensors (`ShmTensorReceiver`); empty: nowhere."""
    incarnation: int = 0
    """See `EngineCoreOutputs`."""
    data_parallel_size: int = 1
    """How many engine cores there are now, this one included."""
    joins_later: bool = False
    """The others are in lock step already: this one joins them with a `ChangeGroup`."""


class AttachClient(msgspec.Struct, tag="attach_client"):
    """Host to engine core: connect to a client's sockets and announce yourself on its input."""

    client_index: int
    input_address: str
    output_address: str


class DetachClient(msgspec.Struct, tag="detach_client"):
    """Host to engine core: abort what the client asked for and close its sockets."""

    client_index: int


class ClientLost(msgspec.Struct, tag="client_lost"):
    """Engine core to host: a connection to a client broke, and with it what was on its way. Its lease has to end."""

    client_index: int


class WantKVEvents(msgspec.Struct, tag="want_kv_events"):
    """Host to engine core: someone follows the prefix cache and needs a snapshot of it, or nobody does any more."""

    wanted: bool


class ShutdownEngine(msgspec.Struct, tag="shutdown_engine"):
    """Host to engine core: end, at once or (`drain`) when what runs has finished.

    With `requeue` requests that have not begun, and those that still come, are handed back
    (`EngineCoreOutputs.returned`) instead: the engine goes on without this core.
    """

    drain: bool = False
    requeue: bool = False


class ChangeGroup(msgspec.Struct, tag="change_group"):
    """Host to engine cores in lock step: `after` of them are to step together instead of `before`.

    All of them get it, those that come and those that leave too. They make the change between two waves when the last one
    knows of it and those that leave have no requests any more. `init_method` is where their workers meet then.
    """

    before: int
    after: int
    init_method: str


class GroupChanged(msgspec.Struct, tag="group_changed"):
    """Engine core to host: it is one of `after` now. A core that leaves says nothing, and ends once it is told to."""

    rank: int
    after: int


ClientToHost = Attach | Heartbeat | Detach | Shutdown | ScaleElasticEP
HostToClient = (
    Attached
    | HeartbeatAck
    | LeaseLost
    | Progress
    | EngineReady
    | EngineLost
    | RanksChanged
    | Scaled
    | EngineDead
)
CoreToHost = Hello | Progress | EngineReady | ClientLost | EngineDead | GroupChanged
HostToCore = (
    EngineHandshakeMetadata | AttachClient | DetachClient | WantKVEvents | ShutdownEngine | ChangeGroup
)


def engine_identity(rank: int) -> bytes:
    """ZMQ identity of an engine core: its rank, 2 bytes little-endian."""
    return rank.to_bytes(2, "little")


def encode_incarnation(incarnation: int) -> bytes:
    """A core's incarnation, 4 bytes little-endian: its first message to a client, and the end of its last one."""
    return incarnation.to_bytes(4, "little")


def decode_home(identity: bytes, incarnation: bytes) -> tuple[int, int]:
    """Rank and incarnation of a core from the two frames that name it.

    Raises:
        WireError: they do not.
    """
    if len(identity) != 2 or len(incarnation) != 4:
        raise WireError(f"{identity!r}, {incarnation!r} is no rank and incarnation of an engine core")
    return int.from_bytes(identity, "little"), int.from_bytes(incarnation, "little")
