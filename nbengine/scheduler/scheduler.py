"""The scheduler: requests and sampled tokens in, plans and outputs out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import InvalidArgumentError, NBEngineError, RequestError
from nbengine.ipc.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from nbengine.kv_cache.manager import KVCacheManager
from nbengine.metrics.stats import SchedulerStats
from nbengine.scheduler.grammar import Grammar, GrammarMaskBuilder
from nbengine.scheduler.output import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.stop import append_tokens, follow_grammar, token_limit

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Scheduler:
    """Decides each step which tokens of which requests are computed, and what came of it.

    There is one token budget and no prefill or decode phase: a request's `num_computed_tokens` catches up
    with its `num_tokens`. Running requests come first, then waiting ones. Both are kept in scheduling order
    (arrival for `fcfs`; priority, arrival time, arrival for `priority`), so the victim of a preemption is
    always the last running request, and never one that the step has already planned. A preempted request
    gives up its blocks and computes again what the prefix cache no longer has.

    Progress: the first running request can always take the blocks of all others, and a request that would
    not fit in the pool alone is refused, so every step with an unfinished request computes something.

    Every plan of `schedule` must be executed, in order, and answered with `update_from_output`. Requests may
    be added and finished between any two calls.
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
        grammar_masks: GrammarMaskBuilder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_lookahead_tokens` slots are kept free after each request's tokens, for drafts.

        Requests that have a grammar need `grammar_masks`.
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
        self.finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        self.pause_state = PauseState.UNPAUSED
        self.num_preemptions = 0
        self.step_counter = 0
        self._by_priority = scheduler_config.policy == "priority"
        self._chunk_limit = self.max_num_batched_tokens
        if self.enable_chunked_prefill and scheduler_config.long_prefill_token_threshold:
            self._chunk_limit = min(self._chunk_limit, scheduler_config.long_prefill_token_threshold)
        self._num_added = 0
        self._grammar_masks = grammar_masks
        self._structured: dict[str, Request] = {}
        """The unfinished requests that have a grammar."""
        self._clock = clock

    # Requests.

    def validate_request(self, request: Request) -> None:
        """Check that the request can be run to its end. Reads nothing that changes: safe on any thread.

        Raises:
            RequestError: the message says which limit the request exceeds.
        """
        num_prompt = request.num_prompt_tokens
        if not num_prompt:
            raise RequestError(f"request {request.request_id}: the prompt has no tokens")
        is_pooling = request.pooling_params is not None
        if is_pooling and num_prompt > self.max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, more than "
                f"max_model_len={self.max_model_len}"
            )
        if not is_pooling and num_prompt >= self.max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"max_model_len={self.max_model_len} at most {self.max_model_len - 1} leave room for an output"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"enable_chunked_prefill=False it must fit in one step of "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        limit = token_limit(num_prompt, request.sampling_params, self.max_model_len)
        num_slots = min(limit - 1 + self.num_lookahead_tokens, self.max_model_len)
        num_needed = self.kv_cache_manager.num_blocks_for(num_slots)
        if num_needed > self.num_blocks:
            raise RequestError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens with {limit - num_prompt} output "
                f"tokens needs {num_needed} KV blocks, and there are {self.num_blocks}; lower max_tokens"
            )

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
        sequence = self._num_added
        self._num_added += 1
        if self._by_priority:
            request.order = (request.priority, request.arrival_time, sequence)
        else:
            request.order = (0, 0.0, sequence)
        request.record_event(EngineCoreEventType.QUEUED, self._clock())
        self.requests[request.request_id] = request
        if request.grammar is not None:
            self._structured[request.request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside. Ids that are unknown or already finished are ignored.

        No output is made for them; whatever is in flight for them is dropped.

        Raises:
            InvalidArgumentError: `status` is not a finished one.
        """
        if status not in FINISH_REASONS:
            raise InvalidArgumentError("status", status, "a finished status")
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
                queue.remove(request)
                request.status = status
                self._release(request)

    def abort_client(self, client_index: int) -> list[str]:
        """Abort everything that a client has asked for, and return the ids."""
        request_ids = [r.request_id for r in self.requests.values() if r.client_index == client_index]
        self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        return request_ids

    def set_pause_state(self, state: PauseState) -> None:
        """Pause or go on, from the next `schedule` on."""
        self.pause_state = state

    def has_requests(self) -> bool:
        """Whether a step is due: there is something to schedule, or the workers must be told of something."""
        if self.finished_req_ids or self._preempted_req_ids:
            return True
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

    # A step.

    def schedule(self) -> SchedulerOutput:
        """Plan a step: at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests.

        No waiting request is admitted in a step that preempts.
        """
        plan = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(),
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self._preempted_req_ids,
            step=self.step_counter,
        )
        self.finished_req_ids = set()
        self._preempted_req_ids = set()
        self.step_counter += 1
        if self.pause_state is PauseState.PAUSED_ALL:
            return plan
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(plan, self.max_num_batched_tokens)
        if self.waiting and self.num_preemptions == num_preemptions:
            budget = self._schedule_waiting(plan, budget)
        plan.total_num_scheduled_tokens = self.max_num_batched_tokens - budget
        return plan

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        cached = plan.scheduled_cached_reqs
        num_scheduled_tokens = plan.num_scheduled_tokens
        lookahead = self.num_lookahead_tokens
        for request in self.running:
            num_computed = request.num_computed_tokens
            num_new = min(request.num_tokens - num_computed, self._chunk_limit, budget)
            new_block_ids = None
            if num_computed + num_new + lookahead > request.num_slots:
                new_block_ids = self._allocate_or_preempt(request, num_new, plan)
                if request.status is not RequestStatus.RUNNING:
                    break
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new_block_ids)
            cached.num_computed_tokens.append(num_computed)
            num_scheduled_tokens[request.request_id] = num_new
            request.num_computed_tokens = num_computed = num_computed + num_new
            if num_computed >= request.next_cache_point:
                self.kv_cache_manager.cache_blocks(request)
            budget -= num_new
            if not budget:
                break
        return budget

    def _allocate_or_preempt(self, request: Request, num_new: int, plan: SchedulerOutput) -> list[int] | None:
        """Make room for a running request, at the expense of the last ones if need be.

        Returns None, with the request preempted, when it is itself the last one.
        """
        lookahead = self.num_lookahead_tokens
        while (
            block_ids := self.kv_cache_manager.allocate_slots(
                request, num_new, num_lookahead_tokens=lookahead
            )
        ) is None:
            victim = self.running.pop_last()
            self._preempt(victim)
            plan.preempted_req_ids.add(victim.request_id)
            if victim is request:
                return None
        return block_ids or None

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int) -> int:
        manager = self.kv_cache_manager
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self._next_waiting()
            if request is None:
                break
            computed_blocks, num_computed = manager.get_computed_blocks(request)
            num_new = self._first_chunk(request.num_tokens - num_computed, budget)
            if not num_new:
                break
            new_block_ids = manager.allocate_slots(
                request, num_new, computed_blocks, self.num_lookahead_tokens, whole_sequence_must_fit=True
            )
            if new_block_ids is None:
                break
            self.waiting.remove(request)
            self._admit(request, num_computed, num_new, plan)
            budget -= num_new
        return budget

    def _next_waiting(self) -> Request | None:
        """The first request that may be admitted."""
        if self.pause_state is PauseState.UNPAUSED:
            return self.waiting.peek()
        return next((r for r in self.waiting if r.status is RequestStatus.PREEMPTED), None)

    def _first_chunk(self, num_uncomputed: int, budget: int) -> int:
        """How many tokens to compute of a request that is about to be admitted; 0: not in this step.

        Without chunked prefill it is all of them, except for a preempted request that has outgrown the
        step's budget and could not resume otherwise.
        """
        if not self.enable_chunked_prefill and budget < num_uncomputed <= self.max_num_batched_tokens:
            return 0
        return min(num_uncomputed, self._chunk_limit, budget)

    def _admit(self, request: Request, num_computed: int, num_new: int, plan: SchedulerOutput) -> None:
        request_id = request.request_id
        block_ids = request.block_ids.copy()
        if request.status is RequestStatus.PREEMPTED:
            cached = plan.scheduled_cached_reqs
            cached.req_ids.append(request_id)
            cached.resumed_req_ids.add(request_id)
            cached.new_block_ids.append(block_ids)
            cached.num_computed_tokens.append(num_computed)
        else:
            plan.scheduled_new_reqs.append(
                NewRequestData(
                    request_id,
                    request.prompt_token_ids,
                    request.sampling_params,
                    block_ids,
                    num_computed,
                    request.pooling_params,
                    prompt_embeds=request.prompt_embeds,
                )
            )
            request.num_cached_tokens = num_computed
            self.kv_cache_manager.record_lookup(request, num_computed)
        plan.num_scheduled_tokens[request_id] = num_new
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed + num_new
        request.record_event(EngineCoreEventType.SCHEDULED, self._clock())
        self.kv_cache_manager.cache_blocks(request)
        self.running.add(request)

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.record_event(EngineCoreEventType.PREEMPTED, self._clock())
        self.num_preemptions += 1
        self.waiting.add(request)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the requests with a grammar that get a token in this step; None: there are none.

        To be called after the outputs of all earlier steps were taken in, for instance while the model runs.
        The mask's buffer is overwritten by the next call.

        Raises:
            NBEngineError: the scheduler was made without `grammar_masks`.
        """
        if not self._structured:
            return None
        if self._grammar_masks is None:
            raise NBEngineError("there are requests with a grammar, and nothing to build their masks")
        scheduled = scheduler_output.num_scheduled_tokens
        req_ids: list[str] = []
        grammars: list[Grammar] = []
        for request_id, request in self._structured.items():
            is_sampled = request_id in scheduled and request.num_computed_tokens >= request.num_tokens
            if is_sampled and request.grammar is not None:
                req_ids.append(request_id)
                grammars.append(request.grammar)
        return GrammarOutput(req_ids, self._grammar_masks.fill_bitmasks(grammars)) if req_ids else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append what was sampled, end the requests that are done, and return the outputs by client index.

        What was sampled for a request that has ended since the plan was made is dropped.

        Raises:
            NBEngineError: the model runner left out a request of the plan, or a token that was due.
        """
        if len(model_runner_output.req_ids) != len(scheduler_output.num_scheduled_tokens):
            raise NBEngineError(
                f"the model runner answered for {len(model_runner_output.req_ids)} requests of "
                f"{len(scheduler_output.num_scheduled_tokens)}"
            )
        requests = self.requests
        pooler_output = model_runner_output.pooler_output or {}
        logprobs, prompt_logprobs = model_runner_output.logprobs, model_runner_output.prompt_logprobs
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request_id, new_token_ids in zip(
            model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True
        ):
            request = requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            if request.pooling_params is not None:
                if (pooled := pooler_output.get(request_id)) is not None:
                    outputs[request.client_index].append(self._finish_pooling(request, pooled))
                elif request.num_computed_tokens >= request.num_tokens:
                    raise NBEngineError(f"the model runner pooled nothing for request {request_id}")
                continue
            if not new_token_ids:
                if request.num_computed_tokens >= request.num_tokens:
                    raise NBEngineError(f"the model runner sampled no token for request {request_id}")
                continue
            output = self._advance(request, new_token_ids)
            if logprobs is not None:
                output.new_logprobs = logprobs.get(request_id)
            if prompt_logprobs is not None:
                output.new_prompt_logprobs = prompt_logprobs.get(request_id)
            outputs[request.client_index].append(output)
        timestamp = self._clock()
        return {
            client: EngineCoreOutputs(self.engine_index, client_outputs, timestamp=timestamp)
            for client, client_outputs in outputs.items()
        }

    def _advance(self, request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
        new_token_ids = append_tokens(request, new_token_ids)
        finish_reason = error = None
        if request.grammar is not None and not follow_grammar(request, new_token_ids):
            error = f"structured_outputs: {request.grammar.error}"
            logger.error("request %s: %s", request.request_id, error)
        if request.status is not RequestStatus.RUNNING:
            finish_reason = FINISH_REASONS[request.status]
            self.running.remove(request)
            self._release(request)
        events = request.events
        request.events = None
        return EngineCoreOutput(
            request.request_id,
            new_token_ids,
            finish_reason,
            request.stop_reason,
            events,
            request.num_cached_tokens,
            error,
        )

    def _finish_pooling(self, request: Request, pooled: NDArray[np.float32]) -> EngineCoreOutput:
        request.status = RequestStatus.FINISHED_STOPPED
        output = self._advance(request, [])
        output.pooling_output = pooled
        return output

    def _release(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._structured.pop(request.request_id, None)
        self._preempted_req_ids.discard(request.request_id)
        self.finished_req_ids.add(request.request_id)

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
            victim = self.running.pop_last()
            self._preempt(victim)
            self._preempted_req_ids.add(victim.request_id)
        return self.kv_cache_manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that blocks are held by running requests alone, and the pool's books; for tests and idle times.

        Raises:
            NBEngineError: they do not balance.
        """
        if any(request.block_ids for request in self.waiting):
            raise NBEngineError("a waiting request holds KV blocks")
        self.kv_cache_manager.check_integrity(self.running)
