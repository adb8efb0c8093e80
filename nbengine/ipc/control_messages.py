"""The control messages: all that clients, host and engine cores tell each other beside requests and outputs.

They are tagged structs, one frame each; `nbengine.ipc.handshake` encodes and decodes them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from nbengine.ipc.liveness import ProcessIdentity, ProcessState
from nbengine.ipc.messages import MAX_SECRET_BYTES, EventTopic
from nbengine.ipc.protocol import UNNAMED
from nbengine.metrics.history import HistoryRow

Secret = Annotated[bytes, msgspec.Meta(max_length=MAX_SECRET_BYTES)]

# Client and host: DEALER to ROUTER on `host.sock` of the run directory.


class Attach(msgspec.Struct, tag="attach"):
    """Client to host, first message: become a client. `session` names the notebook across kernel restarts:
    a new attachment of a session ends the older one."""

    session: str
    process: ProcessIdentity
    """The client's process; its pid is 0 on another machine than the host's:
    then heartbeats alone say whether it lives."""
    input_address: str
    output_address: str
    replaces: int = 0
    """The index of this client's lease before, if it has lost one; that lease ends, too."""
    protocol: int = UNNAMED
    """The protocol that the client speaks; see `nbengine.ipc.protocol`, also below."""
    secret: Secret = b""
    """The secret in the engine cores' identities at this client's input; see `engine_identity`."""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Client to host: renew the lease."""


class Detach(msgspec.Struct, tag="detach"):
    """Client to host: end the lease, abort the client's unfinished requests."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Client to host: end the engine, at once or (`drain`) when its requests have finished."""

    drain: bool = False


class ScaleElasticEP(msgspec.Struct, tag="SCALE_ELASTIC_EP"):
    """Client to host: have this many engine cores. The last ranks come or go; `Scaled` is the answer."""

    data_parallel_size: int


class Scaled(msgspec.Struct, tag="scaled"):
    """Host to client, answer to `ScaleElasticEP`: it is done or has failed (`error`)."""

    data_parallel_size: int
    """The number of engine cores now."""
    error: str | None = None


class ReadHistory(msgspec.Struct, tag="read_history"):
    """Client to host: tell what has been kept of the engine's figures. `HistoryPage` is the answer."""

    last: float
    """The time to go back, in seconds."""
    rank: int | None = None
    """The engine core that is asked for; None: all."""
    after: tuple[int, int] | None = None
    """The rank and the start of the last row of the page before."""


class HistoryPage(msgspec.Struct, tag="history_page"):
    """Host to client, answer to `ReadHistory`: rows in the order of ranks and times, as many as a message holds."""

    rows: list[HistoryRow]
    now: float
    """The time on the clock of the rows' `start`."""
    more: bool = False
    """There are rows after these."""


class RanksChanged(msgspec.Struct, tag="ranks_changed"):
    """Host to client: requests may be sent to these engine cores from now on, and to no others."""

    engine_ranks: list[int]


class EngineLost(msgspec.Struct, tag="engine_lost"):
    """Host to client: one engine core among independent ones has ended, and its requests with it.

    A `RanksChanged` without it comes first. If it is started again (`restarting`), an `EngineReady` and a
    `RanksChanged` with it follow.
    """

    rank: int
    incarnation: int
    cause: str
    log_tail: str = ""
    restarting: bool = True


class Stalled(msgspec.Struct, tag="stalled"):
    """Host to client: an engine core makes no progress, and is ended if that goes on.

    `Recovered` follows otherwise.
    """

    rank: int
    seconds: float
    """Seconds without progress when this was sent."""
    doing: str
    """The work that it is in, and the cause as far as it is known:
    "in step 1,234; worker 1 is stopped (SIGSTOP?)"."""


class Recovered(msgspec.Struct, tag="recovered"):
    """Host to client: an engine core that was `Stalled` makes progress again."""

    rank: int


class Attached(msgspec.Struct, tag="attached"):
    """Host to client, answer to `Attach`: the client's epoch and the engine cores that will connect to it."""

    client_index: int
    engine_ranks: list[int]
    tensor_dir: str = ""
    """The directory in which this client may leave large tensors for the engine cores (`ShmTensorSender`), if
    it is on the host's machine; empty: none."""
    protocol: int = UNNAMED


class Refused(msgspec.Struct, tag="refused"):
    """Host to client, answer to an `Attach` of another protocol:
    it gets no lease, and `reason` is for its user."""

    reason: str


class HeartbeatAck(msgspec.Struct, tag="heartbeat_ack"):
    """Host to client, answer to `Heartbeat`."""


class LeaseLost(msgspec.Struct, tag="lease_lost"):
    """Host to client: its lease has ended, and all its requests were aborted."""

    reason: str


class Progress(msgspec.Struct, tag="progress"):
    """A stage of start-up: fetch, load, profile, kv, ready. `fraction` is None where it is not known."""

    stage: str
    detail: str = ""
    fraction: float | None = None
    seconds: float = 0.0
    """Seconds since the start of the stage."""
    rank: int | None = None
    """The rank of the engine core that reports; None: the process that starts them reports."""
    worker: int | None = None
    """The rank of the worker that reports, if the engine core has several."""


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
    """The class of its end of the tensor-parallel group, if that has other workers."""
    link: str = ""
    """The class of its ends of the lines between pipeline stages, if it has any."""
    kernels: str = ""
    """The kernels that compute on its device, and the instructions of products with quantised weights."""
    implementation: str = ""
    """The class of another library whose layers run, and that library; empty where the layers are nbengine's."""


