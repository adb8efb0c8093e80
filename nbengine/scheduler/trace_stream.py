"""The recorder of what a scheduler does, which works while someone wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, pairwise

from nbengine.kv_cache.holder import NO_BLOCK, BlockHolder
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import (
    PROMPT_PREVIEW_TOKENS,
    BlocksCached,
    BlocksGivenBack,
    BlocksUncached,
    CacheCleared,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestTrace,
    StepContinued,
    StepDone,
    StepPlanned,
    TraceBatch,
    TraceEvent,
    TraceMessage,
    TraceSnapshot,
)
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.state import SchedulerState

_Before = tuple[Request, int, int]
"""A request, its tokens before the last step of an outcome, and how many were computed or planned before the outcome."""


class TraceStream:
    """An observer that records what a scheduler and its prefix cache do, in numbered batches.

    It costs a few microseconds per step: a step that goes on like the one before is three numbers.
    """

    def __init__(self, scheduler: SchedulerState, clock: Callable[[], float] = time.time) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._block_size = scheduler.kv_cache_manager.block_size
        self._num_tables = scheduler.kv_cache_manager.groups.num_tables
        self._seq = 0
        self._events: list[TraceEvent] = []
        self._tokens: dict[int, list[int]] = {}
        """By block: the tokens with which it could last be found, if the stream has heard them."""
        self._last_ids: list[str] | None = None
        """The requests of the latest step, if another one can go on from it."""
        self._first_known_step = 0
        """Steps before it are not known to those who start from the latest snapshot."""
        self._unsettled: tuple[StepDone, list[_Before | None]] | None = None
        """An outcome that has to be spelled out, and the state of each request before it; None for requests
        that had ended."""

    @property
    def has_events(self) -> bool:
        """Tell whether there are events to take."""
        return bool(self._events)

    @property
    def is_recording(self) -> bool:
        """Return whether someone follows the trace."""
        return self._scheduler.observer is not None

    def record(self, wanted: bool) -> None:
        """Begin or end recording; what was recorded and not taken is dropped with the end."""
        if wanted == self.is_recording:
            return
        self._scheduler.observer = self if wanted else None
        pool = self._scheduler.kv_cache_manager.block_pool
        if wanted:
            pool.observers = (*pool.observers, self)
        else:
            pool.observers = tuple(observer for observer in pool.observers if observer is not self)
            self._events, self._tokens = [], {}
            # A subscriber that comes back has missed what happens from now on; the gap in `seq` says so.
            self._seq += 1

    def take_batch(
        self, now: float, stats: SchedulerStats, *, even_if_empty: bool = False
    ) -> TraceBatch | None:
        """Return the events since the batch before, None if there are none, or nobody wants them.

        `now` is `time.time()`, `stats` the present state, which with `even_if_empty` is reason enough for a
        batch.
        """
        if not self._events and not (even_if_empty and self._scheduler.observer is not None):
            return None
        events, self._events = self._events, []
        self._seq += 1
        return TraceBatch(self._scheduler.engine_index, self._seq, now, events, stats)

    def snapshot(self, now: float, stats: SchedulerStats) -> Iterator[TraceMessage]:
        """Yield the events that have not been taken, if there are any, then the present state.

        Only to be called while the stream records.
        """
        batch = self.take_batch(now, stats)
        if batch is not None:
            yield batch
        scheduler = self._scheduler
        self._last_ids = None
        self._first_known_step = scheduler.step_counter
        # Both clocks are read at one moment; `now` may have been taken long before.
        offset = self._clock() - scheduler.clock()
        yield TraceSnapshot(
            engine_index=scheduler.engine_index,
            seq=self._seq,
            time=now,
            block_size=self._block_size,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            requests=[self._trace_of(request, offset) for request in scheduler.requests.values()],
            cached=self._cached_blocks(),
            stats=stats,
            num_tables=self._num_tables,
        )

    def _trace_of(self, request: Request, offset: float) -> RequestTrace:
        return RequestTrace(
            added=_added(request, request.queued_at + offset),
            is_running=request.status is RequestStatus.RUNNING,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            block_ids=request.block_ids.copy(),
        )

    def _cached_blocks(self) -> BlocksCached:
        scheduler, tokens = self._scheduler, self._tokens
        block_ids = list(scheduler.kv_cache_manager.block_pool.cached_blocks().values())
        findable = set(block_ids)
        for request in scheduler.running:
            num_tables = self._num_tables
            for place, block_id in enumerate(request.block_ids[: request.num_cached_blocks * num_tables]):
                if block_id in findable and block_id not in tokens:
                    tokens[block_id] = self._block_tokens(request, place // num_tables)
        known = [block_id for block_id in block_ids if block_id in tokens]
        unknown = [block_id for block_id in block_ids if block_id not in tokens]
        return BlocksCached(known + unknown, list(chain.from_iterable(tokens[block] for block in known)))

    # Requests.

    def added(self, request: Request) -> None:
        """See `SchedulerObserver`."""
        self._events.append(_added(request, self._clock()))

    def preempted(self, request: Request) -> None:
        """See `SchedulerObserver`."""
        self._events.append(RequestPreempted(request.number))

    def finished(self, request: Request) -> None:
        """See `SchedulerObserver`."""
        reason = str(FINISH_REASONS[request.status])
        self._events.append(RequestFinished(request.number, self._clock(), reason))

    # Steps.

    def planned(self, plan: SchedulerOutput) -> None:
        """See `SchedulerObserver`."""
        counts, cached = plan.num_scheduled_tokens, plan.scheduled_cached_reqs
        if not counts and not plan.preempted_req_ids:
            return
        requests = self._scheduler.requests
        admits = bool(plan.scheduled_new_reqs or cached.resumed_req_ids)
        names, blocks = cached.req_ids, cached.new_block_ids
        # Copied, as all lists of the plan are: they belong to the executor.
        new_blocks = [
            (requests[names[index]].number, list(blocks[index] or ()))
            for index in compress(range(len(blocks)), blocks)
        ]
        now = self._clock()
        continues = not admits and cached.req_ids == self._last_ids
        if continues and plan.total_num_scheduled_tokens == len(cached.req_ids):
            self._events.append(StepContinued(plan.step, now, new_blocks))
        else:
            computed, admitted = cached.num_computed_tokens.copy(), []
            if admits:
                starts = dict(zip(cached.req_ids, computed, strict=True))
                starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
                computed = [starts[name] for name in counts]
                newcomers = cached.resumed_req_ids.union(new.req_id for new in plan.scheduled_new_reqs)
                admitted = [requests[name].number for name in counts if name in newcomers]
                new_blocks += [
                    (requests[new.req_id].number, new.block_ids.copy()) for new in plan.scheduled_new_reqs
                ]
            numbers = [requests[name].number for name in counts]
            event = StepPlanned(
                plan.step, now, numbers, list(counts.values()), computed, admitted, new_blocks
            )
            self._events.append(event)
            self._last_ids = list(counts)
        if plan.scheduled_spec_decode_tokens:
            # Only the outcome tells where its requests go on.
            self._last_ids = None

    def answered(self, plan: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        """See `SchedulerObserver`."""
        counts = plan.num_scheduled_tokens
        if not counts and not plan.preempted_req_ids:
            return
        event = self._done(plan.step, [*answer.step_ends, self._clock()])
        is_unknown = plan.step < self._first_known_step
        if is_unknown or plan.scheduled_spec_decode_tokens or answer.faults:
            before = [self._before(name, len(answer.step_ends)) for name in counts]
            self._unsettled = event, before
            if is_unknown:
                event.numbers = [-1 if each is None else each[0].number for each in before]

    def _done(self, step: int, ends: Sequence[float]) -> StepDone:
        """Tell the ends of one step or of several, which followed each other at once; return the last one's.

        Nothing is in flight beside several, so that each of them goes on from the one before.
        """
        event = StepDone(step, ends[0])
        self._events.append(event)
        for began, ended in pairwise(ends):
            step += 1
            event = StepDone(step, ended)
            self._events += (StepContinued(step, began, []), event)
        return event

    def _before(self, request_id: str, further: int) -> _Before | None:
        # An id may have been used again: its new owner will be found to have got nothing.
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return None
        return request, request.num_tokens + further, request.num_computed_tokens

    def settled(self) -> None:
        """See `SchedulerObserver`."""
        if self._unsettled is None:
            return
        event, before = self._unsettled
        self._unsettled = None
        event.num_sampled = [0 if each is None else each[0].num_tokens - each[1] for each in before]
        event.rejected = [
            (each[0].number, each[2] - each[0].num_computed_tokens)
            for each in before
            if each is not None and each[0].num_computed_tokens < each[2]
        ]

    # The prefix cache.

    def stored(self, request: BlockHolder, start: int, end: int) -> None:
        """See `CacheObserver`."""
        event = self._events[-1] if self._events else None
        if not isinstance(event, BlocksCached):
            event = BlocksCached([], [])
            self._events.append(event)
        num_tables = self._num_tables
        for place in range(start * num_tables, end * num_tables):
            block_id = request.block_ids[place]
            if block_id != NO_BLOCK:
                self._tokens[block_id] = tokens = self._block_tokens(request, place // num_tables)
                event.block_ids.append(block_id)
                event.token_ids += tokens

    def given_back(self, request: BlockHolder, places: Sequence[int]) -> None:
        """See `CacheObserver`."""
        self._events.append(BlocksGivenBack(request.number, list(places)))

    def _block_tokens(self, request: BlockHolder, index: int) -> list[int]:
        start = index * self._block_size
        token_ids = request.all_token_ids[start : start + self._block_size]
        if request.prompt_embeds is not None:
            num_unknown = min(max(request.num_prompt_tokens - start, 0), self._block_size)
            token_ids[:num_unknown] = [-1] * num_unknown
        return token_ids

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        """See `CacheObserver`."""
        self.replaced(block_id)

    def replaced(self, block_id: int) -> None:
        """See `CacheObserver`."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksUncached):
            last.block_ids.append(block_id)
        else:
            self._events.append(BlocksUncached([block_id]))

    def cleared(self) -> None:
        """See `CacheObserver`."""
        self._events.append(CacheCleared())


def _added(request: Request, now: float) -> RequestAdded:
    # A prompt given as embeddings has no tokens.
    token_ids = request.prompt_token_ids if request.prompt_embeds is None else []
    return RequestAdded(
        number=request.number,
        request_id=request.request_id,
        client_index=request.client_index,
        time=now,
        num_prompt_tokens=request.num_prompt_tokens,
        max_total_tokens=request.max_total_tokens,
        prompt_token_ids=token_ids[:PROMPT_PREVIEW_TOKENS],
        priority=request.priority,
        is_pooling=request.pooling_params is not None,
    )
