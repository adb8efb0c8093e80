"""Requests and outputs, which frontend and engine core exchange as
`(identity, request type, msgpack, *aux frames)`.

See `EngineCoreRequestType` and the structs below it. Control messages are in `nbengine.ipc.control_messages`.
"""

from __future__ import annotations

import enum
import hmac
import secrets
from typing import Any, Literal

import msgspec

from nbengine.errors import WireError
from nbengine.ipc.reasoning import ReasoningTokens
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
"""The topics under which engine cores publish only while someone is subscribed."""
FIRST_REQ = b"FIRST_REQ"
"""First frame of the message that a client writes to `stats.sock` when it has sent a request to an engine
core that it believes to be paused; the second is a msgpack `(rank, wave)` with the rank of the core that has
the request."""
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""First frame of the last message of an engine core on every output socket;
its identity and its `encode_incarnation` follow."""


class EngineCoreRequestType(enum.Enum):
    """First frame of a message to an engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    """The ids of requests; a second frame may have the ids of those among them that stop strings have ended."""
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    WAKEUP = b"\x04"
    """A type that is local to the engine core and never sent: it ends the busy loop's wait."""


class FinishReason(enum.IntEnum):
    """The reason for which a request ended."""

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
    """The mark of a request whose output the engine core keeps until it has been read;
    see `nbengine.ipc.transcripts`."""

    session: str
    """The name of the client across restarts of its process, under which it finds the output again."""
    prompt: str
    """The text that was asked, perhaps only its beginning, for a reader."""
    group: str
    """The engine request id of the whole request, common to its completions."""
    submitted: float
    """`time.time()` of the frontend."""
    index: int = 0
    num_completions: int = 1
    num_written: int = 0
    """Tokens at the prompt's end that are the beginning of the answer, which goes on from its middle."""
    context: list[int] = []
    """The tokens before the answer that decide how its text begins."""


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
    """The mark of a request whose output is kept; None: it is not kept."""
    reasoning: ReasoningTokens | None = None
    """The bounds of its reasoning, for a request with a grammar or a `thinking_budget`."""
    output_interval: float = 0.0
    """Seconds for which tokens may be held, to be told together; the first one and the end are told at once."""


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at N positions of one request, natural logarithms of the model's own distribution.

    Row i has the token at position i first, then the K most likely tokens in descending order, so that the
    token may occur twice; `sampled_token_ranks[i]` is the number of tokens that are at least as likely (1:
    only itself).
    """

    logprob_token_ids: list[list[int]]
    """Token ids: N rows of K + 1."""
    logprobs: list[list[float]]
    """Log probabilities of `logprob_token_ids`: N rows of K + 1."""
    sampled_token_ranks: list[int]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The result of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    """With `FinishReason.ERROR`, the reason why the request was refused, for its caller alone. With
    `FinishReason.ABORT`, the reason why the engine ended it."""
    new_logprobs: LogprobsLists | None = None
    """The log probabilities of `new_token_ids`."""
    new_prompt_logprobs: LogprobsLists | None = None
    """The log probabilities of all prompt tokens but the first;
    they come once, when the prompt has been computed."""
    pooling_output: Any = None
    """The result of a pooling request: a float32 array, which comes with its end."""
    lost_rank: int | None = None
    """The rank of the engine core that had the request and has ended,
    in an error that the client made itself."""
    argument: str | None = None
    """The argument for which the request was refused; None: it is not known, or not one alone."""
    is_unavailable: bool = False
    """True if the request was refused because the engine takes none at present."""

    @property
    def finished(self) -> bool:
        """Tell whether the request has left the engine core."""
        return self.finish_reason is not None


class PromptRead(msgspec.Struct, array_like=True, gc=False):
    """The part of a prompt that has been read after a step that has not read all of it.

    Of `num_prompt_tokens` tokens `num_read_tokens` have keys and values, and `num_cached_tokens` of these came from the
    prefix cache; `seconds` is the time since the engine core took up the request.
    """

    request_id: str
    num_prompt_tokens: int
    num_read_tokens: int
    num_cached_tokens: int
    seconds: float


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call: `failure_message` is None on success."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The results of one step for one client; `timestamp` is `time.monotonic()` of the engine core."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    """Requests of this client that ended without an output that says so."""
    wave_complete: int | None = None
    start_wave: int | None = None
    incarnation: int = 0
    """The number of the start of this rank that they come from:
    a core that replaces a dead one has the next number."""
    returned: list[str] | None = None
    """Requests of this client that the core, which leaves, has not begun and will not:
    another rank takes them."""
    prompts_read: list[PromptRead] | None = None
    """The requests of this client whose prompts take several steps, of which this was not the last."""


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """A call of an engine core's method by name."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