class EngineReady(msgspec.Struct, tag="ready"):
    """Engine core to host (READY of the handshake), host to client: the engine takes requests.

    `kv_cache_bytes` and `weights_bytes` are sums over all its workers; `device` is the first worker's.
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
    """The workers, by rank."""
    incarnation: int = 0
    """The number of this start of the rank; see `EngineCoreOutputs`."""
    machine: str = ""
    """The `machine_id` of the machine where the pids mean something."""
    started: int = 0
    """The start in its `ProcessIdentity`."""
    num_state_slots: int = 0
    """Slots for the states of recurrent layers, of requests and of checkpoints; 0 for a model without such layers."""


class EngineDead(msgspec.Struct, tag="dead"):
    """Host to client (and engine core to host, when it can still tell): the engine has ended.

    `started` is False when it never became ready.
    """

    cause: str
    log_tail: str = ""
    started: bool = True
    expected: bool = False
    """The end was asked for."""
    explained: bool = False
    """The cause was raised on purpose: lines of a log would say no more, and there are none beside it."""


# Host and engine core: DEALER (`engine_identity`) to ROUTER on `core.sock`.


class Hello(msgspec.Struct, tag="hello"):
    """Engine core to host: first message of the handshake."""

    rank: int
    pid: int
    protocol: int = UNNAMED


class EngineHandshakeMetadata(msgspec.Struct, tag="handshake"):
    """Host to engine core, answer to `Hello`: the coordinator's sockets."""

    coordinator_input: str
    """The address of the coordinator's XPUB, which engine cores subscribe to."""
    coordinator_output: str
    """The address of the coordinator's PULL, which engine cores push their stats to."""
    tensor_dir: str = ""
    """The directory in which clients leave large tensors (`ShmTensorReceiver`); empty: none."""
    incarnation: int = 0
    """The number of this start of the rank; see `EngineCoreOutputs`."""
    data_parallel_size: int = 1
    """The number of engine cores now, this one included."""
    joins_later: bool = False
    """The others are in lock step already: this one joins them with a `ChangeGroup`."""
    protocol: int = UNNAMED


class AttachClient(msgspec.Struct, tag="attach_client"):
    """Host to engine core: connect to a client's sockets and announce yourself on its input,
    for this very lease."""

    client_index: int
    input_address: str
    output_address: str
    secret: Secret = b""
    """The client's secret; see `Attach`."""


class DetachClient(msgspec.Struct, tag="detach_client"):
    """Host to engine core: abort the client's requests and close the sockets to it."""

    client_index: int


class ClientLost(msgspec.Struct, tag="client_lost"):
    """Engine core to host: a connection to a client broke, and messages may be lost.

    The client's lease has to end.
    """

    client_index: int


class WantEvents(msgspec.Struct, tag="want_events"):
    """Host to engine core: a subscriber of a topic has come and needs a snapshot,
    or the last one has gone."""

    topic: EventTopic
    wanted: bool


class WorkerPulse(msgspec.Struct, array_like=True):
    """A worker in a `Pulse`."""

    rank: int
    ticks: int
    """A count that grows while the worker computes; 0 where nothing is counted."""
    waits: bool = False
    """The worker waits for other workers."""
    state: ProcessState = ProcessState.RUNNING
    """The state of its process, where the engine core looks at that."""


class Pulse(msgspec.Struct, tag="pulse"):
    """Engine core to host: its counts, sent several times in the shortest stall that is reported.

    A change is progress.
    """

    incarnation: int
    turns: int
    doing: Literal["load", "step", "call", "idle"]
    detail: str
    """`doing` in words, as in "in step 1,234"."""
    workers: list[WorkerPulse] = []


class ShutdownEngine(msgspec.Struct, tag="shutdown_engine"):
    """Host to engine core: end, at once or (`drain`) when its requests have finished.

    With `requeue` requests that have not begun, and those that still come, are handed back
    (`EngineCoreOutputs.returned`) instead: the engine goes on without this core.
    """

    drain: bool = False
    requeue: bool = False


class ChangeGroup(msgspec.Struct, tag="change_group"):
    """Host to engine cores in lock step: `after` of them are to step together instead of `before`.

    All of them get it, including those that come and those that leave. They make the change between two
    waves, once all know of it and those that leave have no requests any more. `init_method` is where their
    workers meet then.
    """

    before: int
    after: int
    init_method: str


class GroupChanged(msgspec.Struct, tag="group_changed"):
    """Engine core to host: it is one of `after` cores now.

    A core that leaves sends nothing, and ends once it is told to.
    """

    rank: int
    after: int


ClientToHost = Attach | Heartbeat | Detach | Shutdown | ScaleElasticEP | ReadHistory
HostToClient = (
    Attached
    | Refused
    | HeartbeatAck
    | LeaseLost
    | Progress
    | EngineReady
    | EngineLost
    | RanksChanged
    | Scaled
    | HistoryPage
    | Stalled
    | Recovered
    | EngineDead
)
CoreToHost = Hello | Progress | Pulse | EngineReady | ClientLost | EngineDead | GroupChanged
HostToCore = EngineHandshakeMetadata | AttachClient | DetachClient | WantEvents | ShutdownEngine | ChangeGroup
