"""Requests and outputs: what frontend and engine core exchange as `(identity, request type, msgpack, *aux frames)`.

See `EngineCoreRequestType` and the structs below it. Control messages are in `nbengine.ipc.control_messages`.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from nbengine.errors import WireError
from nbengine.metrics.stats import SchedulerStats
from nbengine.sampling_params import PoolingParams, SamplingParams

STATS_TOPIC = b"stats"
"""First frame on the coordinator's `stats.sock`; the second is a msgpack `EngineStats`."""
KV_TOPIC = b"kv"
"""First frame on `stats.sock`; the second is a msgpack `KVEventBatch` or `KVCacheSnapshot`."""
TRACE_TOPIC = b"trace"
"""First frame on `stats.sock`; the second is a msgpack `TraceBatch` or `TraceSnapshot`."""
EventTopic = Literal["kv", "trace"]
EVENT_TOPICS: dict[bytes, EventTopic] = {KV_TOPIC: "kv", TRACE_TOPIC: "trace"}
"""Topics under which engine cores publish only while someone is subscribed."""
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


class TranscriptMark(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """On a request whose output the engine core is to keep until it has been read; see `nbengine.ipc.transcripts`."""

    session: str
    """Name of the client across restarts of its process, under which it finds the output again."""
    prompt: str
    """For a reader: what was asked, perhaps only its beginning."""
    group: str
    """Engine request id of the whole request, common to its completions."""
    submitted: float
    """`time.time()` of the frontend."""
    index: int = 0
    num_completions: int = 1
    num_written: int = 0
    """Tokens at the prompt's end that are the beginning of the answer, which goes on from its middle."""


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
    transcript: TranscriptMark | None = None
    """Whether the output is to be kept, and what for."""


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
