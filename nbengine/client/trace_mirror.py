"""What a follower knows of one engine core: its requests, its KV blocks and its last steps. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import RequestAdded, TraceMessage

HISTORY_STEPS = 10_000
"""Steps that are kept."""
HISTORY_REQUESTS = 2_000
"""Requests that have ended and are kept."""


@dataclass(slots=True)
class RequestView:
    """A request as its engine core has published it."""

    added: RequestAdded
    state: str = "waiting"
    """"waiting", "running", "preempted" or "finished"."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    finish_reason: str | None = None
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepView:
    """A step; `numbers`, `num_tokens` and `num_computed` are parallel. Steps that do the same share the lists."""

    step: int
    time: float
    """When it was planned."""
    numbers: Sequence[int]
    num_tokens: Sequence[int]
    num_computed: Sequence[int]
    admitted: Sequence[int] = ()
    """Numbers; what they had computed already is their prefix hit."""
    resumed: Sequence[int] = ()
    """Those of `admitted` that had been preempted."""
    preempted: Sequence[int] = ()
    finished: Sequence[int] = ()
    """Numbers of requests that ended after this step was planned and before the next one."""
    prefills: Sequence[int] = ()
    """Numbers of the requests of which prompt tokens, or tokens lost in a preemption, were computed."""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled: int = 0
    seconds: float | None = None
    """From the plan until its outcome was taken in; None before."""
    num_running: int = 0
    """After planning, as all that follows."""
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0


class BlockMap:
    """The KV blocks; all arrays have one element a block.

    `version` says at which `TraceMirror.version` a block has last changed: a reader that remembers the version of its last
    look finds what is new.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.cached: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.holder: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        """Number of the request that took it last, also when that has ended; -1: nobody did."""
        self.position: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        """Index in that request's table."""
        self.version: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.token_ids: NDArray[np.int32] = np.full((num_blocks, block_size), -1, np.int32)
        """[num_blocks, block_size], of cached blocks; -1 where unknown."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks with reference count 0, cached or not."""
        return int(np.count_nonzero(self.ref_counts == 0))

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash, held or free."""
        return int(np.count_nonzero(self.cached))


class TraceMirror:
    """One engine core's state, rebuilt from what it publishes. For one thread."""

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.incarnation = 0
        self.seq: int | None = None
        """Of the latest message; None before the first snapshot and after a loss."""
        self.version = 0
        """Grows with every message."""
        self.num_snapshots = 0
        """How often it has started from a snapshot: after a loss what lies before is not connected with what follows."""
        self.stats = SchedulerStats(engine_index=engine_index)
        """As published with the latest message."""
        self.time = 0.0
        self.max_num_batched_tokens = 0
        self.max_num_seqs = 0
        self.requests: dict[int, RequestView] = {}
        """Unfinished ones by number, in the order in which they came."""
        self.finished: dict[int, RequestView] = {}
        """The last `HISTORY_REQUESTS` that have ended, the latest last."""
        self.blocks = BlockMap(0, 1)
        self.steps: deque[StepView] = deque(maxlen=HISTORY_STEPS)

    def apply(self, message: TraceMessage) -> bool:
        """Take in the next message; False if some before it were lost, and a snapshot is needed to go on."""
        raise NotImplementedError

    def holders(self, block_id: int) -> list[int]:
        """Numbers of the requests that hold a block, in time linear in the requests' tables."""
        raise NotImplementedError
