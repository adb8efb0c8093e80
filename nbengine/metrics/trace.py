"""What a scheduler does, step by step, as a stream that others can follow: the wire format.

An engine core records it only while someone is subscribed to it. `nbengine.client.trace_mirror` rebuilds the state from it.
Requests are called by *numbers*, which one engine core gives out from 0 in the order in which they come. All times are
seconds of `time.time()` on the engine's machine.
"""

from __future__ import annotations

import msgspec

from nbengine.metrics.stats import SchedulerStats

PROMPT_PREVIEW_TOKENS = 64
"""How many of a prompt's first tokens are published with a request."""


class RequestAdded(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A request waits from now on."""

    number: int
    request_id: str
    """As the engine core knows it (`RequestOutputCollector.engine_request_id`)."""
    client_index: int
    time: float
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and output together, at most."""
    prompt_token_ids: list[int]
    """The first `PROMPT_PREVIEW_TOKENS` at most."""
    priority: int = 0
    is_pooling: bool = False


class StepPlanned(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A step was planned; the lists are parallel, in the plan's order.

    What was preempted, evicted and stored for it comes before it.
    """

    step: int
    time: float
    numbers: list[int]
    num_tokens: list[int]
    """Computed in this step."""
    num_computed: list[int]
    """Computed before it; of a request that is admitted, its hit in the prefix cache."""
    admitted: list[int]
    """Numbers of requests that waited until now, after a preemption or for the first time."""
    new_blocks: list[tuple[int, list[int]]]
    """(number, blocks appended to its table, those of a prefix hit included)."""


class StepContinued(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A step was planned in which the requests of the one planned before go on where it leaves them, in its order and with
    one token each; nobody was admitted. Never the first step after a snapshot."""

    step: int
    time: float
    new_blocks: list[tuple[int, list[int]]]
    """As in `StepPlanned`."""


class StepDone(msgspec.Struct, array_like=True, tag=True, omit_defaults=True, gc=False):
    """The outcome of a step was taken in; what it has ended follows."""

    step: int
    time: float
    num_sampled: list[int] | None = None
    """New tokens by position in the step's numbers; None: one each, except for pooling requests and those of which known
    tokens were still to be computed when it was planned, which got none. What came for a request that had ended counts 0."""
    numbers: list[int] | None = None
    """Those of the step, if it was planned before the latest snapshot; `num_sampled` is given, too."""
    rejected: list[tuple[int, int]] = []
    """(number, tokens): of what the request had computed so much counts for nothing, because drafts were rejected."""


class RequestPreempted(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A running request has lost its blocks and waits again."""

    number: int


class RequestFinished(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A request has left; its blocks are let go, the last one first."""

    number: int
    time: float
    reason: str
    """"stop", "length", "abort" or "error"."""


class BlocksCached(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks whose contents can be found from now on."""

    block_ids: list[int]
    token_ids: list[int]
    """`block_size` a block; -1 for a token that was given as an embedding."""


class BlocksUncached(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks whose contents cannot be found any more: evicted, or another block has the same contents."""

    block_ids: list[int]


class CacheCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Nothing can be found any more."""


TraceEvent = (
    RequestAdded
    | StepPlanned
    | StepContinued
    | StepDone
    | RequestPreempted
    | RequestFinished
    | BlocksCached
    | BlocksUncached
    | CacheCleared
)


class RequestTrace(msgspec.Struct, array_like=True, gc=False):
    """An unfinished request at the time of a snapshot."""

    added: RequestAdded
    is_running: bool
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Its hit in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int
    block_ids: list[int]


class TraceBatch(msgspec.Struct, array_like=True, tag=True, gc=False):
    """What has happened since the batch before, in order. `stats` is the state after the last event.

    `seq` grows by 1 from batch to batch of an engine core: a gap is a loss. One that was started again (the next
    `incarnation`) counts anew.
    """

    engine_index: int
    seq: int
    time: float
    events: list[TraceEvent]
    stats: SchedulerStats
    incarnation: int = 0


class TraceSnapshot(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The state after the batch `seq`; batches with a greater number go on from here."""

    engine_index: int
    seq: int
    time: float
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    requests: list[RequestTrace]
    cached: BlocksCached
    """Everything that can be found; the tokens are those of the first blocks alone, where those of the others are unknown."""
    stats: SchedulerStats
    incarnation: int = 0


TraceMessage = TraceBatch | TraceSnapshot
