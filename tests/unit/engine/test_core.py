"""EngineCore with a model that adds one: start, steps, aborts, refusals, utilities."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.engine.core.step_pace import StepPace
from nbengine.errors import EngineStartError, RequestError, UtilityError
from nbengine.ipc.messages import EngineCoreRequest, FinishReason
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.metrics.stats import WorkerStats
from nbengine.sampling.logits_processor import BatchUpdate, LogitsProcessor
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.steps_at_once import ONE_STEP, StepsAllowed
from tests.process.process_support.fake_executor import VOCAB_SIZE, FakeExecutor


def make_config(
    knobs=None, *, max_model_len=None, cache=None, scheduler=None, processors=(), parallel=None
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model="fake",
            hf_overrides=knobs or {},
            max_model_len=max_model_len,
            logits_processors=processors,
        ),
        cache=cache or CacheConfig(num_gpu_blocks_override=32),
        scheduler=scheduler or SchedulerConfig(),
        parallel=parallel or ParallelConfig(),
    )


def make_core(*args, **kwargs) -> EngineCore:
    return EngineCore(make_config(*args, **kwargs), FakeExecutor)


def add(core: EngineCore, request_id: str, prompt: list[int], client_index: int = 0, **params) -> None:
    params = {"temperature": 0.0, "max_tokens": 4} | params
    request = EngineCoreRequest(request_id, prompt, SamplingParams(**params), client_index=client_index)
    core.add_request(*core.preprocess_add_request(request))


def run(core: EngineCore) -> dict[str, list[int]]:
    """Step until idle; the tokens of every request."""
    tokens: dict[str, list[int]] = {}
    while core.scheduler.has_requests():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for batch in outputs.values():
            for output in batch.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_a_step_without_tokens_says_nothing_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    took: list[int] = []
    monkeypatch.setattr(core._pace, "took", lambda _, steps: took.append(steps))
    add(core, "a", [10], max_tokens=2)
    assert run(core) == {"a": [11, 12]}
    # The last of three steps tells the worker that the request has ended.
    assert took == [1, 1]
    assert core.scheduler.step_counter == 3


def test_the_pace_says_how_many_steps_are_computed_at_once() -> None:
    pace = StepPace(8)
    assert pace.allowed == ONE_STEP
    for seconds, steps, most in ((0.08, 1, 0), (0.064, 8, 6), (0.001, 1, 8)):
        pace.took(seconds, steps)
        assert pace.allowed == StepsAllowed(most, seconds / steps)
    assert StepPace(1).allowed == ONE_STEP


def test_requests_are_batched_and_finish() -> None:
    core = make_core()
    add(core, "a", [10])
    add(core, "b", [20, 30], max_tokens=2)
    outputs, executed = core.step()
    assert executed
    assert [output.request_id for output in outputs[0].outputs] == ["a", "b"]
    assert outputs[0].timestamp > 0
    assert run(core) == {"a": [12, 13, 14], "b": [32]}
    assert core.step() == ({}, False)
    core.scheduler.check_integrity()


def test_no_drafts_are_planned_even_if_a_model_runner_proposes_some() -> None:
    core = make_core()
    add(core, "a", [5])
    run_model = core.model_executor.run
    core.model_executor.run = lambda plan: replace(run_model(plan), draft_token_ids={"a": [7, 8]})
    core.step()
    plan = core.scheduler.schedule()
    assert (plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens) == ({"a": 1}, {})


def test_a_request_aborted_while_the_model_runs_gets_no_token_of_that_step() -> None:
    core = make_core()
    add(core, "gone", [1])
    add(core, "kept", [1])
    add(core, "other client", [1], client_index=7)
    execute = core.model_executor.execute_model

    def abort_meanwhile(plan, *, non_block=False):
        core.aborts_queue.put((0, ["gone", "other client", "unknown"]))
        return execute(plan, non_block=non_block)

    core.model_executor.execute_model = abort_meanwhile
    outputs, _ = core.step()
    assert [output.request_id for output in outputs[0].outputs] == ["kept"]
    assert [output.request_id for output in outputs[7].outputs] == ["other client"]
    assert set(core.scheduler.requests) == {"kept", "other client"}


def test_a_request_that_its_client_ends_for_a_stop_string_counts_as_stopped() -> None:
    core = make_core()
    for name, client_index in (("stopped", 1), ("dropped", 1), ("other client", 2)):
        add(core, name, [1], client_index=client_index)
    core.step()
    core.abort_for_client(1, ["stopped", "dropped", "unknown"], ["stopped", "unknown", "other client"])
    assert core.stats().requests.finished == [1, 0, 1, 0]
    core.abort_for_client(2, None)
    assert core.stats().requests.finished == [1, 0, 2, 0], "nobody ends another client's requests in its name"


def test_all_requests_of_a_client_can_be_aborted() -> None:
    core = make_core()
    for client_index in (1, 2):
        for number in range(3):
            add(core, f"{client_index}.{number}", [number], client_index=client_index)
    core.abort_for_client(1, None)
    assert all(request_id.startswith("2") for request_id in core.scheduler.requests)
    run(core)
    assert core.stats().num_free_blocks == 32


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "no tokens"),
        ([-1], {}, "prompt_token_ids has the token id -1"),
        ([VOCAB_SIZE], {}, f"vocabulary is 0 to {VOCAB_SIZE - 1}"),
        ([2**70], {}, "token id"),
        ([1] * 512, {}, "max_model_len=512"),
        ([1], {"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ([1], {"bad_words_token_ids": [[1], [2, VOCAB_SIZE]]}, "bad_words"),
    ],
)
def test_what_the_model_cannot_do_is_refused(prompt, params, reason) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=reason):
        add(core, "r", prompt, **params)
    assert not core.scheduler.has_requests()


class Picky(LogitsProcessor):
    """Takes only requests that say please."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not (params.extra_args or {}).get("please"):
            raise ValueError("say please")

    def update_state(self, update: BatchUpdate) -> None: ...

    def apply(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        return logits


def test_a_logits_processor_refuses_a_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_picky", types.SimpleNamespace(Picky=Picky))
    core = make_core(processors=("own_picky:Picky",))
    add(core, "polite", [1], extra_args={"please": True})
    with pytest.raises(RequestError, match="Picky refuses: say please"):
        add(core, "rude", [1])
    assert run(core).keys() == {"polite"}


def test_a_logits_processor_that_is_missing_keeps_the_engine_from_starting() -> None:
    with pytest.raises(EngineStartError, match="own_missing:X cannot be imported"):
        make_core(processors=("own_missing:X",))


def test_a_prompt_that_can_never_be_scheduled_is_refused() -> None:
    core = make_core(scheduler=SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=8))
    with pytest.raises(RequestError, match="max_num_batched_tokens=8"):
        add(core, "r", [1] * 9)


