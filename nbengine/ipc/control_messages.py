"""Every control message: what clients, host and engine cores tell each other beside requests and outputs.

They are tagged structs, one frame each; `nbengine.ipc.handshake` encodes and decodes them.
"""

from __future__ import annotations

import msgspec

from nbengine.ipc.messages import EventTopic

# Client and host: DEALER to ROUTER on `host.sock` of the run directory.


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


class WantEvents(msgspec.Struct, tag="want_events"):
    """Host to engine core: someone follows what is published under a topic and needs a snapshot, or nobody does any more."""

    topic: EventTopic
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
HostToCore = EngineHandshakeMetadata | AttachClient | DetachClient | WantEvents | ShutdownEngine | ChangeGroup
