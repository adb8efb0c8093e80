"""Drives the scheduler, a fake worker and the reference scheduler through one history, checking each event."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from nbengine.kv_cache.specs import make_groups
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.pause import PauseState
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.fake_grammar import FakeGrammar, FakeMasks
from tests.unit.scheduler.paged_model import FakeWorker, NonSamplingStage, sequential_tokens
from tests.unit.scheduler.reference import Limits, ReferencePlan, ReferenceScheduler

TOTALS: Counter[str] = Counter()
"""Events of all histories of this process, by kind."""


def make_scheduler(limits: Limits, **kwargs: object) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.budget,
            enable_chunked_prefill=limits.chunked,
            long_prefill_token_threshold=limits.threshold,
            scheduling_policy=limits.policy,
        ),
        CacheConfig(block_size=limits.block_size, enable_prefix_caching=limits.caching),
        limits.num_blocks,
        limits.max_model_len,
        options=SchedulerOptions(
            num_lookahead_tokens=limits.lookahead,
            async_scheduling=limits.ahead,
            num_stages=limits.stages,
            groups=make_groups(limits.rules),
            num_state_slots=limits.num_state_slots,
        ),
        grammar_masks=FakeMasks(),
        **kwargs,  # type: ignore[arg-type]
    )


@dataclass
class Answer:
    """The answer that the caller of one request has got so far."""

    prompt: list[int]
    params: SamplingParams
    client: int
    constrained: bool
    tokens: list[int] = field(default_factory=list)
    events: list[EngineCoreEventType] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    goes_on: bool = False
    """It was taken back before it had begun, and is another engine core's now."""
    num_known: int = 0
    """The tokens that it had when it was admitted last."""
    was_preempted: bool = False

    @property
    def done(self) -> bool:
        return self.aborted or self.finish_reason is not None


@dataclass
class InFlight:
    """A plan, and for whom it was made."""

    plan: SchedulerOutput
    answers: dict[str, Answer]
    phase: str
    """"decode", "prefill" or "recompute"."""


