"""Drives the scheduler, a fake worker and the reference scheduler through one history, checking each event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.paged_model import FakeWorker, sequential_tokens
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
            policy=limits.policy,
        ),
        CacheConfig(block_size=limits.block_size, enable_prefix_caching=limits.caching),
        limits.num_blocks,
        limits.max_model_len,
        num_lookahead_tokens=limits.lookahead,
        **kwargs,  # type: ignore[arg-type]
    )


@dataclass
class Answer:
    """What the caller of one request has got so far."""

    prompt: list[int]
    params: SamplingParams
    client: int
    tokens: list[int] = field(default_factory=list)
    events: list[EngineCoreEventType] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False

    @property
    def done(self) -> bool:
        return self.aborted or self.finish_reason is not None


class Simulation:
    """One history. `answers` holds every attempt at a request, also those whose id was used again."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.scheduler = make_scheduler(limits, clock=self._tick)
        self.reference = ReferenceScheduler(limits)
        self.worker = FakeWorker(limits.num_blocks, limits.block_size)
        self.live: dict[str, Answer] = {}
        self.answers: list[Answer] = []
        self.in_flight: SchedulerOutput | None = None
        self.steps_needed = 1

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def cut_to_fit(self, prompt: list[int]) -> list[int]:
        """Cut a prompt so that the request is taken, whatever its parameters, if any is."""
        limits = self.limits
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size) - 1
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
        if req_id in self.live or self.reference.refuses(prompt, params):
            TOTALS["refused"] += 1
            with pytest.raises(RequestError, match=req_id):
                self.scheduler.add_request(request)
        else:
            self.scheduler.add_request(request)
            self.reference.add(req_id, prompt, params, priority, arrival, client, salt)
            answer = Answer(list(prompt), params, client)
            self.live[req_id] = answer
            self.answers.append(answer)
            self.steps_needed += self.reference.total_limit(len(prompt), params)
        self.check()

    def abort(self, req_id: str) -> None:
        TOTALS["abort"] += 1
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.reference.finish(req_id)
        self._forget(req_id)
        self.check()

    def abort_client(self, client: int) -> None:
        TOTALS["abort_client"] += 1
        expected = [req_id for req_id, answer in self.live.items() if answer.client == client]
        assert sorted(self.scheduler.abort_client(client)) == sorted(expected)
        for req_id in expected:
            self.reference.finish(req_id)
            self._forget(req_id)
        self.check()

    def _forget(self, req_id: str) -> None:
        answer = self.live.pop(req_id, None)
        if answer is not None:
            answer.aborted = True

    def reset_prefix_cache(self) -> None:
        TOTALS["reset"] += 1
        assert self.scheduler.reset_prefix_cache() == self.reference.pool.forget_all()
        self.check()

    def schedule(self) -> SchedulerOutput:
        assert self.in_flight is None
        TOTALS["schedule"] += 1
        had_requests = self.scheduler.has_unfinished_requests()
        plan = self.scheduler.schedule()
        self._check_plan(plan, self.reference.schedule())
        assert bool(plan.num_scheduled_tokens) == had_requests, "every step makes progress"
        TOTALS["preempted"] += len(plan.preempted_req_ids)
        TOTALS["resumed"] += len(plan.scheduled_cached_reqs.resumed_req_ids)
        self.in_flight = plan
        self.check()
        return plan

    def update(self) -> dict[str, EngineCoreOutput]:
        """Execute the plan in flight and hand back what was sampled; returns the outputs by request."""
        assert self.in_flight is not None
        TOTALS["update"] += 1
        plan, self.in_flight = self.in_flight, None
        scheduled = {r: self.scheduler.requests.get(r) for r in plan.num_scheduled_tokens}
        output = self.worker.execute(plan)
        expected = {
            req_id: tokens
            for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
            if tokens and (request := scheduled[req_id]) and request.status is RequestStatus.RUNNING
        }
        by_client = self.scheduler.update_from_output(plan, output)
        got: dict[str, EngineCoreOutput] = {}
        for client, outputs in by_client.items():
            assert outputs.outputs
            for item in outputs.outputs:
                assert item.request_id not in got
                got[item.request_id] = item
                assert self.live[item.request_id].client == client
        assert got.keys() == expected.keys()
        for req_id in expected:
            self._receive(got[req_id])
        self.check()
        return got

    def step(self) -> dict[str, EngineCoreOutput]:
        self.schedule()
        return self.update()

    def finish_everything(self) -> None:
        """Run until nothing is left, within a bound, and check that all is answered and given back."""
        if self.in_flight is not None:
            self.update()
        bound = self.steps_needed * (len(self.live) + 1)
        steps = 0
        while self.scheduler.has_requests():
            self.step()
            steps += 1
            assert steps <= bound, "a request starves"
        assert not self.live
        assert all(answer.done for answer in self.answers)
        stats = self.scheduler.make_stats()
        assert stats.num_free_blocks == stats.num_blocks == self.limits.num_blocks
        assert stats.kv_cache_usage == 0
        assert not self.worker.states.keys() - self.scheduler.finished_req_ids

    # Checks.

    def _receive(self, item: EngineCoreOutput) -> None:
        answer = self.live[item.request_id]
        request = self.reference.find(item.request_id)
        assert request is not None
        assert len(item.new_token_ids) == 1
        answer.tokens.extend(item.new_token_ids)
        answer.events.extend(event.type for event in item.events or [])
        assert item.num_cached_tokens == request.cached_at_first
        reason = self.reference.accept(request, item.new_token_ids[0])
        assert (str(item.finish_reason) if item.finished else None) == reason
        is_stop_id = reason == "stop" and item.new_token_ids[0] in answer.params.stop_token_ids
        is_eos = item.new_token_ids[0] == answer.params.eos_token_id and not answer.params.ignore_eos
        assert item.stop_reason == (item.new_token_ids[0] if is_stop_id and not is_eos else None)
        if item.finished:
            TOTALS["finished"] += 1
            answer.finish_reason = item.finish_reason
            assert answer.tokens == sequential_tokens(answer.prompt, len(answer.tokens))
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
        assert not plan.preempted_req_ids or not (new_ids or cached.resumed_req_ids)
        assert sorted(new_ids + cached.req_ids) == sorted(plan.num_scheduled_tokens)
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        assert starts == expected.starts
        if limits.chunked and limits.threshold:
            assert max(plan.num_scheduled_tokens.values(), default=0) <= limits.threshold

    def check(self) -> None:
        """What holds after every event."""
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
            (r.req_id, r.table) for r in by_order
        ]
        assert [r.request_id for r in scheduler.waiting] == [
            r.req_id for r in sorted(reference.waiting, key=lambda r: r.order)
        ]
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


def _check_events(events: list[EngineCoreEventType]) -> None:
    """QUEUED, then SCHEDULED, then any number of times PREEMPTED and SCHEDULED."""
    kinds = EngineCoreEventType
    assert events[:2] == [kinds.QUEUED, kinds.SCHEDULED]
    assert events[2:] == [kinds.PREEMPTED, kinds.SCHEDULED] * (len(events[2:]) // 2)
