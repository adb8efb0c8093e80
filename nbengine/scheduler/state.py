"""The state of a scheduler: the requests in their queues and the KV cache, and how both change."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import isnan

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import InvalidArgumentError, NBEngineError, RequestError
from nbengine.ipc.messages import EngineCoreEventType
from nbengine.kv_cache.manager import KVCacheManager
from nbengine.kv_cache.sizing import longest_step, spare_slots
from nbengine.kv_cache.state_pool import NO_SLOT
from nbengine.metrics.stats import SchedulerStats
from nbengine.scheduler.grammar import GrammarMaskBuilder
from nbengine.scheduler.limits import RequestLimits
from nbengine.scheduler.meter import RequestMeter
from nbengine.scheduler.observer import SchedulerObserver
from nbengine.scheduler.options import PLAIN, SchedulerOptions
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.stages import PipelineShares
from nbengine.scheduler.stop import token_limit
from nbengine.scheduler.waiting import WaitingQueue


class SchedulerState:
    """Requests, whether they wait or run, and their blocks; `Scheduler` plans steps with them.

    Everything that ends a request or takes its blocks goes through `_release` and `_preempt`, which note what
    the next plan tells the workers.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        engine_index: int = 0,
        *,
        options: SchedulerOptions = PLAIN,
        grammar_masks: GrammarMaskBuilder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build a scheduler without requests.

        Args:
            grammar_masks: needed by requests that have a grammar.
            clock: timestamps of events and outputs, in seconds.
        """
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.engine_index = engine_index
        self.num_lookahead_tokens = options.num_lookahead_tokens
        self._chunk_limit = longest_step(scheduler_config)
        self._schedules_ahead = options.schedules_ahead
        self._by_priority = scheduler_config.scheduling_policy == "priority"
        self._shares = PipelineShares.of(options, self._chunk_limit)
        self._limits = RequestLimits.of(scheduler_config, cache_config, num_blocks, max_model_len, options)
        self.kv_cache_manager = KVCacheManager(
            num_blocks,
            cache_config.block_size,
            max_model_len,
            cache_config.enable_prefix_caching,
            options.groups,
            longest_step=self._limits.longest_step,
            num_slots=options.num_state_slots,
            num_spare_slots=spare_slots(options.num_state_slots, self.max_num_seqs, cache_config),
            state_tokens=options.state_tokens,
        )
        self._grammar_masks = grammar_masks
        self.clock = clock
        self._begin()

    def _begin(self) -> None:
        """Make the queues, which are empty, and the counters.

        With more than 30 attributes, all would be slower to reach: CPython shares the keys of no more.
        """
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running = RequestQueue()
        self._structured: dict[str, Request] = {}
        """The unfinished requests that have a grammar."""
        self.pause_state = PauseState.UNPAUSED
        self.num_preemptions = 0
        self.meter = RequestMeter()
        self.step_counter = 0
        self._last_answered_step = -1
        self._num_added = 0
        self.observer: SchedulerObserver | None = None
        """The observer that is told what happens, None if nobody wants to know."""
        # The next plan tells the first two to the workers, the next outputs tell the third to the clients.
        self.finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        self._ended_by_client: defaultdict[int, list[str]] = defaultdict(list)
        self.ended_for_transcripts: list[Request] = []
        """Requests with a `transcript` mark that have ended, until the transcript keeper takes them."""

    # Requests.

    def validate_request(self, request: Request) -> None:
        """Check that the request can be run to its end. Reads nothing that changes: safe on any thread.

        Raises:
            RequestError: the message says which limit the request exceeds.
        """
        self._limits.check(request)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be run to its end, or its id is in use.
        """
        self.validate_request(request)
        if request.request_id in self.requests:
            raise RequestError(f"request {request.request_id}: there is an unfinished request of this id")
        request.max_total_tokens = token_limit(
            request.num_prompt_tokens, request.sampling_params, self.max_model_len
        )
        request.number = number = self._num_added
        self._num_added += 1
        if self._by_priority:
            request.order = (request.priority, 0, request.arrival_time, number)
        else:
            # Arrival times come from the clients' clocks, and only count where priorities are asked for.
            request.order = (0, 0, 0.0, number)
        request.queued_at = self.clock()
        if isnan(request.received_at):
            request.received_at = request.queued_at
        request.record_event(EngineCoreEventType.QUEUED, request.queued_at)
        self.requests[request.request_id] = request
        if request.grammar is not None:
            self._structured[request.request_id] = request
        self.waiting.add(request)
        if self.observer is not None:
            self.observer.added(request)

    def finish_requests(
        self,
        request_ids: str | Iterable[str],
        status: RequestStatus,
        *,
        tell_client: bool = True,
        goes_on: bool = False,
    ) -> None:
        """End requests from outside. Ids that are unknown or already finished are ignored.

        No output is made for them; whatever is in flight for them is dropped. With `tell_client` their client
        finds them in the `finished_requests` of the next outputs: for ends that it has not asked for itself.
        Requests of which `goes_on` says that another engine core takes them do not count as ended.

        Raises:
            InvalidArgumentError: `status` is not a finished one.
        """
        if status not in FINISH_REASONS:
            raise InvalidArgumentError("status", status, "a finished status")
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                before, request.status = request.status, status
                self._release(request, before)
                if not goes_on:
                    self.meter.ended(request, self.clock())
                if tell_client:
                    self._ended_by_client[request.client_index].append(request_id)

    def abort_client(self, client_index: int) -> list[str]:
        """Abort everything that a client has asked for, without telling it, and return the ids."""
        request_ids = [r.request_id for r in self.requests.values() if r.client_index == client_index]
        self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED, tell_client=False)
        return request_ids

    def take_unbegun(self) -> dict[int, list[str]]:
        """Remove the waiting requests that have no output yet, and return their ids by client index.

        What is in flight for one that was preempted is dropped.
        """
        by_client: defaultdict[int, list[str]] = defaultdict(list)
        for request in self.waiting:
            if not request.num_output_tokens:
                by_client[request.client_index].append(request.request_id)
                # It goes on in another engine core, which keeps its transcript.
                request.transcript = None
        for request_ids in by_client.values():
            self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED, tell_client=False, goes_on=True)
        return by_client

    def set_pause_state(self, state: PauseState) -> None:
        """Pause or go on, from the next `schedule` on."""
        self.pause_state = state

    def has_requests(self) -> bool:
        """Tell whether a step is due: there is something to schedule, or to tell the workers."""
        return bool(self.finished_req_ids or self._preempted_req_ids) or self.has_runnable_requests()

    def has_runnable_requests(self) -> bool:
        """Tell whether there is something to schedule, or will be when the steps in flight have ended."""
        if self.pause_state is PauseState.UNPAUSED:
            return bool(self.requests)
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return bool(self.running) or self.waiting.num_begun > 0

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request waits or runs, paused or not."""
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        """Count the requests that wait or run."""
        return len(self.requests)

    def _preempt(self, request: Request, preempted_req_ids: set[str]) -> None:
        """Take all blocks from a request, which has left `running`. What is in flight for it still counts."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        # The step that is being planned, if any, has not planned this request.
        request.last_step = self.step_counter - 1
        request.status = RequestStatus.PREEMPTED
        request.record_event(EngineCoreEventType.PREEMPTED, self.clock())
        preempted_req_ids.add(request.request_id)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)
        if self.observer is not None:
            self.observer.preempted(request)

    def _release(self, request: Request, before: RequestStatus) -> None:
        """Forget a request that has just ended, and had the status `before`, and free its blocks."""
        (self.running if before is RequestStatus.RUNNING else self.waiting).remove(request)
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._structured.pop(request.request_id, None)
        # Workers keep the tokens of a preempted request, and nothing of an ended one.
        self._preempted_req_ids.discard(request.request_id)
        self.finished_req_ids.add(request.request_id)
        if request.transcript is not None:
            self.ended_for_transcripts.append(request)
        if self.observer is not None:
            self.observer.finished(request)

    def num_ahead_of(self, request_ids: Iterable[str]) -> int | None:
        """Count the requests that are to be admitted before the first of these; None if none of these waits.

        This costs time for each request that is ahead.
        """
        wanted = {
            request_id
            for request_id in request_ids
            if request_id in self.requests and self.requests[request_id].status is not RequestStatus.RUNNING
        }
        if not wanted:
            return None
        return next((at for at, waiting in enumerate(self.waiting) if waiting.request_id in wanted), None)

    # The KV cache, seen from outside.

    def make_stats(self) -> SchedulerStats:
        """Return the state after the latest step, in constant time."""
        manager = self.kv_cache_manager
        pool, prefixes = manager.block_pool, manager.prefix_cache_stats
        # It is made in every step, and names cost time.
        stats = SchedulerStats(
            self.engine_index,
            len(self.running),
            len(self.waiting),
            self.num_blocks,
            pool.num_free_blocks,
            pool.num_cached_blocks,
            prefixes.queries,
            prefixes.hits,
            self.num_preemptions,
            self.step_counter,
        )
        meter = self.meter
        stats.num_prompt_tokens = meter.num_prompt_tokens
        stats.num_generation_tokens = meter.num_generation_tokens
        stats.num_prefill_steps = meter.phases.num_prefill_steps
        stats.num_recompute_steps = meter.phases.num_recompute_steps
        if manager.states is not None:
            states = manager.states.pool
            stats.num_state_slots = states.num_slots
            stats.num_free_state_slots = states.num_free_slots
            stats.num_checkpoints = states.num_checkpoints
        return stats

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes and return True, or return False while any request holds blocks.

        With `reset_running_requests` all running requests are preempted first, to compute their tokens again.
        """
        while reset_running_requests and self.running:
            self._preempt(self.running.pop_last(), self._preempted_req_ids)
        return self.kv_cache_manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that only running requests hold blocks, and that the pool is consistent; for idle times.

        Raises:
            NBEngineError: one of the two is not so.
        """
        for request in self.requests.values():
            is_holding = request.block_ids or request.state_slot != NO_SLOT
            if is_holding and request.status is not RequestStatus.RUNNING:
                raise NBEngineError("a waiting request holds KV blocks or a slot")
        self.kv_cache_manager.check_integrity(self.running)