class Simulation:
    """One history. `answers` holds every attempt at a request, also those whose id was used again."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.scheduler = make_scheduler(limits, clock=self._tick)
        states = self.scheduler.kv_cache_manager.states
        if states is not None and limits.caching:
            # The product's spacing would be longer than the histories' requests.
            assert states._rule is not None
            states._rule = replace(states._rule, finest=limits.spacing * limits.block_size)
        self.reference = ReferenceScheduler(limits)
        rng = random.Random(repr(limits)) if limits.lookahead else None
        self.worker = FakeWorker(
            limits.num_blocks, limits.block_size, rng, limits.rules, limits.num_state_slots
        )
        self.first_stage = NonSamplingStage()
        self.live: dict[str, Answer] = {}
        self.answers: list[Answer] = []
        self.in_flight: deque[InFlight] = deque()
        self.to_be_told: dict[int, list[str]] = {}
        """Requests of each client that have ended without its doing."""
        self.steps_needed = 1
        self.phases: Counter[str] = Counter()
        """The steps that have been answered, by phase."""

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _has_blocks_for(self, num_tokens: int) -> bool:
        return self.reference.most_blocks(num_tokens) <= self.limits.num_blocks

    def cut_to_fit(self, prompt: list[int]) -> list[int]:
        """Cut a prompt so that the request is taken, whatever its parameters, if any is."""
        limits = self.limits
        longest = max(n for n in range(limits.max_model_len + 1) if self._has_blocks_for(n)) - 1
        return prompt[: longest if limits.chunked else min(longest, limits.budget)]

    # Events.

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        client: int = 0,
        salt: str | None = None,
        grammar_length: int | None = None,
    ) -> None:
        TOTALS["add"] += 1
        wire = EngineCoreRequest(
            req_id,
            prompt,
            params,
            arrival_time=arrival,
            cache_salt=salt,
            priority=priority,
            client_index=client,
        )
        request = Request.from_engine_core_request(wire, self.scheduler.kv_cache_manager.block_hasher)
        if grammar_length is not None:
            request.grammar = FakeGrammar(grammar_length)
        if req_id in self.live or self.reference.refuses(prompt, params):
            TOTALS["refused"] += 1
            with pytest.raises(RequestError, match=req_id):
                self.scheduler.add_request(request)
        else:
            self.scheduler.add_request(request)
            self.reference.add(req_id, prompt, params, priority, arrival, client, salt, grammar_length)
            answer = Answer(list(prompt), params, client, grammar_length is not None)
            self.live[req_id] = answer
            self.answers.append(answer)
            self.steps_needed += self.reference.total_limit(len(prompt), params)
        self.check()

    def abort(self, req_id: str, *, by_client: bool = True) -> None:
        TOTALS["abort"] += 1
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED, tell_client=not by_client)
        self.reference.finish(req_id)
        answer = self._forget(req_id)
        if answer is not None and not by_client:
            TOTALS["abort by others"] += 1
            self.to_be_told.setdefault(answer.client, []).append(req_id)
        self.check()

    def abort_client(self, client: int) -> None:
        TOTALS["abort_client"] += 1
        expected = [req_id for req_id, answer in self.live.items() if answer.client == client]
        assert sorted(self.scheduler.abort_client(client)) == sorted(expected)
        for req_id in expected:
            self.reference.finish(req_id)
            self._forget(req_id)
        self.check()

    def _forget(self, req_id: str) -> Answer | None:
        answer = self.live.pop(req_id, None)
        if answer is not None:
            answer.aborted = True
        return answer

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        TOTALS["reset"] += 1
        if reset_running_requests:
            TOTALS["reset of running requests"] += 1
            self.reference.preempt_all()
        done = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
        assert done == self.reference.forget_all()
        assert done or not reset_running_requests
        self.check()

    def pause(self, state: PauseState) -> None:
        TOTALS["pause or resume"] += 1
        self.scheduler.set_pause_state(state)
        self.reference.pause = state
        self.check()

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < self.limits.depth

    def schedule(self) -> SchedulerOutput:
        assert self.may_schedule
        TOTALS["schedule"] += 1
        TOTALS[f"schedule with {len(self.in_flight)} steps in flight"] += 1
        was_due, runnable = self.scheduler.has_requests(), self._has_runnable()
        preempted_before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        self._check_plan(plan, self.reference.schedule())
        progress = bool(plan.num_scheduled_tokens)
        assert progress or not runnable or self.in_flight, "every step makes progress"
        assert progress <= runnable
        assert was_due == bool(runnable or plan.finished_req_ids or plan.preempted_req_ids)
        preempts = self.scheduler.num_preemptions > preempted_before
        assert not preempts or not (plan.scheduled_new_reqs or plan.scheduled_cached_reqs.resumed_req_ids)
        TOTALS["preempted"] += len(plan.preempted_req_ids)
        TOTALS["resumed"] += len(plan.scheduled_cached_reqs.resumed_req_ids)
        TOTALS["drafts"] += sum(map(len, plan.scheduled_spec_decode_tokens.values()))
        self._check_first_stage(plan)
        answers = {r: self.live[r] for r in plan.num_scheduled_tokens}
        self.in_flight.append(InFlight(plan, answers, self._phase_of(plan)))
        self.check()
        return plan

    def _phase_of(self, plan: SchedulerOutput) -> str:
        """Say what a step does: some tokens that a request had at its admission are computed, or none are."""
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        for req_id in [*cached.resumed_req_ids, *(new.req_id for new in plan.scheduled_new_reqs)]:
            answer = self.live[req_id]
            answer.num_known = len(answer.prompt) + len(answer.tokens)
            answer.was_preempted = req_id in cached.resumed_req_ids
        reading = [
            self.live[req_id] for req_id, start in starts.items() if start < self.live[req_id].num_known
        ]
        if not reading:
            return "decode"
        return "recompute" if any(answer.was_preempted for answer in reading) else "prefill"

    def _has_runnable(self) -> bool:
        """Return whether there are requests that the pause lets go on."""
        reference = self.reference
        if reference.pause is PauseState.PAUSED_ALL:
            return False
        if reference.pause is PauseState.PAUSED_NEW:
            return bool(reference.running) or any(r.was_preempted for r in reference.waiting)
        return bool(self.live)

    def update(self) -> dict[str, EngineCoreOutput]:
        """Execute the oldest plan in flight and hand back what was sampled; returns the outputs by request."""
        TOTALS["update"] += 1
        step = self.in_flight.popleft()
        plan = step.plan
        grammar_output = self.scheduler.get_grammar_bitmask(plan)
        TOTALS["masks"] += 0 if grammar_output is None else len(grammar_output.req_ids)
        output = self.worker.execute(plan, grammar_output)
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for req_id, tokens in sampled.items():
            TOTALS["tokens dropped"] += (
                len(tokens) if self.live.get(req_id) is not step.answers[req_id] else 0
            )
        expected = {
            req_id: tokens
            for req_id, tokens in sampled.items()
            if tokens and self.live.get(req_id) is step.answers[req_id]
        }
        by_client = self.scheduler.update_from_output(plan, output)
        got: dict[str, EngineCoreOutput] = {}
        read: dict[str, tuple[int, int, int]] = {}
        for client, outputs in by_client.items():
            assert outputs.outputs or outputs.finished_requests or outputs.prompts_read
            for part in outputs.prompts_read or ():
                assert self.live[part.request_id].client == client
                assert part.seconds > 0
                read[part.request_id] = part.num_prompt_tokens, part.num_read_tokens, part.num_cached_tokens
            for item in outputs.outputs:
                assert item.request_id not in got
                got[item.request_id] = item
                assert self.live[item.request_id].client == client
            assert outputs.finished_requests == self.to_be_told.pop(client, None)
        assert not self.to_be_told, "clients are told with the next outputs"
        assert got.keys() == expected.keys()
        assert read == self._read_by(step)
        self.reference.answered = plan.step
        self.phases[step.phase] += 1
        TOTALS[f"steps of {step.phase}"] += 1
        stats = self.scheduler.make_stats()
        assert stats.num_prefill_steps == self.phases["prefill"]
        assert stats.num_recompute_steps == self.phases["recompute"]
        for req_id, tokens in expected.items():
            num_drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            TOTALS["drafts accepted"] += len(tokens) - 1
            self._receive(got[req_id], plan.step, tokens, num_drafts)
        for req_id, drafts in (output.draft_token_ids or {}).items():
            if self.live.get(req_id) is step.answers[req_id]:
                self.reference.propose(req_id, drafts)
        self.check()
        return got

    def step(self) -> dict[str, EngineCoreOutput]:
        """Go as far as an engine does before it waits: plan what may be in flight, take in the oldest step."""
        while self.may_schedule:
            self.schedule()
        return self.update()

    def finish_everything(self) -> None:
        """Run until nothing is left, within a bound, and check that all is answered and given back."""
        self.pause(PauseState.UNPAUSED)
        bound = self.steps_needed * (len(self.live) + 1) * max(self.limits.depth, self.limits.stages)
        steps = 0
        while self.scheduler.has_requests():
            self.step()
            steps += 1
            assert steps <= bound, "a request starves"
        while self.in_flight:
            self.update()
        assert not self.live
        assert all(answer.done for answer in self.answers)
        assert not self.to_be_told
        stats = self.scheduler.make_stats()
        assert stats.num_free_blocks == stats.num_blocks == self.limits.num_blocks
        assert stats.kv_cache_usage == 0
        assert stats.num_free_state_slots == stats.num_state_slots == self.limits.num_state_slots
        assert not self.worker.states.keys() - self.scheduler.finished_req_ids

    # Checks.

    def _read_by(self, step: InFlight) -> dict[str, tuple[int, int, int]]:
        """Say how long the prompts are that a step has not completed, how much of them it and those before it have
        read, and how much was found: what is planned, less what is still in flight."""
        read = {}
        for req_id in step.plan.incomplete_req_ids:
            answer, request = step.answers[req_id], self.reference.find(req_id)
            if self.live.get(req_id) is not answer or answer.tokens or request not in self.reference.running:
                continue
            assert request is not None
            due = [later.plan.num_scheduled_tokens.get(req_id, 0) for later in self.in_flight]
            read[req_id] = len(answer.prompt), request.computed - sum(due), request.cached_at_first
            TOTALS["prompts read in part"] += 1
        return read

    def _receive(self, item: EngineCoreOutput, step: int, sampled: list[int], num_drafts: int) -> None:
        answer = self.live[item.request_id]
        request = self.reference.find(item.request_id)
        assert request is not None
        kept, reason = self.reference.answer(request, step, sampled, num_drafts)
        assert item.new_token_ids == kept
        answer.tokens.extend(kept)
        answer.events.extend(event.type for event in item.events or [])
        assert item.num_cached_tokens == request.cached_at_first
        assert (str(item.finish_reason) if item.finished else None) == reason
        is_stop_id = reason == "stop" and kept[-1] in answer.params.stop_token_ids
        is_stop_id &= len(answer.tokens) >= answer.params.min_tokens
        is_eos = kept[-1] == answer.params.eos_token_id and not answer.params.ignore_eos
        assert item.stop_reason == (kept[-1] if is_stop_id and not is_eos else None)
        if item.finished:
            TOTALS["finished"] += 1
            answer.finish_reason = item.finish_reason
            assert answer.tokens == sequential_tokens(
                answer.prompt, len(answer.tokens), constrained=answer.constrained, rules=self.limits.rules
            )
            _check_events(answer.events)
            del self.live[item.request_id]

    def _check_plan(self, plan: SchedulerOutput, expected: ReferencePlan) -> None:
        limits = self.limits
        cached = plan.scheduled_cached_reqs
        new_ids = [new.req_id for new in plan.scheduled_new_reqs]
        assert list(plan.num_scheduled_tokens.items()) == expected.scheduled
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values()) <= limits.budget
        assert len(plan.num_scheduled_tokens) <= limits.max_num_seqs
        assert new_ids == expected.new
        assert cached.resumed_req_ids == expected.resumed
        assert plan.preempted_req_ids == expected.preempted
        assert plan.finished_req_ids == expected.finished
        assert plan.incomplete_req_ids == expected.incomplete
        assert plan.scheduled_spec_decode_tokens == expected.drafts
        made = {name: [place for place, _ in slots] for name, slots in plan.checkpoints.items()}
        assert made == expected.checkpoints
        TOTALS["checkpoints"] += sum(map(len, made.values()))
        TOTALS["started from checkpoints"] += sum(source >= 0 for _, source in plan.state_slots.values())
        assert sorted(new_ids + cached.req_ids) == sorted(plan.num_scheduled_tokens)
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        assert starts == expected.starts
        if limits.chunked and limits.threshold:
            assert max(plan.num_scheduled_tokens.values(), default=0) <= limits.threshold

    def _check_first_stage(self, plan: SchedulerOutput) -> None:
        """Check that the first stage knows from the plans alone what to compute, and is told nothing
        twice."""
        if self.limits.stages == 1:
            assert not plan.scheduled_cached_reqs.new_token_ids
            return
        TOTALS["tokens told to stages"] += sum(map(len, plan.scheduled_cached_reqs.new_token_ids.values()))
        for req_id, token_ids in self.first_stage.take(plan).items():
            request = self.reference.find(req_id)
            assert request is not None
            assert self.first_stage.tokens[req_id] == request.tokens
            num_drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            end = request.computed - num_drafts
            assert token_ids == request.tokens[end - len(token_ids) : end]

    def check(self) -> None:
        """Check what holds after every event."""
        scheduler, reference, pool = (
            self.scheduler,
            self.reference,
            self.scheduler.kv_cache_manager.block_pool,
        )
        scheduler.check_integrity()
        assert len(scheduler.running) <= self.limits.max_num_seqs
        assert scheduler.requests.keys() == self.live.keys()
        assert scheduler.get_num_unfinished_requests() == len(scheduler.running) + len(scheduler.waiting)
        by_order = sorted(reference.running, key=lambda r: r.order)
        assert [(r.request_id, r.block_ids) for r in scheduler.running] == [
            (r.req_id, [-1 if block is None else block for block in r.table]) for r in by_order
        ]
        for found in by_order:
            held = len(found.table) - found.table.count(None)
            TOTALS["most blocks given back"] = max(TOTALS["most blocks given back"], found.table.count(None))
            assert held <= reference.most_blocks(max(len(found.table) * self.limits.block_size, 1))
        assert [r.request_id for r in scheduler.waiting] == [r.req_id for r in reference.in_waiting_order()]
        expected = {r.req_id: r for r in chain(reference.waiting, reference.running)}
        for request in scheduler.requests.values():
            found = expected[request.request_id]
            assert request.all_token_ids == found.tokens
            if request.status is RequestStatus.RUNNING:
                assert request.num_computed_tokens == found.computed
                assert len(found.awaited) <= self.limits.depth
        assert [pool.ref_count(b) for b in range(pool.num_blocks)] == reference.pool.holders
        stats = scheduler.make_stats()
        assert (stats.num_free_blocks, stats.num_cached_blocks) == (
            reference.pool.num_free(),
            reference.pool.num_cached(),
        )
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preemptions) == (
            reference.queries,
            reference.hits,
            reference.preemptions,
        )
        assert (stats.num_free_state_slots, stats.num_checkpoints) == (
            reference.states.num_free(),
            len(reference.states.least_recent_first),
        )
        begun = [answer for answer in self.answers if answer.tokens]
        ended = [answer for answer in self.answers if answer.done and not answer.goes_on]
        measured = scheduler.meter.stats
        assert stats.num_generation_tokens == sum(len(answer.tokens) for answer in begun)
        assert stats.num_prompt_tokens == sum(len(answer.prompt) for answer in begun)
        assert measured.time_to_first_token.count == measured.queue_time.count == len(begun)
        assert measured.num_finished == measured.e2e_latency.count == len(ended)
        assert measured.generation_tokens.total == sum(len(answer.tokens) for answer in ended)


def _check_events(events: list[EngineCoreEventType]) -> None:
    """Check for QUEUED, then SCHEDULED, then any number of times PREEMPTED and SCHEDULED.

    What was in flight may end a request that is PREEMPTED.
    """
    kinds = EngineCoreEventType
    assert events[0] == kinds.QUEUED
    rest = events[1:]
    assert rest
    assert rest == ([kinds.SCHEDULED, kinds.PREEMPTED] * len(rest))[: len(rest)]