SECRET_BYTES = 16
"""Bytes of the secrets in engine cores' identities; see `engine_identity`."""
MAX_SECRET_BYTES = 64
"""The most bytes of a secret that a client chooses."""


def new_secret() -> bytes:
    """Make a secret that nobody can guess."""
    return secrets.token_bytes(SECRET_BYTES)


def engine_identity(rank: int, secret: bytes = b"") -> bytes:
    """Return the ZMQ identity of an engine core: its rank, 2 bytes little-endian, and a secret.

    Only the two ends of the connection know the secret, so that nobody else can take the core's place. For
    the host it is the one that the core has got at its start; for a client it is the one in its `Attach`,
    which may be empty.
    """
    return rank.to_bytes(2, "little") + secret


def rank_of_identity(identity: bytes, secret: bytes = b"") -> int:
    """Return the rank of an engine core that knows the secret.

    Raises:
        WireError: this is no identity of such a core.
    """
    if len(identity) < 2 or not hmac.compare_digest(identity[2:], secret):
        raise WireError("no engine core has this identity")
    return int.from_bytes(identity[:2], "little")


def pulse_identity(rank: int, incarnation: int, secret: bytes = b"") -> bytes:
    """Return the ZMQ identity of the socket that sends an engine core's pulses:
    the core's identity and incarnation."""
    return engine_identity(rank, secret) + encode_incarnation(incarnation)


def rank_of_peer(identity: bytes, secret: bytes = b"") -> int:
    """Return the rank of an engine core that speaks to its host as `engine_identity` or `pulse_identity`.

    Raises:
        WireError: the core does not know the secret.
    """
    is_pulse = len(identity) == len(engine_identity(0, secret)) + len(encode_incarnation(0))
    return rank_of_identity(identity[:-4] if is_pulse else identity, secret)


def encode_incarnation(incarnation: int) -> bytes:
    """Encode a core's incarnation, 4 bytes little-endian:
    the end of its first and its last message to a client."""
    return incarnation.to_bytes(4, "little")


def decode_home(identity: bytes, incarnation: bytes, secret: bytes = b"") -> tuple[int, int]:
    """Decode a core's rank and incarnation from the two frames that name it.

    Raises:
        WireError: they name no core, or their sender does not know the secret.
    """
    rank = rank_of_identity(identity, secret)
    if len(incarnation) != 4:
        raise WireError(f"{incarnation!r} is not an incarnation of an engine core")
    return rank, int.from_bytes(incarnation, "little")


def encode_announcement(client_index: int, incarnation: int) -> bytes:
    """Encode a core's first message on a connection to a client: the lease that the connection is for, 8
    bytes little-endian, and the core's incarnation."""
    return client_index.to_bytes(8, "little") + encode_incarnation(incarnation)


def decode_announcement(identity: bytes, announcement: bytes, secret: bytes = b"") -> tuple[int, int, int]:
    """Decode client index, rank and incarnation from a core's first message.

    Raises:
        WireError: it is no such message, or its sender does not know the secret.
    """
    rank, incarnation = decode_home(identity, announcement[8:], secret)
    return int.from_bytes(announcement[:8], "little"), rank, incarnation