@pytest.mark.parametrize(
    ("sampling", "pooling", "reason"),
    [
        (None, None, "either sampling_params or pooling_params must be given"),
        (SamplingParams(), PoolingParams(task="embed"), "cannot be asked to embed"),
        (
            None,
            PoolingParams(task="embed", pooling="mean"),
            "cannot be asked to embed; supported are generate",
        ),
    ],
)
def test_requests_for_nothing_or_for_a_task_that_the_model_has_not_are_refused(
    sampling, pooling, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        make_core().preprocess_add_request(EngineCoreRequest("r", [1], sampling, pooling))


@pytest.mark.parametrize(
    ("embeds", "reason"),
    [
        (None, "must be a tensor or an array, not a NoneType"),
        ([[0.0] * 4], "must be a tensor or an array, not a list"),
        (np.zeros((3, 5), np.float32), r"shape \[prompt tokens, 4\], got float32 of shape \(3, 5\)"),
        (np.zeros(4, np.float32), "of shape"),
        (np.zeros((3, 4), np.int64), "got int64"),
        (np.zeros((3, 4), np.complex64), "got complex64"),
        (torch.zeros((3, 4), dtype=torch.int8), "got int8"),
        (np.full((3, 4), np.nan), "finite in the model's dtype, float32"),
        (np.full((3, 4), 1e300), "finite in the model's dtype, float32"),
        (np.zeros((0, 4)), "the prompt has no tokens"),
    ],
)
def test_embeddings_that_the_model_cannot_take_are_refused(embeds, reason: str) -> None:
    request = EngineCoreRequest("r", None, SamplingParams(), prompt_embeds=embeds)
    with pytest.raises(RequestError, match=reason):
        make_core().preprocess_add_request(request)


def test_embeddings_go_with_neither_tokens_nor_prompt_logprobs() -> None:
    core, embeds = make_core(), np.zeros((3, 4))
    with pytest.raises(RequestError, match="not both"):
        core.preprocess_add_request(EngineCoreRequest("r", [1], SamplingParams(), prompt_embeds=embeds))
    params = SamplingParams(prompt_logprobs=1)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        core.preprocess_add_request(EngineCoreRequest("r", None, params, prompt_embeds=embeds))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", torch.bfloat16])
def test_embeddings_reach_the_scheduler_in_the_models_dtype(dtype) -> None:
    values = np.arange(12.0).reshape(3, 4)
    embeds = torch.tensor(values, dtype=dtype) if isinstance(dtype, torch.dtype) else values.astype(dtype)
    if not isinstance(embeds, torch.Tensor):
        embeds.flags.writeable = False
    request = EngineCoreRequest("r", None, SamplingParams(), prompt_embeds=embeds)
    prepared, _ = make_core().preprocess_add_request(request)
    assert torch.equal(prepared.prompt_embeds, torch.from_numpy(values).float())
    assert prepared.prompt_embeds.is_contiguous()


def test_embeddings_share_prefixes_with_their_like_and_never_with_tokens() -> None:
    core = make_core()
    rows = np.random.default_rng(0).standard_normal((40, 4), np.float32)
    other = rows.copy()
    other[20] += 1

    def hits(token_ids: list[int] | None, embeds=None, **more) -> int:
        before = core.stats().prefix_cache_hits
        request = EngineCoreRequest(
            "r", token_ids, SamplingParams(max_tokens=2), prompt_embeds=embeds, **more
        )
        core.add_request(*core.preprocess_add_request(request))
        run(core)
        return core.stats().prefix_cache_hits - before

    assert hits([0] * 40) == 0
    assert hits(None, rows) == 0
    assert hits(None, torch.from_numpy(rows).double()) == 32
    assert hits(None, rows[:17]) == 16
    assert hits(None, other) == 16
    assert hits(None, rows, cache_salt="mine") == 0
    assert hits([0] * 40) == 32
    core.scheduler.check_integrity()


def test_prefix_caching_can_be_switched_off() -> None:
    for enabled, hits in ((True, 48), (False, 0)):
        cache = CacheConfig(num_gpu_blocks_override=32, enable_prefix_caching=enabled)
        core = make_core(cache=cache)
        for request_id in ("cold", "warm"):
            add(core, request_id, list(range(50)), max_tokens=1)
            run(core)
        assert core.stats().prefix_cache_hits == hits


def test_a_failing_step_raises_and_is_described_in_the_log(caplog) -> None:
    core = make_core({"fail_at_token": 2})
    add(core, "r", [1])
    with pytest.raises(RuntimeError, match="broke at token 2"):
        core.step()
    assert "step 0 (1 tokens of 1 requests: r: 1) failed" in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_model_len": 513}, r"max_model_len=513 exceeds the 512 positions .* hf_overrides"),
        (
            {"max_model_len": 400, "cache": CacheConfig(num_gpu_blocks_override=8)},
            "num_gpu_blocks_override to at least 25",
        ),
        ({"cache": CacheConfig(kv_cache_memory_bytes=10)}, "raise kv_cache_memory_bytes"),
    ],
)
def test_a_cache_that_does_not_fit_ends_the_start_and_releases_the_executor(config, reason) -> None:
    shut_down = []

    class Watched(FakeExecutor):
        def shutdown(self) -> None:
            shut_down.append(self)

    with pytest.raises(EngineStartError, match=reason):
        EngineCore(make_config(**config), Watched)
    assert len(shut_down) == 1


