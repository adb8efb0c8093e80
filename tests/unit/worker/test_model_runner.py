"""The model runner against transformers, whatever the plans look like."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from nbengine.errors import NBEngineError
from nbengine.kernels.dispatch import select_products
from nbengine.kernels.quantized import pack
from nbengine.models.checkpoints.rounding import rounded, rounded_format
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.random_streams import seeded_stream, uniforms
from nbengine.sampling.sampler import Sampler
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.support.thorough import amount


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(256) for _ in range(random.randint(1, 40))] for _ in range(count)]


def test_greedy_tokens_are_those_of_transformers_one_by_one(driver, oracle) -> None:
    run = driver()
    for index, prompt in enumerate(prompts(5)):
        run.add(str(index), prompt, SamplingParams(temperature=0), max_tokens=20)
    outputs = run.run()
    for index, prompt in enumerate(prompts(5)):
        tokens = outputs[str(index)]
        logits = oracle(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("seed", range(amount(3, thorough=6)))
def test_chunks_preemptions_and_batch_order_do_not_change_the_tokens(driver, oracle, seed: int) -> None:
    run = driver(seed, chaos=1.0)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=7),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7),
        SamplingParams(temperature=1.3, min_p=0.05, seed=2**40),
    ]
    given = {f"r{i}": (prompt, params[i % 4]) for i, prompt in enumerate(prompts(14, seed))}
    for req_id, (prompt, request_params) in given.items():
        run.add(req_id, prompt, request_params)
    outputs = run.run()
    assert run.num_preemptions > 5
    assert run.max_batch > 3
    for req_id, (prompt, request_params) in given.items():
        assert outputs[req_id] == expected_tokens(oracle, prompt, outputs[req_id], request_params)


def expected_tokens(oracle, prompt: list[int], output: list[int], params: SamplingParams) -> list[int]:
    """Compute what each output token has to be, given those before it, from the logits of one dense pass."""
    count = len(output)
    logits = oracle(prompt + output[:-1])[len(prompt) - 1 :]
    metadata = SamplingMetadata.build(
        np.full(count, params.temperature, np.float32),
        np.full(count, params.top_k, np.int64),
        np.full(count, params.top_p, np.float64),
        np.full(count, params.min_p, np.float32),
        vocab_size=logits.shape[1],
        device=torch.device("cpu"),
    )
    numbers = uniforms(np.full(count, seeded_stream(params.seed or 0), np.uint64), np.arange(count))
    return Sampler()(logits, metadata, torch.from_numpy(numbers)).token_ids.tolist()


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(driver) -> None:
    prompt = prompts(1, seed=5)[0]
    params = SamplingParams(temperature=1.1, seed=99)
    alone = driver()
    alone.add("x", prompt, params, max_tokens=24)
    expected = alone.run()["x"]
    assert len(set(expected)) > 8
    for seed in range(3):
        crowd = driver(seed, chaos=1.0)
        for index, other in enumerate(prompts(9, seed)):
            crowd.add(f"other{index}", other, SamplingParams(temperature=index / 4, top_k=index))
        crowd.add("x", prompt, params, max_tokens=24)
        assert crowd.run()["x"] == expected


def test_requests_without_a_seed_differ(driver) -> None:
    run = driver()
    for index in range(6):
        run.add(str(index), [1, 2, 3], SamplingParams(temperature=1.5), max_tokens=12)
    outputs = run.run()
    assert len({tuple(tokens) for tokens in outputs.values()}) == 6


def test_end_tokens_wait_for_min_tokens(driver, oracle) -> None:
    prompt = prompts(1, seed=3)[0]
    greedy = [int(oracle(prompt)[-1].argmax())]
    for _ in range(5):
        greedy.append(int(oracle(prompt + greedy)[-1].argmax()))
    stop, eos = greedy[0], greedy[3]
    run = driver()
    limited = SamplingParams(
        temperature=0, min_tokens=2, max_tokens=6, stop_token_ids=[stop], eos_token_id=eos
    )
    free = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[stop], eos_token_id=eos)
    for index, params in enumerate([free, limited, free]):
        run.add(str(index), prompt, params, max_tokens=6)
    outputs = run.run()
    assert outputs["0"] == outputs["2"] == greedy
    tokens = outputs["1"]
    for position, token in enumerate(tokens):
        logits = oracle(prompt + tokens[:position])[-1].clone()
        if position < 2:
            logits[[stop, eos]] = -torch.inf
        assert token == logits.argmax()


def test_aborted_and_unknown_requests_are_forgotten(driver) -> None:
    run = driver(1, chaos=1.0)
    for index, prompt in enumerate(prompts(12)):
        run.add(str(index), prompt, SamplingParams(temperature=0), max_tokens=30)
    for _ in range(25):
        run.step()
    for req_id in list(run.requests):
        run.abort(req_id)
    run.finished.add("never seen")
    run.step()
    batch = run.runner._batch
    assert (batch.num_reqs, batch.row_of, batch._preempted) == (0, {}, {})
    run.add("0", [5, 6], SamplingParams(temperature=0))
    assert len(run.run()["0"]) == 8


def test_a_prefix_that_is_already_in_the_cache_is_not_computed_again(driver, oracle) -> None:
    run = driver()
    prompt = [*prompts(1, seed=8)[0][:16], 9, 9, 9]
    run.add("first", prompt, SamplingParams(temperature=0), max_tokens=2)
    run.step()
    shared = run.requests["first"].blocks[: len(prompt) // 4]
    length = len(shared) * 4
    longer = [*prompt[:length], 4, 3]
    new = NewRequestData("second", longer, SamplingParams(temperature=0), [*shared, run.free[0]], length)
    plan = SchedulerOutput([new], CachedRequestData(), {"second": 2}, 2, set())
    assert run.runner.execute_model(plan) is None
    output = run.runner.sample_tokens()
    assert output.sampled_token_ids == [[int(oracle(longer)[-1].argmax())]]


def test_calls_out_of_turn_are_refused(driver) -> None:
    runner = driver().runner
    with pytest.raises(NBEngineError, match="no step waits"):
        runner.sample_tokens()
    new = NewRequestData("a", [1, 2], SamplingParams(), [0], 0)
    runner.execute_model(SchedulerOutput([new], CachedRequestData(), {"a": 2}, 2, set()))
    with pytest.raises(NBEngineError, match="has not been sampled"):
        runner.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, set()))


def test_a_plan_with_drafts_is_refused_because_nothing_would_be_sampled_for_them(driver) -> None:
    run = driver()
    run.add("a", [1, 2, 3], SamplingParams(temperature=0))
    run.step()
    plan = run._plan()
    plan.scheduled_spec_decode_tokens = {"a": [7]}
    plan.num_scheduled_tokens["a"] += 1
    plan.total_num_scheduled_tokens += 1
    with pytest.raises(NBEngineError, match="drafts for a; the model runner computes no drafts"):
        run.runner.execute_model(plan)


def test_a_profile_run_leaves_no_trace(driver, oracle) -> None:
    run = driver()
    run.runner.profile_run(96)
    run.add("a", [1, 2, 3], SamplingParams(temperature=0), max_tokens=4)
    tokens = run.run()["a"]
    assert tokens[0] == oracle([1, 2, 3])[-1].argmax()


def long_prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(64) for _ in range(random.randint(1, 60))] for _ in range(count)]


def random_model(dtype: torch.dtype) -> DecoderForCausalLM:
    """Make a dense decoder of random weights with sizes of SmolLM2, and few tokens and layers."""
    config = DecoderConfig(64, 576, 1536, 2, 9, 3, 64, 1e-5, 1e4, None, 128, tie_word_embeddings=True)
    model = DecoderForCausalLM(config, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for slot in model.weight_slots().values():
        weight = torch.empty(slot.full_shape)
        slot.tensor.copy_(weight.normal_(1 if weight.ndim == 1 else 0, 0.05, generator=generator))
    return model


@pytest.fixture(params=["dense", "int4"])
def bfloat16_model(request: pytest.FixtureRequest) -> DecoderForCausalLM:
    """A decoder of random weights, in bfloat16 or rounded."""
    config = DecoderConfig(64, 576, 1536, 2, 9, 3, 64, 1e-5, 1e4, None, 128, tie_word_embeddings=True)
    cpu, packed = torch.device("cpu"), ALL_DENSE
    if request.param == "int4":
        shapes = DecoderForCausalLM(config, dtype=torch.bfloat16, device=torch.device("meta")).weight_slots()
        names = [name for name, slot in shapes.items() if len(slot.full_shape) == 2]
        products = select_products(cpu)
        packed = PackedFormats(dict.fromkeys(names, rounded_format(4)), products)
    model = DecoderForCausalLM(config, dtype=torch.bfloat16, device=cpu, packed=packed)
    generator = torch.Generator().manual_seed(0)
    for slot in model.weight_slots().values():
        weight = torch.empty(slot.full_shape)
        weight.normal_(1 if weight.ndim == 1 else 0, 0.05, generator=generator)
        slot.tensor.copy_(weight if slot.form is None else pack(slot.form, rounded(4, weight)))
    return model


def test_bfloat16_logits_are_the_same_bits_alone_and_in_company(
    driver, new_runner, bfloat16_model, monkeypatch
) -> None:
    model = bfloat16_model

    def logits_of_x(others: int) -> list[torch.Tensor]:
        runner = new_runner(model)
        seen = []
        sample = runner._sampling._sampler

        def record(logits: torch.Tensor, *rest: object) -> object:
            seen.append(logits[0].clone())
            return sample(logits, *rest)

        runner._sampling._sampler = record
        run = driver(runner=runner)
        run.add("x", [3, 1, 4], SamplingParams(temperature=0), max_tokens=24)
        for index in range(others):
            run.add(f"other{index}", [index, 5], SamplingParams(temperature=1.5), max_tokens=24)
        run.run()
        return seen

    alone = logits_of_x(0)
    assert len(alone) == 24
    for others in (1, 7):
        assert all(map(torch.equal, alone, logits_of_x(others)))

    # Products of our own compute no padding.
    sizes = []
    step = model.step
    monkeypatch.setattr(model, "step", lambda ids, *rest: sizes.append(len(ids)) or step(ids, *rest))
    logits_of_x(0)
    assert sizes == [3, *[1] * 23]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_16_bit_models_are_the_same_alone_together_in_chunks_and_preempted(
    driver, new_runner, dtype: torch.dtype
) -> None:
    """Prompts are long enough for steps of more rows than any product of the library computes in one way."""
    model = random_model(dtype)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1.2, seed=7)]
    given = {
        f"r{index}": (prompt, params[index % 2])
        for index, prompt in enumerate(long_prompts(count=12, seed=5))
    }

    def outputs(names: list[str], **settings: Any) -> dict[str, list[int]]:
        run = driver(runner=new_runner(model), **settings)
        for name in names:
            run.add(name, *given[name], max_tokens=amount(8, thorough=16))
        found = run.run()
        assert run.num_preemptions > 5 or not settings.get("chaos")
        return found

    alone = {name: outputs([name])[name] for name in given}
    for few in (["r0", "r1", "r2"], ["r3", "r4"]):
        assert outputs(few) == {name: alone[name] for name in few}
        assert outputs(few, chunk=7) == {name: alone[name] for name in few}
    for seed in range(amount(1, thorough=2)):
        assert outputs(list(given), seed=seed, chaos=1.0) == alone
