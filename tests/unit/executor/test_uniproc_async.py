"""The in-process executor with async scheduling: one thread that carries the calls out in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.unit.executor.test_uniproc import config, one_request

__all__ = ["config"]


def with_async(config: EngineConfig, wanted: bool | None) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, async_scheduling=wanted))


@pytest.fixture
def executor(config: EngineConfig) -> Iterator[UniProcExecutor]:
    made = UniProcExecutor(with_async(config, True))
    made.initialize_kv_cache(8)
    yield made
    made.shutdown()


def next_step(step: int) -> SchedulerOutput:
    return SchedulerOutput(
        [], CachedRequestData(["a"], set(), [None], [2 + step]), {"a": 1}, 1, set(), step=step
    )


def hold(executor: UniProcExecutor) -> threading.Event:
    """Keep the thread busy until the event is set."""
    go_on = threading.Event()
    assert executor._thread is not None
    executor._thread.submit(go_on.wait)
    return go_on


def test_on_a_cpu_it_is_on_only_when_asked_for(config: EngineConfig) -> None:
    for wanted, depth in ((None, 1), (False, 1), (True, 2)):
        executor = UniProcExecutor(with_async(config, wanted))
        assert (executor.max_concurrent_batches, executor.async_scheduling) == (depth, depth == 2)
        executor.shutdown()


def test_the_next_step_is_taken_while_one_runs_and_gets_its_token(
    executor: UniProcExecutor, config: EngineConfig
) -> None:
    go_on = hold(executor)
    futures = []
    for plan in (one_request([1, 2, 3]), next_step(1), next_step(2)):
        futures += [
            executor.execute_model(plan, non_block=True),
            executor.sample_tokens(None, non_block=True),
        ]
    assert not any(future.done() for future in futures)
    go_on.set()
    tokens = [future.result().sampled_token_ids for future in futures[1::2]]
    assert [future.result() for future in futures[::2]] == [None] * 3

    synchronous = UniProcExecutor(config)
    synchronous.initialize_kv_cache(8)
    for plan, expected in zip((one_request([1, 2, 3]), next_step(1), next_step(2)), tokens, strict=True):
        synchronous.execute_model(plan)
        assert synchronous.sample_tokens().sampled_token_ids == expected
    synchronous.shutdown()


def test_every_call_to_the_worker_is_made_on_the_thread(executor: UniProcExecutor) -> None:
    seen = []
    worker = executor._worker
    assert worker is not None
    worker.where = lambda: seen.append((threading.current_thread().name, torch.get_num_threads()))  # type: ignore[attr-defined]
    executor.collective_rpc("where")
    executor.collective_rpc("where", non_block=True).result()
    assert seen == [("nbengine-worker_0", 1)] * 2


def test_failures_reach_the_caller_as_they_were_and_do_not_stop_the_thread(executor: UniProcExecutor) -> None:
    bad = one_request([1, 2, 3])
    bad.num_scheduled_tokens = {"unknown": 3}
    with pytest.raises(KeyError, match="unknown"):
        executor.execute_model(bad)
    executed, sampled = (
        executor.execute_model(bad, non_block=True),
        executor.sample_tokens(None, non_block=True),
    )
    assert isinstance(executed.exception(), KeyError)
    assert isinstance(sampled.exception(), NBEngineError)
    assert executor.model_info()["device"] == "cpu"


def test_shutdown_with_steps_in_flight_finishes_the_running_call_and_drops_the_others(
    executor: UniProcExecutor,
) -> None:
    go_on = hold(executor)
    first = executor.execute_model(one_request([1, 2, 3]), non_block=True)
    first.add_done_callback(lambda _: go_on.set())
    executor.shutdown()
    assert first.cancelled()
    assert not any(thread.name.startswith("nbengine-worker") for thread in threading.enumerate())
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.sample_tokens(None, non_block=True)
    executor.shutdown()


def test_a_request_that_ends_by_itself_leaves_no_trace_in_a_step_planned_before(
    executor: UniProcExecutor,
) -> None:
    """The tokens that are computed beyond an end are forgotten with the request, and its row is free for the
    next."""
    plans = [one_request([1, 2, 3]), next_step(1)]
    last = SchedulerOutput([], CachedRequestData(), {"a": 2}, 2, {"a"}, step=2)
    last.scheduled_new_reqs = [NewRequestData("a", [1, 2], SamplingParams(temperature=0), [0], 0)]
    futures = []
    for plan in (*plans, last):
        executor.execute_model(plan, non_block=True)
        futures.append(executor.sample_tokens(None, non_block=True))
    alone = UniProcExecutor(executor._worker.config)  # type: ignore[union-attr]
    alone.initialize_kv_cache(8)
    alone.execute_model(one_request([1, 2]))
    assert futures[-1].result().sampled_token_ids == alone.sample_tokens().sampled_token_ids
    alone.shutdown()