def test_an_unspecified_max_model_len_is_the_models_or_what_fits(caplog) -> None:
    assert make_core().max_model_len == 512
    assert "max_model_len" not in caplog.text
    core = make_core(cache=CacheConfig(num_gpu_blocks_override=8))
    assert core.max_model_len == 128
    assert "could take 512 tokens, the KV cache has room for 128" in caplog.text
    assert make_core(max_model_len=100).max_model_len == 100


def test_the_pool_is_sized_from_the_memory_that_the_executor_finds() -> None:
    core = make_core(cache=CacheConfig())
    ready = core.ready_message(0)
    assert ready.num_blocks == (1 << 20) // (2 * 4 * 4 * 16)
    assert ready.kv_cache_bytes == 1 << 20
    assert (ready.device, ready.dtype, ready.weights_bytes) == ("cpu", "float32", 4)


def test_what_the_workers_hold_is_added_up() -> None:
    core = make_core({"workers": 3})
    ready = core.ready_message(0)
    assert [worker.rank for worker in ready.workers] == [0, 1, 2]
    assert ready.weights_bytes == 3 * 4
    assert ready.kv_cache_bytes == 3 * ready.workers[0].kv_cache_bytes > 0


def test_the_statistics_have_a_row_for_each_worker() -> None:
    core = make_core({"workers": 2})
    assert core.stats().workers == [WorkerStats(0), WorkerStats(1)]
    add(core, "a", [1, 2, 3], max_tokens=2)
    core.step()
    assert core.stats().workers == [WorkerStats(0, 1000, 1, 0.0), WorkerStats(1, 1001, 1, 1.0)]


