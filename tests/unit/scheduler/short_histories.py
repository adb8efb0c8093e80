"""Scheduler, requests and steps for histories short enough to follow."""

from __future__ import annotations

from typing import Any

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.grammar import Grammar, GrammarMaskBuilder
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler

ABORTED = RequestStatus.FINISHED_ABORTED


def make_scheduler(
    num_blocks: int = 64,
    max_model_len: int = 128,
    caching: bool = True,
    lookahead: int = 0,
    ahead: bool = False,
    stages: int = 1,
    max_concurrent_steps: int | None = None,
    grammar_masks: GrammarMaskBuilder | None = None,
    **config: Any,
) -> Scheduler:
    ticks = iter(range(10**6))
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}),
        CacheConfig(block_size=4, enable_prefix_caching=caching),
        num_blocks,
        max_model_len,
        engine_index=3,
        options=SchedulerOptions(
            num_lookahead_tokens=lookahead,
            async_scheduling=ahead,
            num_stages=stages,
            max_concurrent_steps=max_concurrent_steps,
        ),
        grammar_masks=grammar_masks,
        clock=lambda: float(next(ticks)),
    )


def add(
    scheduler: Scheduler,
    name: str,
    length: int,
    *,
    start: int = 0,
    priority: int = 0,
    arrival: float = 0.0,
    client: int = 0,
    grammar: Grammar | None = None,
    **params: Any,
) -> Request:
    """Add a request whose prompt is `start, start + 1, ...`; without `start`, no two names share a prompt."""
    first = start or 1000 * (1 + sum(name.encode()))
    request = Request(
        name,
        list(range(first, first + length)),
        SamplingParams(**{"max_tokens": 20, **params}),
        priority=priority,
        arrival_time=arrival,
        client_index=client,
    )
    request.grammar = grammar
    scheduler.add_request(request)
    return request


def answer(scheduler: Scheduler, plan: SchedulerOutput, token: int = 7) -> dict[int, EngineCoreOutputs]:
    """Report `token` for every request whose known tokens are all computed by the plan."""
    names = list(plan.num_scheduled_tokens)
    sampled = [[] if name in plan.incomplete_req_ids else [token] for name in names]
    return scheduler.update_from_output(plan, ModelRunnerOutput(names, sampled))


def step(scheduler: Scheduler, token: int = 7) -> tuple[dict[str, int], dict[str, EngineCoreOutput]]:
    plan = scheduler.schedule()
    outputs = answer(scheduler, plan, token)
    return plan.num_scheduled_tokens, {o.request_id: o for c in outputs.values() for o in c.outputs}
