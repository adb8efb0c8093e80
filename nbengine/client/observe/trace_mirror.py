"""A follower's mirror of one engine core: its requests, its KV blocks and its last steps. It does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbengine.client.observe.block_map import BlockMap
from nbengine.client.observe.trace_views import Advanced, RequestView, StepView
from nbengine.errors import WireError
from nbengine.kv_cache.holder import NO_BLOCK
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import (
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
    TraceMessage,
    TraceSnapshot,
)

__all__ = ["HISTORY_REQUESTS", "HISTORY_STEPS", "BlockMap", "RequestView", "StepView", "TraceMirror"]

HISTORY_STEPS = 10_000
"""The number of steps that are kept."""
HISTORY_REQUESTS = 2_000
"""The number of requests that have ended and are kept."""


@dataclass(slots=True)
class _InFlight:
    """A step whose outcome has not come yet."""

    view: StepView
    requests: Sequence[RequestView]
    """The step's requests, in the order of `view.numbers`."""
    get_token: Sequence[RequestView]
    """The requests for which a token is expected."""
    is_steady: bool = False
    """All of its requests decode one token."""


class TraceMirror:
    """The state of one engine core, rebuilt from what it publishes. It is for one thread."""

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.incarnation = 0
        self.seq: int | None = None
        """The number of the latest message; None before the first snapshot and after a loss."""
        self.version = 0
        """A number that grows with every message."""
        self.num_snapshots = 0
        """The number of snapshots from which it has started:
        after a loss the steps before and after are not connected."""
        self.stats = SchedulerStats(engine_index=engine_index)
        """The statistics that came with the latest message."""
        self.time = 0.0
        self.max_num_batched_tokens = 0
        self.max_num_seqs = 0
        self.requests: dict[int, RequestView] = {}
        """The unfinished requests by number, in the order in which they came."""
        self.finished: dict[int, RequestView] = {}
        """The last `HISTORY_REQUESTS` requests that have ended, by number, the latest last."""
        self.blocks = BlockMap(0, 1)
        self.steps: deque[StepView] = deque(maxlen=HISTORY_STEPS)
        self._num_running = 0
        self._num_free = 0
        self._num_cached = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._last: _InFlight | None = None
        """The step that was planned last, since the snapshot."""
        self._preempted: list[int] = []
        """The requests that were preempted since that step."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            RequestAdded: self._added,
            StepPlanned: self._planned,
            StepContinued: self._continued,
            StepDone: self._done,
            RequestPreempted: self._lost_its_blocks,
            BlocksGivenBack: self._gave_back,
            RequestFinished: self._ended,
            BlocksCached: self._cached,
            BlocksUncached: self._uncached,
            CacheCleared: self._cleared,
        }

    def apply(self, message: TraceMessage) -> bool:
        """Take in the next message; return False if some before it were lost,
        so that a snapshot is needed to go on."""
        if isinstance(message, TraceSnapshot):
            if (message.incarnation, message.seq) != (self.incarnation, self.seq):
                self._start_from(message)
            return True
        if self.seq is None or message.seq > self.seq + 1 or message.incarnation != self.incarnation:
            self.seq = None
            return False
        if message.seq == self.seq + 1:
            self.seq = message.seq
            self.version += 1
            self._take(message)
        return True

    def holders(self, block_id: int) -> list[int]:
        """Return the numbers of the requests that hold a block, in time linear in the requests' tables."""
        return [number for number, view in self.requests.items() if block_id in view.block_ids]

    def _take(self, batch: TraceBatch) -> None:
        handlers = self._handlers
        for event in batch.events:
            handlers[type(event)](event)
        self.stats, self.time = batch.stats, batch.time

    # Snapshots.

    def _start_from(self, snapshot: TraceSnapshot) -> None:
        if snapshot.incarnation != self.incarnation:
            # A new incarnation counts its requests and steps from the beginning.
            self.requests, self.finished = {}, {}
            self.steps.clear()
        self.seq, self.incarnation = snapshot.seq, snapshot.incarnation
        self.version += 1
        self.num_snapshots += 1
        self.stats, self.time = snapshot.stats, snapshot.time
        self.max_num_batched_tokens, self.max_num_seqs = (
            snapshot.max_num_batched_tokens,
            snapshot.max_num_seqs,
        )
        self._in_flight.clear()
        self._last = None
        self._preempted = []
        self._restore_requests(snapshot.requests)
        self._restore_blocks(snapshot)

    def _restore_requests(self, requests: Sequence[RequestTrace]) -> None:
        before, self.requests = self.requests, {}
        for trace in requests:
            view = before.pop(trace.added.number, None) or RequestView(trace.added)
            was_admitted = trace.is_running or trace.num_preemptions
            view.state = "running" if trace.is_running else ("preempted" if was_admitted else "waiting")
            view.num_computed_tokens = trace.num_computed_tokens
            view.num_output_tokens = trace.num_output_tokens
            view.num_cached_tokens = trace.num_cached_tokens
            view.num_preemptions = trace.num_preemptions
            view.block_ids = list(trace.block_ids)
            view.prefill_until = max(trace.added.num_prompt_tokens, view.num_tokens - 1)
            self.requests[trace.added.number] = view
        for number, view in before.items():
            self._retire(number, view)
        self._num_running = sum(view.state == "running" for view in self.requests.values())

    def _restore_blocks(self, snapshot: TraceSnapshot) -> None:
        num_blocks = snapshot.stats.num_blocks
        self.blocks = blocks = BlockMap(num_blocks, snapshot.block_size, snapshot.num_tables)
        blocks.version[:] = self.version
        self._num_free = num_blocks
        for number, view in self.requests.items():
            self._num_free += blocks.hold(number, view.block_ids, 0, self.version)
        cached = snapshot.cached
        self._num_cached = blocks.store(cached.block_ids, cached.token_ids, self.version)

    # Requests.

    def _added(self, event: RequestAdded) -> None:
        self.requests[event.number] = RequestView(event, prefill_until=event.num_prompt_tokens)

    def _lost_its_blocks(self, event: RequestPreempted) -> None:
        view = self.requests[event.number]
        self._release(view)
        view.state = "preempted"
        view.num_computed_tokens = 0
        view.num_preemptions += 1
        self._preempted.append(event.number)

    def _gave_back(self, event: BlocksGivenBack) -> None:
        table = self.requests[event.number].block_ids
        self._num_free += self.blocks.release([table[place] for place in event.places], self.version)
        for place in event.places:
            table[place] = NO_BLOCK

    def _ended(self, event: RequestFinished) -> None:
        view = self.requests.pop(event.number)
        self._release(view)
        view.ended_at = event.time
        view.finish_reason = event.reason
        self._retire(event.number, view)
        if self._last is not None:
            self._last.view.finished = (*self._last.view.finished, event.number)

    def _release(self, view: RequestView) -> None:
        if view.state == "running":
            self._num_running -= 1
            self._num_free += self.blocks.release(view.block_ids, self.version)
            view.block_ids = []

    def _retire(self, number: int, view: RequestView) -> None:
        view.state = "finished"
        view.block_ids = []
        self.finished[number] = view
        if len(self.finished) > HISTORY_REQUESTS:
            del self.finished[next(iter(self.finished))]

    # Steps.

    def _planned(self, event: StepPlanned) -> None:
        view = StepView(event.step, event.time, event.numbers, event.num_tokens, event.num_computed)
        requests = [self.requests[number] for number in event.numbers]
        if event.admitted:
            self._admit(event, view)
        get_token = []
        prefills = []
        for request, start, count in zip(requests, event.num_computed, event.num_tokens, strict=True):
            request.num_computed_tokens = end = start + count
            if start < request.prefill_until:
                prefills.append(request.added.number)
                view.num_prefill_tokens += min(end, request.prefill_until) - start
            view.num_decode_tokens += count
            if end >= request.num_tokens and not request.added.is_pooling:
                get_token.append(request)
        view.prefills = prefills
        view.num_decode_tokens -= view.num_prefill_tokens
        is_steady = not prefills and view.num_decode_tokens == len(get_token) == len(requests)
        self._note_plan(_InFlight(view, requests, get_token, is_steady), event.new_blocks)

    def _admit(self, event: StepPlanned, view: StepView) -> None:
        hits = dict(zip(event.numbers, event.num_computed, strict=True))
        view.admitted = event.admitted
        for number in event.admitted:
            request = self.requests[number]
            if request.state == "preempted":
                view.resumed = (*view.resumed, number)
            request.state = "running"
            # The last token of a preempted request was sampled and not computed yet.
            request.prefill_until = max(request.added.num_prompt_tokens, request.num_tokens - 1)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = hits[number]
        self._num_running += len(event.admitted)

    def _continued(self, event: StepContinued) -> None:
        last = self._last
        if last is None:
            raise WireError(f"step {event.step} continues a step that is not known")
        before = last.view
        if not last.is_steady:
            computed = [a + b for a, b in zip(before.num_computed, before.num_tokens, strict=True)]
            numbers, ones = list(before.numbers), [1] * len(computed)
            self._planned(StepPlanned(event.step, event.time, numbers, ones, computed, [], event.new_blocks))
            return
        advanced = before.num_computed
        base, by = (advanced.base, advanced.by) if isinstance(advanced, Advanced) else (advanced, 0)
        view = StepView(event.step, event.time, before.numbers, before.num_tokens, Advanced(base, by + 1))
        view.num_decode_tokens = len(last.requests)
        for request in last.requests:
            request.num_computed_tokens += 1
        self._note_plan(_InFlight(view, last.requests, last.get_token, is_steady=True), event.new_blocks)

    def _note_plan(self, step: _InFlight, new_blocks: Sequence[tuple[int, list[int]]]) -> None:
        for number, block_ids in new_blocks:
            table = self.requests[number].block_ids
            self._num_free += self.blocks.hold(number, block_ids, len(table), self.version)
            table.extend(block_ids)
        view = step.view
        view.preempted, self._preempted = self._preempted, []
        view.num_running, view.num_waiting = self._num_running, len(self.requests) - self._num_running
        view.num_free_blocks, view.num_cached_blocks = self._num_free, self._num_cached
        self.steps.append(view)
        self._in_flight[view.step] = self._last = step

    def _done(self, event: StepDone) -> None:
        step = self._in_flight.pop(event.step, None)
        num_sampled = 0
        if event.num_sampled is None:
            if step is None:
                raise WireError(f"step {event.step} has an outcome and was never planned")
            for request in step.get_token:
                # Each token comes here: it is not to cost a further call.
                if request.state != "finished":
                    if not request.num_output_tokens:
                        request.first_token_at = event.time
                    request.num_output_tokens += 1
                    num_sampled += 1
        else:
            numbers = event.numbers if step is None else step.view.numbers
            for number, count in zip(numbers or (), event.num_sampled, strict=True):
                if count:
                    _give_tokens(self.requests[number], count, event.time)
                    num_sampled += count
        for number, count in event.rejected:
            self.requests[number].num_computed_tokens -= count
        if step is not None:
            step.view.num_sampled = num_sampled
            step.view.seconds = event.time - step.view.time

    # The prefix cache.

    def _cached(self, event: BlocksCached) -> None:
        self._num_cached += self.blocks.store(event.block_ids, event.token_ids, self.version)

    def _uncached(self, event: BlocksUncached) -> None:
        self._num_cached += self.blocks.forget(event.block_ids, self.version)

    def _cleared(self, event: CacheCleared) -> None:  # noqa: ARG002
        self._num_cached += self.blocks.forget_all(self.version)


def _give_tokens(request: RequestView, count: int, time: float) -> None:
    if not request.num_output_tokens:
        request.first_token_at = time
    request.num_output_tokens += count