class UnevenWorkers(FakeExecutor):
    """Two stages: the first has three layers and room for 30 blocks of them, the second one layer, room for 20."""

    device = "cpu"

    def collective_rpc(self, method, *args, **kwargs):
        (answer,) = super().collective_rpc(method, *args, **kwargs)
        specs = [RankCacheSpec(layers, 1, 4, 4, self.block_size) for layers in (3, 1)]
        if method == "get_kv_cache_spec":
            return specs
        if method == "determine_available_memory":
            return [30 * specs[0].page_size_bytes + 1, 20 * specs[1].page_size_bytes]
        return [answer | {"device": self.device} if method == "model_info" else answer]


def test_all_workers_get_as_many_blocks_as_the_one_that_has_room_for_the_fewest() -> None:
    core = EngineCore(make_config(cache=CacheConfig()), UnevenWorkers)
    assert core.num_blocks == 20
    calls = [call for call in core.model_executor.rpc_calls if "kv_cache" in call[0]]
    assert calls[1:] == [("check_kv_cache_fits", 20, 0), ("initialize_kv_cache", 20, 0)]


@pytest.mark.parametrize(("device", "num_layers"), [("cpu", 4), ("cuda", 3)])
def test_too_few_bytes_for_several_workers_are_counted_where_they_were_given(device, num_layers) -> None:
    """For all workers of a CPU, and for each GPU."""
    workers = type("Workers", (UnevenWorkers,), {"device": device})
    config = make_config(cache=CacheConfig(kv_cache_memory_bytes=1), max_model_len=336)
    page_size = num_layers * 2 * 4 * 4 * 16
    with pytest.raises(EngineStartError, match=f"raise kv_cache_memory_bytes to at least {21 * page_size}$"):
        EngineCore(config, workers)


def test_utilities_are_those_of_the_table_and_no_others() -> None:
    core = make_core()
    assert core.call_utility("get_supported_tasks", []) == ["generate"]
    assert core.call_utility("ping", []) == "pong"
    assert core.call_utility("stats", []) == core.stats()
    assert core.call_utility("reset_prefix_cache", []) is True
    assert core.call_utility("check_health", []) is None
    for name in ("shutdown", "step", "__init__", "_utilities", ""):
        with pytest.raises(UtilityError, match="there are get_supported_tasks"):
            core.call_utility(name, [])


def test_progress_is_reported_in_order() -> None:
    stages = []
    EngineCore(make_config(), FakeExecutor, lambda progress: stages.append(progress.stage))
    assert list(dict.fromkeys(stages)) == ["load", "profile", "kv"]
    assert stages == sorted(stages, key=["load", "profile", "kv"].index)


def test_finish_reasons_reach_the_client() -> None:
    core = make_core()
    add(core, "r", [1], stop_token_ids=[3], max_tokens=50)
    reasons = []
    while core.scheduler.has_requests():
        outputs, _ = core.step()
        reasons += [o.finish_reason for batch in outputs.values() for o in batch.outputs]
    assert reasons == [None, FinishReason.STOP]
