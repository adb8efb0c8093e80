"""The number of steps that a plan asks for at once."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.kv_cache.manager import KVCacheManager
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.queue import RequestQueue


@dataclass(frozen=True, slots=True)
class StepsAllowed:
    """The most steps of a plan, and the time of each."""

    most: int = 1
    seconds: float = 0.0
    """Seconds that a step takes; more than 0 where there may be several."""


ONE_STEP = StepsAllowed()


def ask_for_steps(
    plan: SchedulerOutput, running: RequestQueue, manager: KVCacheManager, allowed: StepsAllowed
) -> int:
    """Make room for several steps of a plan of these requests, which is complete, and return their number.

    It is more than 1 where each request computes its last token, asks for nothing but tokens of the model's own logits, and
    lets them be held for as long as the steps take. Nobody loses blocks for it. With recurrent layers, a step that ends a block is by
    itself or the first one: it may have to keep its state for others.
    """
    cached, count = plan.scheduled_cached_reqs, plan.total_num_scheduled_tokens
    if not count or count != len(cached.req_ids) or count != len(running):
        return 1
    if plan.incomplete_req_ids or cached.resumed_req_ids or plan.checkpoints:
        return 1
    most = allowed.most
    for request in running:
        if not request.is_plain or request.grammar is not None:
            return 1
        held = int(request.output_interval / allowed.seconds)
        most = min(most, held, request.max_total_tokens - request.num_tokens)
        if manager.states is not None:
            most = min(most, manager.block_size - request.num_computed_tokens % manager.block_size)
        if most < 2:
            return 1
    # They are planned in the order in which they run.
    for place, request in enumerate(running):
        num_tokens = request.num_computed_tokens + most - 1
        if num_tokens > request.num_slots:
            block_ids = manager.extend(request, num_tokens)
            if block_ids is None:
                most = request.num_slots - request.num_computed_tokens + 1
            else:
                cached.new_block_ids[place] = [*(cached.new_block_ids[place] or ()), *block_ids]
    return most
