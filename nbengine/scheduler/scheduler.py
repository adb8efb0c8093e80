"""The scheduler: requests and sampled tokens in, plans and outputs out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from nbengine.kv_cache.request_states import RequestStates
from nbengine.kv_cache.state_pool import NO_SLOT
from nbengine.scheduler.grammar import Grammar
from nbengine.scheduler.outcomes import RequestOutcomes
from nbengine.scheduler.output import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.stages import announce_tokens, num_due
from nbengine.scheduler.steps_at_once import ONE_STEP, StepsAllowed, ask_for_steps
from nbengine.scheduler.stop import is_free


class Scheduler(RequestOutcomes):
    """The scheduler decides which tokens of which requests a step computes, and takes in the outcome.

    There is one token budget and no prefill or decode phase: a request's `num_computed_tokens` catches up
    with its `num_tokens`. Running requests come first, then waiting ones. Those that wait are admitted by
    priority (with `fcfs` all have the same), within one priority a request of each client in turn, and each
    client's own in their order (arrival for `fcfs`; arrival time, arrival for `priority`). Those that run are
    kept in the order in which they were admitted, by priority, so the victim of a preemption is always the
    last running request, and never one that the step has already planned. A preempted request gives up its
    blocks and computes again what the prefix cache no longer has; it keeps its place, before all that have
    not begun.

    Every plan of `schedule` must be executed, in order, and answered with `update_from_output`, in order; any
    number of them may be in flight, that is, made and not answered. Requests may be added and finished
    between any two calls. Blocks are given up at once, even while steps in flight use them: the request that
    gets them next writes in a later step.

    A request whose known tokens are all planned has its next ones in flight. With `async_scheduling` it is
    planned further, as if it had them, up to the most tokens that it may have; what is computed beyond its
    end is dropped. Otherwise it waits for them, and with several stages a step leaves part of those that do
    not wait to the steps that are to be in flight with it.

    Progress: the first running request can always take the blocks of all others, and a request that would not
    fit in the pool alone is refused, so every step with an unfinished request computes something, unless
    steps are in flight or the scheduler is paused. Among requests of one priority none is overtaken for good,
    and a client's first request in the queue is overtaken by at most one request of each other client. A
    steady stream of requests of higher priority holds up those of lower priority for as long as it lasts. No
    running request is stopped to make room for another client.
    """

    def schedule(self, allowed: StepsAllowed = ONE_STEP) -> SchedulerOutput:
        """Plan a step: at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests.

        Where nobody waits, the plan may ask for several steps that are `allowed`; nothing may be in flight then. No
        waiting request is admitted in a step that preempts.
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
        # These are new sets, because the plan keeps the old ones.
        self.finished_req_ids = set()
        self._preempted_req_ids = set()
        states = self.kv_cache_manager.states
        if states is not None:
            states.begin_step()
        if self.pause_state is not PauseState.PAUSED_ALL:
            num_preemptions = self.num_preemptions
            budget = self._schedule_running(plan, self.max_num_batched_tokens)
            if self.num_preemptions != num_preemptions:
                budget = self._schedule_left_out(plan, budget)
            elif self.waiting:
                budget = self._schedule_waiting(plan, budget)
            plan.total_num_scheduled_tokens = self.max_num_batched_tokens - budget
            if self._shares is not None:
                announce_tokens(plan, self.requests)
            if states is not None:
                self._plan_checkpoints(plan, states)
            if allowed.most > 1 and not self.waiting:
                plan.num_steps = ask_for_steps(plan, self.running, self.kv_cache_manager, allowed)
        self.step_counter += 1
        phases = self.meter.phases
        if phases.reading:
            phases.planned(plan)
        if self._structured:
            plan.has_structured_output_requests = any(
                self._gets_token(plan, request) and not is_free(request, request.num_output_placeholders - 1)
                for request in self._structured.values()
            )
        if self.observer is not None:
            self.observer.planned(plan)
        return plan

    @staticmethod
    def _gets_token(plan: SchedulerOutput, request: Request) -> bool:
        request_id = request.request_id
        return request_id in plan.num_scheduled_tokens and request_id not in plan.incomplete_req_ids

    def _plan_checkpoints(self, plan: SchedulerOutput, states: RequestStates) -> None:
        """Choose the states that the step keeps for others, when everybody who is admitted has a slot."""
        requests = self.requests
        scheduled = ((requests[name], count) for name, count in plan.num_scheduled_tokens.items())
        for request, place, slot in states.plan(scheduled):
            plan.checkpoints.setdefault(request.request_id, []).append((place, slot))

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        cached = plan.scheduled_cached_reqs
        num_scheduled_tokens = plan.num_scheduled_tokens
        add_id, add_blocks = cached.req_ids.append, cached.new_block_ids.append
        add_computed = cached.num_computed_tokens.append
        lookahead = self.num_lookahead_tokens
        shares, running = self._shares, self.running
        for request in running if shares is None else shares.in_turn(running, self._num_in_flight):
            num_computed = request.num_computed_tokens
            num_known = request.num_tokens
            num_new = num_known - num_computed
            if num_new <= 0:
                # All known tokens are planned, and the next is in flight.
                # The last token that a request may have is never computed, because nothing follows it.
                if not self._schedules_ahead or num_computed + 1 >= request.max_total_tokens:
                    continue
                num_new = 1
            elif request.spec_token_ids:
                # One place is left for the token that is sampled behind the drafts.
                num_new += min(len(request.spec_token_ids), request.max_total_tokens - num_known - 1)
            if num_new > 1:
                num_new = min(num_new, self._chunk_limit, budget)
            new_block_ids = None
            # Most steps go on within the last block, and need not call the manager.
            if num_computed + num_new + lookahead > request.num_slots:
                new_block_ids = self._allocate_or_preempt(request, num_new, plan)
                # It was the last one, so nothing behind it is left to plan.
                if request.status is not RequestStatus.RUNNING:
                    break
            request_id = request.request_id
            add_id(request_id)
            add_blocks(new_block_ids)
            add_computed(num_computed)
            num_scheduled_tokens[request_id] = num_new
            request.num_computed_tokens = num_computed = num_computed + num_new
            if num_computed < num_known:
                plan.incomplete_req_ids.add(request_id)
            elif request.spec_token_ids:
                # Drafts are for this step alone, also those that the budget has cut off.
                drafts, request.spec_token_ids = request.spec_token_ids, []
                if num_computed > num_known:
                    plan.scheduled_spec_decode_tokens[request_id] = drafts[: num_computed - num_known]
            if num_computed >= request.next_cache_point:
                self.kv_cache_manager.cache_blocks(request)
            budget -= num_new
            if not budget:
                break
        return budget

    def _schedule_left_out(self, plan: SchedulerOutput, budget: int) -> int:
        """Plan requests whose turn it was not, if preemptions left out all those whose turn it was."""
        num_preemptions = -1
        while not plan.num_scheduled_tokens and num_preemptions != self.num_preemptions:
            num_preemptions = self.num_preemptions
            budget = self._schedule_running(plan, budget)
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
            # This step has planned only requests before `request`, hence never the last one.
            victim = self.running.pop_last()
            self._preempt(victim, plan.preempted_req_ids)
            if victim is request:
                return None
        return block_ids or None

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int) -> int:
        manager = self.kv_cache_manager
        most_due = self.max_num_seqs
        if self._shares is not None:
            num_admissible = self._count_admissible()
            most_due = self._shares.most_due(plan, self.running, num_admissible, self._num_in_flight)
        while budget and len(self.running) < self.max_num_seqs and num_due(plan) < most_due:
            request = self.waiting.first(only_begun=self.pause_state is PauseState.PAUSED_NEW)
            if request is None or self._awaits_tokens(request):
                break
            computed_blocks, num_computed = manager.get_computed_blocks(request)
            num_new = self._first_chunk(request.num_tokens - num_computed, budget)
            if not num_new:
                break
            # Without room for the whole, a later chunk would preempt the last request, often this very one.
            new_block_ids = manager.allocate_slots(
                request,
                num_new,
                computed_blocks,
                self.num_lookahead_tokens,
                num_found_tokens=num_computed,
                whole_sequence_must_fit=True,
            )
            if new_block_ids is None:
                break
            # `admit` reads the old status, and sets the order with which `running` sorts.
            self.waiting.admit(request)
            self._admit(request, num_computed, num_new, plan)
            budget -= num_new
        return budget

    @property
    def _num_in_flight(self) -> int:
        """Count the plans that were made before the present one and have not been answered."""
        return self.step_counter - self._last_answered_step - 1

    def _awaits_tokens(self, request: Request) -> bool:
        """Tell whether some tokens of a waiting request are not known yet; no request behind it passes it."""
        return request.status is RequestStatus.PREEMPTED and self._last_answered_step < request.last_step

    def _admissible(self) -> Iterator[Request]:
        """Yield the requests that may be admitted, in order."""
        for request in self.waiting:
            if self._awaits_tokens(request):
                return
            if request.status is RequestStatus.PREEMPTED or self.pause_state is PauseState.UNPAUSED:
                yield request

    def _count_admissible(self) -> int:
        """Estimate, without looking up prefixes, for how many waiting requests there is room."""
        manager = self.kv_cache_manager
        num_seqs, num_blocks = self.max_num_seqs - len(self.running), manager.block_pool.num_free_blocks
        if manager.states is not None:
            num_seqs = min(num_seqs, manager.states.num_admissible)
        count = 0
        for request in self._admissible():
            num_blocks -= manager.num_blocks_for(request.num_tokens)
            if count == num_seqs or num_blocks < 0:
                break
            count += 1
        return count

    def _first_chunk(self, num_uncomputed: int, budget: int) -> int:
        """Return how many tokens to compute of a request that is about to be admitted, 0 to leave it out.

        Without chunked prefill these are all its tokens, except for a preempted request that has outgrown the
        step's budget and could not resume otherwise.
        """
        if not self.enable_chunked_prefill and budget < num_uncomputed <= self.max_num_batched_tokens:
            return 0
        return min(num_uncomputed, self._chunk_limit, budget)

    def _admit(self, request: Request, num_computed: int, num_new: int, plan: SchedulerOutput) -> None:
        request_id = request.request_id
        block_ids = request.block_ids.copy()
        now = self.clock()
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
            request.first_step = plan.step
            request.scheduled_at = now
            request.num_cached_tokens = num_computed
            self.kv_cache_manager.record_lookup(request, num_computed)
        plan.num_scheduled_tokens[request_id] = num_new
        if request.state_slot != NO_SLOT:
            plan.state_slots[request_id] = request.state_slot, request.state_source
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed + num_new
        request.num_read_tokens = num_computed
        if request.num_computed_tokens < request.num_tokens:
            plan.incomplete_req_ids.add(request_id)
        request.record_event(EngineCoreEventType.SCHEDULED, now)
        self.kv_cache_manager.cache_blocks(request)
        self.running.add(request)
        self.meter.phases.reading[request_id] = request

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the requests whose grammar restricts their token of this step, None if none does.

        To be called after the outputs of all earlier steps were taken in, for instance while the model runs; a
        step without `has_structured_output_requests` needs no mask, and may ask earlier. The mask's buffer is
        overwritten by the next call.

        Raises:
            NBEngineError: the scheduler was made without `grammar_masks`.
        """
        if not (self._structured and scheduler_output.has_structured_output_requests):
            return None
        if self._grammar_masks is None:
            raise NBEngineError("there are requests with a grammar, and nothing to build their masks")
        req_ids: list[str] = []
        grammars: list[Grammar] = []
        for request_id, request in self._structured.items():
            # An id may have been used again since the plan was made, as in `update_from_output`.
            is_planned = self._gets_token(scheduler_output, request)
            if not is_planned or scheduler_output.step < request.first_step or is_free(request, 0):
                continue
            if request.grammar is not None:
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
        step = scheduler_output.step
        self._last_answered_step = step
        phases = self.meter.phases
        if phases.in_flight:
            phases.answered(step)
        if len(model_runner_output.req_ids) != len(scheduler_output.num_scheduled_tokens):
            raise NBEngineError(
                f"the model runner answered for {len(model_runner_output.req_ids)} requests of "
                f"{len(scheduler_output.num_scheduled_tokens)}"
            )
        if self.observer is not None:
            self.observer.answered(scheduler_output, model_runner_output)
        requests = self.requests
        # Each request of the step brings one token, but for those that are counted separately below.
        num_tokens = len(model_runner_output.req_ids)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        faults = model_runner_output.faults
        logprobs, prompt_logprobs = model_runner_output.logprobs, model_runner_output.prompt_logprobs
        timestamp = self.clock()
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request_id, new_token_ids in zip(
            model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True
        ):
            request = requests.get(request_id)
            # An id may have been used again: what was planned before is not for its successor.
            if request is None or step < request.first_step:
                num_tokens -= 1
                continue
            if not new_token_ids or request.pooling_params is not None or (faults and request_id in faults):
                without = self._finish_without_tokens(
                    request, scheduler_output, model_runner_output, new_token_ids
                )
                num_tokens -= 1
                if without is not None:
                    num_tokens += len(without.new_token_ids)
                    outputs[request.client_index].append(request.with_held(without))
                continue
            if drafts and request_id in drafts:
                if request.status is RequestStatus.RUNNING:
                    # The tokens computed for rejected drafts do not count.
                    request.num_computed_tokens -= len(drafts[request_id]) + 1 - len(new_token_ids)
                output = self._advance(request, new_token_ids)
                num_tokens += len(output.new_token_ids) - 1
            elif scheduler_output.num_steps > 1:
                output = self._advance_steps(request, new_token_ids)
                num_tokens += len(output.new_token_ids) - 1
            else:
                output = self._advance(request, new_token_ids)
            if logprobs is not None:
                output.new_logprobs = logprobs.get(request_id)
            if prompt_logprobs is not None:
                output.new_prompt_logprobs = prompt_logprobs.get(request_id)
            if (told := request.told(output, timestamp)) is not None:
                outputs[request.client_index].append(told)
        if model_runner_output.draft_token_ids is not None:
            self._take_drafts(model_runner_output.draft_token_ids, step)
        self.meter.num_generation_tokens += num_tokens
        if scheduler_output.num_steps > 1:
            self._count_further_steps(model_runner_output)
        if self.observer is not None:
            self.observer.settled()
        if scheduler_output.preempted_req_ids:
            self._tell_held(outputs, scheduler_output.preempted_req_ids)
        by_client = self._by_client(outputs, timestamp)
        if self._ended_by_client:
            self._tell_ended(by_client, timestamp)
        if scheduler_output.incomplete_req_ids:
            self._tell_prompts_read(by_client, scheduler_output, timestamp)
        return by_client
