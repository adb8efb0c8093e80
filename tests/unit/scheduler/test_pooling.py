"""Pooling requests in the scheduler: they end with their prompt, and share budget and blocks with all others."""

from __future__ import annotations

import numpy as np
import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import NBEngineError, RequestError
from nbengine.ipc.messages import EngineCoreOutput, FinishReason
from nbengine.sampling_params import PoolingParams
from nbengine.scheduler.output import ModelRunnerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import add, make_scheduler

RESULT = np.ones(3, np.float32)


def add_pooling(scheduler: Scheduler, name: str, tokens: list[int], pooling: str = "mean") -> Request:
    params = PoolingParams(task="embed", pooling=pooling)
    request = Request(name, tokens, None, pooling_params=params)
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> tuple[dict[str, int], dict[str, EngineCoreOutput]]:
    """Make one step with a model runner that samples 7 and pools `RESULT`."""
    plan = scheduler.schedule()
    due = [r for name in plan.num_scheduled_tokens if (r := scheduler.requests[name])]
    done = [request for request in due if request.num_computed_tokens == request.num_tokens]
    output = ModelRunnerOutput(
        [request.request_id for request in due],
        [[7] if request in done and request.pooling_params is None else [] for request in due],
        pooler_output={r.request_id: RESULT for r in done if r.pooling_params is not None} or None,
    )
    outputs = scheduler.update_from_output(plan, output)
    return plan.num_scheduled_tokens, {o.request_id: o for c in outputs.values() for o in c.outputs}


def test_it_ends_in_the_step_that_completes_its_prompt_and_gives_its_blocks_back() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add_pooling(scheduler, "p", list(range(15)))
    add(scheduler, "g", 3, max_tokens=2)
    assert step(scheduler) == ({"p": 10}, {})
    counts, outputs = step(scheduler)
    assert counts == {"p": 5, "g": 3}
    assert outputs["p"].pooling_output is RESULT
    assert outputs["p"].finish_reason is FinishReason.STOP
    assert outputs["p"].new_token_ids == []
    assert outputs["g"].new_token_ids == [7]
    assert list(scheduler.requests) == ["g"]
    step(scheduler)
    scheduler.check_integrity()
    assert scheduler.make_stats().num_free_blocks == scheduler.num_blocks


@pytest.mark.parametrize(("pooling", "found"), [("last", 12), ("mean", 0), ("cls", 0)])
def test_only_last_reads_the_prefix_cache(pooling: str, found: int) -> None:
    scheduler = make_scheduler()
    tokens = list(range(100, 115))
    add_pooling(scheduler, "first", tokens)
    step(scheduler)
    again = add_pooling(scheduler, "again", tokens, pooling)
    counts, outputs = step(scheduler)
    assert counts == {"again": 15 - found}
    assert outputs["again"].num_cached_tokens == again.num_cached_tokens == found


def test_a_prompt_that_fills_model_or_pool_exactly_is_taken_and_one_more_token_is_not() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    add_pooling(scheduler, "full", list(range(32)))
    assert "full" in step(scheduler)[1]
    with pytest.raises(RequestError, match="33 tokens, more than max_model_len=32"):
        add_pooling(scheduler, "long", list(range(33)))
    scheduler = make_scheduler(num_blocks=4, max_model_len=32)
    add_pooling(scheduler, "full", list(range(16)))
    assert "full" in step(scheduler)[1]
    with pytest.raises(RequestError, match="needs 5 KV blocks, and there are 4"):
        add_pooling(scheduler, "long", list(range(17)))


def test_a_runner_that_pools_nothing_is_found_out() -> None:
    scheduler = make_scheduler()
    add_pooling(scheduler, "p", [1, 2, 3])
    plan = scheduler.schedule()
    with pytest.raises(NBEngineError, match="pooled nothing for request p"):
        scheduler.update_from_output(plan, ModelRunnerOutput(["p"], [[]]))


def test_a_result_that_comes_after_the_abort_is_dropped() -> None:
    scheduler = make_scheduler()
    add_pooling(scheduler, "p", [1, 2, 3])
    plan = scheduler.schedule()
    scheduler.abort_client(0)
    assert (
        scheduler.update_from_output(plan, ModelRunnerOutput(["p"], [[]], pooler_output={"p": RESULT})) == {}
    )
    scheduler.check_integrity()


def test_without_a_kv_cache_requests_need_no_blocks_and_only_the_budget_limits_them() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=40, enable_chunked_prefill=False),
        CacheConfig(enable_prefix_caching=False),
        num_blocks=0,
        max_model_len=40,
    )
    for name, length in (("a", 40), ("b", 15), ("c", 15), ("d", 5), ("e", 5), ("f", 1)):
        add_pooling(scheduler, name, list(range(length)))
    planned = [step(scheduler)[0] for _ in range(3)]
    assert planned == [{"a": 40}, {"b": 15, "c": 15, "d": 5}, {"e": 5, "f": 1}]
    stats = scheduler.make_stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (0, 0, 0.0)
    assert scheduler.reset_prefix_cache()
    scheduler.check_integrity()
