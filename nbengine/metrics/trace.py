"""The wire format of the trace: what a scheduler does, step by step, as a stream that others can follow.

An engine core records the trace only while someone is subscribed to it.
`nbengine.client.observe.trace_mirror` rebuilds the state from it. Requests are called by *numbers*, which one
engine core gives out from 0 in the order in which they come. All times are seconds of `time.time()` on the
engine's machine.
"""

from __future__ import annotations

import msgspec

from nbengine.metrics.stats import SchedulerStats

PROMPT_PREVIEW_TOKENS = 64
"""Number of a prompt's first tokens that are published with a request."""


class RequestAdded(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A request waits from now on."""

    number: int
    request_id: str
    """The id that the engine core knows (`RequestOutputCollector.engine_request_id`)."""
    client_index: int
    time: float
    num_prompt_tokens: int
    max_total_tokens: int
    """Most tokens of prompt and output together."""
    prompt_token_ids: list[int]
    """The prompt's first tokens, `PROMPT_PREVIEW_TOKENS` at most."""
    priority: int = 0
    is_pooling: bool = False


class StepPlanned(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A step was planned; the lists are parallel, in the plan's order.

    The events of the preemptions that it caused, and of the blocks evicted and stored for it, come before it.
    """

    step: int
    time: float
    numbers: list[int]
    num_tokens: list[int]
    """Tokens computed in this step."""
    num_computed: list[int]
    """Tokens computed before this step; for a request that is admitted, its hit in the prefix cache."""
    admitted: list[int]
    """Numbers of requests that waited until now, after a preemption or for the first time."""
    new_blocks: list[tuple[int, list[int]]]
    """(number, blocks appended to its tables, those of a prefix hit included; -1: no block)."""


class StepContinued(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A step was planned in which the requests of the step planned before it go on where that leaves them, in
    the same order and with one token each, and no request was admitted. It is never the first step after a
    snapshot."""

    step: int
    time: float
    new_blocks: list[tuple[int, list[int]]]
    """As in `StepPlanned`."""


class StepDone(msgspec.Struct, array_like=True, tag=True, omit_defaults=True, gc=False):
    """The outcome of a step was taken in; the events of requests that it has ended follow."""

    step: int
    time: float
    num_sampled: list[int] | None = None
    """New tokens by position in the step's numbers. None means one each, except for pooling requests and for
    requests that still had known tokens to compute when the step was planned: these got none. Tokens that
    came for a request that had ended count 0."""
    numbers: list[int] | None = None
    """The step's numbers, if it was planned before the latest snapshot; `num_sampled` is then given, too."""
    rejected: list[tuple[int, int]] = []
    """(number, tokens): this many of the request's computed tokens do not count, because drafts were
    rejected."""


class BlocksGivenBack(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A running request no longer holds some blocks: those of a window that it has passed."""

    number: int
    places: list[int]
    """The blocks' places in its tables, where -1 stands from now on."""


class RequestPreempted(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A running request has lost its blocks and waits again."""

    number: int


class RequestFinished(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A request has ended; its blocks are released, the last one first."""

    number: int
    time: float
    reason: str
    """"stop", "length", "abort" or "error"."""


class BlocksCached(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks whose contents can be found from now on."""

    block_ids: list[int]
    token_ids: list[int]
    """`block_size` ids per block; -1 for a token that was given as an embedding."""


class BlocksUncached(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks whose contents cannot be found any more: evicted, or another block has the same contents."""

    block_ids: list[int]


class CacheCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The prefix cache was reset: nothing can be found any more."""


TraceEvent = (
    RequestAdded
    | StepPlanned
    | StepContinued
    | StepDone
    | BlocksGivenBack
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
    """Tokens found in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int
    block_ids: list[int]
    """Its block tables, one for each group of the model's layers, column by column; -1: no block."""


class TraceBatch(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The events since the batch before, in order. `stats` is the state after the last event.

    `seq` grows by 1 from batch to batch of an engine core: a gap is a loss. An engine core that was started
    again (the next `incarnation`) counts from the beginning.
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
    """All blocks that can be found. Those whose tokens are known come first; `token_ids` has the tokens of
    these."""
    stats: SchedulerStats
    incarnation: int = 0
    num_tables: int = 1
    """Block tables of a request: groups of layers."""


TraceMessage = TraceBatch | TraceSnapshot
