"""What a scheduler has: requests in their queues, the KV cache, and how requests come and go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import InvalidArgumentError, NBEngineError, RequestError
from nbengine.ipc.messages import EngineCoreEventType
from nbengine.kv_cache.manager import KVCacheManager
from nbengine.metrics.stats import SchedulerStats
from nbengine.scheduler.grammar import GrammarMaskBuilder
from nbengine.scheduler.limits import RequestLimits
from nbengine.scheduler.observer import SchedulerObserver
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.stages import PipelineShares
from nbengine.scheduler.stop import token_limit


class SchedulerState:
    """Requests, whether they wait or run, and their blocks; `Scheduler` plans steps with them.

    Whatever ends a request or takes its blocks goes through `_release` and `_preempt`, which note what the
    next plan tells the workers.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        engine_index: int = 0,
        *,
        num_lookahead_tokens: int = 0,
        async_scheduling: bool = False,
        num_stages: int = 1,
        max_concurrent_steps: int | None = None,
        grammar_masks: GrammarMaskBuilder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build an empty one.

        Args:
            num_lookahead_tokens: most drafts of a request in a step; as many slots are kept free after its
                tokens. Where a request goes on then depends on how many were accepted, so that nothing is
                scheduled ahead.
            async_scheduling: plan requests further while what was sampled for them is in flight.
            num_stages: of a pipeline, whose first stages know only the tokens that plans tell them: nothing is
                scheduled ahead, and requests are shared out among as many steps.
            max_concurrent_steps: how many steps can be in flight, if fewer than there are stages: requests are shared
                out among these.
            grammar_masks: needed by requests that have a grammar.
            clock: timestamps of events and outputs, in seconds.
        """
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.engine_index = engine_index
        self.num_lookahead_tokens = num_lookahead_tokens
        self.kv_cache_manager = KVCacheManager(
            num_blocks, cache_config.block_size, max_model_len, cache_config.enable_prefix_caching
        )
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.pause_state = PauseState.UNPAUSED
        self.num_preemptions = 0
        self.step_counter = 0
        self.observer: SchedulerObserver | None = None
        """Who is told what happens, if anybody wants to know."""
        # What the next plan tells the workers, and the next outputs the clients.
        self.finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        self._ended_by_client: defaultdict[int, list[str]] = defaultdict(list)
        self.ended_for_transcripts: list[Request] = []
        """Requests with a `transcript` that have ended, for whoever keeps these to take."""
        self._last_answered_step = -1
        self._schedules_ahead = async_scheduling and not num_lookahead_tokens and num_stages == 1
        self._limits = RequestLimits(
            max_model_len,
            self.max_num_batched_tokens,
            self.enable_chunked_prefill,
            num_blocks,
            cache_config.block_size,
            num_lookahead_tokens,
        )
        self._by_priority = scheduler_config.policy == "priority"
        self._chunk_limit = self.max_num_batched_tokens
        if self.enable_chunked_prefill and scheduler_config.long_prefill_token_threshold:
            self._chunk_limit = min(self._chunk_limit, scheduler_config.long_prefill_token_threshold)
        num_steps = min(num_stages, max_concurrent_steps or num_stages)
        self._shares = PipelineShares(num_steps, self._chunk_limit) if num_stages > 1 else None
        self._num_added = 0
        self._grammar_masks = grammar_masks
        self._structured: dict[str, Request] = {}
        """The unfinished requests that have a grammar."""
        self.clock = clock

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
            request.order = (request.priority, request.arrival_time, number)
        else:
            request.order = (0, 0.0, number)
        request.queued_at = self.clock()
        request.record_event(EngineCoreEventType.QUEUED, request.queued_at)
        self.requests[request.request_id] = request
        if request.grammar is not None:
            self._structured[request.request_id] = request
        self.waiting.add(request)
        if self.observer is not None:
            self.observer.added(request)

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus, *, tell_client: bool = True
    ) -> None:
        """End requests from outside. Ids that are unknown or already finished are ignored.

        No output is made for them; whatever is in flight for them is dropped. With `tell_client` their client
        finds them in the `finished_requests` of the next outputs: for ends that it has not asked for itself.

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
                if tell_client:
                    self._ended_by_client[request.client_index].append(request_id)

    def abort_client(self, client_index: int) -> list[str]:
        """Abort everything that a client has asked for, without telling it, and return the ids."""
        request_ids = [r.request_id for r in self.requests.values() if r.client_index == client_index]
        self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED, tell_client=False)
        return request_ids

    def take_unbegun(self) -> dict[int, list[str]]:
        """Remove the waiting requests that have brought their clients nothing yet; their ids by client index.

        What is in flight for one that was preempted is dropped.
        """
        by_client: defaultdict[int, list[str]] = defaultdict(list)
        for request in self.waiting:
            if not request.num_output_tokens:
                by_client[request.client_index].append(request.request_id)
                # It goes on elsewhere, and is kept there.
                request.transcript = None
        for request_ids in by_client.values():
            self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED, tell_client=False)
        return by_client

    def set_pause_state(self, state: PauseState) -> None:
        """Pause or go on, from the next `schedule` on."""
        self.pause_state = state

    def has_requests(self) -> bool:
        """Whether a step is due: there is something to schedule, or the workers must be told of something."""
        return bool(self.finished_req_ids or self._preempted_req_ids) or self.has_runnable_requests()

    def has_runnable_requests(self) -> bool:
        """Whether there is something to schedule, or will be when what is in flight has ended."""
        if self.pause_state is PauseState.UNPAUSED:
            return bool(self.requests)
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return bool(self.running) or any(r.status is RequestStatus.PREEMPTED for r in self.waiting)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs, paused or not."""
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        """How many requests wait or run."""
        return len(self.requests)

    def _preempt(self, request: Request, preempted_req_ids: set[str]) -> None:
        """Take all blocks from a request, which has left `running`. What is in flight for it still counts."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
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
        """Let go of a request that has just ended, and was in the state `before`."""
        (self.running if before is RequestStatus.RUNNING else self.waiting).remove(request)
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._structured.pop(request.request_id, None)
        self._preempted_req_ids.discard(request.request_id)
        self.finished_req_ids.add(request.request_id)
        if request.transcript is not None:
            self.ended_for_transcripts.append(request)
        if self.observer is not None:
            self.observer.finished(request)

    # The KV cache, seen from outside.

    def make_stats(self) -> SchedulerStats:
        """Return the state after the latest step, in constant time."""
        manager = self.kv_cache_manager
        return SchedulerStats(
            engine_index=self.engine_index,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_blocks=self.num_blocks,
            num_free_blocks=manager.block_pool.num_free_blocks,
            num_cached_blocks=manager.block_pool.num_cached_blocks,
            prefix_cache_queries=manager.prefix_cache_stats.queries,
            prefix_cache_hits=manager.prefix_cache_stats.hits,
            num_preemptions=self.num_preemptions,
            step_counter=self.step_counter,
        )

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; refused (False) while any request holds blocks.

        With `reset_running_requests` all running requests are preempted first, to compute their tokens again.
        """
        while reset_running_requests and self.running:
            self._preempt(self.running.pop_last(), self._preempted_req_ids)
        return self.kv_cache_manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that blocks are held by running requests alone, and the pool's books; for tests and idle times.

        Raises:
            NBEngineError: they do not balance.
        """
        if any(request.block_ids for request in self.waiting):
            raise NBEngineError("a waiting request holds KV blocks")
        self.kv_cache_manager.check_integrity(self.running)
