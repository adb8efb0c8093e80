"""Several workers say what one says and what transformers says, token by token, whatever the circumstances."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from process_support.held_back import held_back
from process_support.other_user import check_closed_to_strangers
from process_support.parallel_engines import OF_STAGES, OF_TENSORS, TOPOLOGIES, Case
from process_support.tiny_models import VOCAB_SIZE, check_greedy, check_greedy_output, logits_of

from nbengine import AsyncLLM, PoolingParams, RequestOutput, SamplingParams, StructuredOutputsParams
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount, in_turn

NUM_REQUESTS = 32
"""They do not fit in together."""
NUM_SAMPLED = amount(16, thorough=32)
DEADLINE = 60.0
TOLERANCE = 1e-4
SHARED_PREFIX = [(7 * i) % 200 + 20 for i in range(40)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.timeout(240)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Make prompts of 1 to 90 tokens; every fourth begins like the others of its kind."""
    chooser = random.Random(seed)
    lengths = [chooser.randint(1, 90) for _ in range(count)]
    drawn = [[chooser.randrange(VOCAB_SIZE - 2) for _ in range(length)] for length in lengths]
    return [SHARED_PREFIX + ids[:40] if number % 4 == 0 else ids for number, ids in enumerate(drawn)]


def greedy(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4 + number % 21, ignore_eos=number % 2 == 0)


async def last_output(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    async for output in engine.generate(prompt, params):
        last = output
    return last


async def answers(engine: AsyncLLM, asked: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """Ask prompts at once and return the outputs."""
    finals = [msgspec.structs.replace(own, output_kind=RequestOutputKind.FINAL_ONLY) for own in params]
    tasks = [last_output(engine, prompt, own) for prompt, own in zip(asked, finals, strict=True)]
    return await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


async def test_greedy_tokens_of_32_requests_are_those_of_transformers(case: Case) -> None:
    """Beside others that are given up in mid-stream, with preemption, with a cold and a warm prefix cache."""
    engine, chooser = case.engine, random.Random(7)

    async def abandon(prompt: list[int]) -> int:
        seen, enough = 0, chooser.randrange(1, 20)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        async with contextlib.aclosing(engine.generate({"prompt_token_ids": prompt}, params)) as stream:
            async for _ in stream:
                seen += 1
                if seen >= enough:
                    break
        return seen

    asked = [{"prompt_token_ids": ids} for ids in prompts(NUM_REQUESTS)]
    params = [greedy(number) for number in range(NUM_REQUESTS)]
    others = prompts(8, seed=1)
    # Together they need more blocks than there are.
    async with held_back(engine, len(asked) + len(others)):
        left = [asyncio.create_task(abandon(ids)) for ids in others]
        asking = asyncio.create_task(answers(engine, asked, params))
    cold = await asking
    assert all(await asyncio.gather(*left))
    before = (await engine.stats()).engines[0]
    assert before.num_preemptions > 0
    warm = await answers(engine, asked, params)
    assert told(warm) == told(cold)
    for output in cold:
        check_greedy_output(case.oracle, output)
    after = (await engine.stats()).engines[0]
    assert after.prefix_cache_hits > before.prefix_cache_hits
    assert after.num_running_reqs == after.num_waiting_reqs == 0
    assert after.num_free_blocks == after.num_blocks


@pytest.mark.parametrize("case", OF_STAGES, indirect=True)
async def test_the_pieces_of_a_stream_make_the_whole(case: Case) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    prompt = prompts(1)[0]
    stream = case.engine.generate({"prompt_token_ids": prompt}, params)
    tokens = [token async for delta in stream for token in delta.outputs[0].token_ids]
    assert len(tokens) == 24
    check_greedy(case.oracle, prompt, tokens)


async def test_sampled_tokens_are_those_of_one_worker(case: Case) -> None:
    """With every parameter of sampling and several completions."""
    asked = [{"prompt_token_ids": ids} for ids in prompts(NUM_SAMPLED, seed=2)]
    params = [
        SamplingParams(
            n=3 if number % 8 == 1 else 1,
            temperature=0.6 + 0.1 * (number % 6),
            top_p=0.9 if number % 3 == 0 else 1.0,
            top_k=20 if number % 3 == 1 else 0,
            min_p=0.02 if number % 5 == 0 else 0.0,
            repetition_penalty=1.2 if number % 4 == 0 else 1.0,
            presence_penalty=0.5 if number % 4 == 1 else 0.0,
            logit_bias={65: 2.0} if number % 4 == 2 else None,
            min_tokens=4 if number % 4 == 3 else 0,
            stop_token_ids=list(range(60, 80)) if number % 7 == 3 else None,
            seed=number,
            max_tokens=4 + number % 12,
        )
        for number in range(NUM_SAMPLED)
    ]
    ours = await answers(case.engine, asked, params)
    assert told(ours) == told(case.alone.generate(asked, params, use_tqdm=False))


@pytest.mark.parametrize("case", OF_TENSORS, indirect=True)
async def test_log_probabilities_are_those_of_one_worker(case: Case) -> None:
    params = SamplingParams(
        n=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts(6, seed=3)]
    ours = await answers(case.engine, asked, [params] * len(asked))
    for output, expected in zip(ours, case.alone.generate(asked, params, use_tqdm=False), strict=True):
        pairs = [(output.prompt_logprobs, expected.prompt_logprobs)]
        for completion, other in zip(output.outputs, expected.outputs, strict=True):
            assert completion.token_ids == other.token_ids
            pairs.append((completion.logprobs, other.logprobs))
        for rows, expected_rows in pairs:
            assert rows is not None
            assert expected_rows is not None
            for row, expected_row in zip(rows, expected_rows, strict=True):
                found = {token: entry.logprob for token, entry in (row or {}).items()}
                wanted = {token: entry.logprob for token, entry in (expected_row or {}).items()}
                assert found == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("case", OF_TENSORS, indirect=True)
async def test_workers_draw_alike_without_a_seed_too(case: Case) -> None:
    """Had each drawn its own token, they would go on from different ones, and the logits would be of no text."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0)
    asked = [{"prompt_token_ids": ids} for ids in prompts(8, seed=8)]
    ours = await answers(case.engine, asked, [params] * len(asked))
    for ids, output in zip(prompts(8, seed=8), ours, strict=True):
        (completion,) = output.outputs
        expected = logits_of(case.oracle, ids, completion.token_ids).log_softmax(-1)
        assert completion.logprobs is not None
        for entry, token, row in zip(completion.logprobs, completion.token_ids, expected, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize("case", OF_STAGES, indirect=True)
async def test_structured_outputs_are_those_of_one_worker(case: Case) -> None:
    schema = {"json": SCHEMA, "disable_any_whitespace": True}
    constraints = [schema, {"regex": "[a-f]{4,12}"}, {"choice": ["yes", "no", "perhaps"]}, None] * 3
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=60,
            structured_outputs=None if constraint is None else StructuredOutputsParams(**constraint),
        )
        for number, constraint in enumerate(constraints)
    ]
    asked = [{"prompt_token_ids": ids} for ids in prompts(len(params), seed=4)]
    ours = await answers(case.engine, asked, params)
    assert told(ours) == told(case.alone.generate(asked, params, use_tqdm=False))
    complete = [o.outputs[0].text for o in ours[::4] if o.outputs[0].finish_reason == "stop"]
    assert complete
    assert all(json.loads(text).keys() == {"name", "age"} for text in complete)


@pytest.mark.parametrize("case", OF_STAGES, indirect=True)
async def test_prompts_given_as_embeddings_are_continued_as_by_transformers(case: Case) -> None:
    table = case.oracle.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(5)
    plain = [table[ids] for ids in prompts(4, seed=5)]
    soft = [rows + 0.1 * torch.randn(rows.shape, generator=generator) for rows in plain]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = [{"prompt_embeds": rows} for rows in (*plain, *soft)]
    ours = await answers(case.engine, asked, [params] * len(asked))
    for rows, output in zip((*plain, *soft), ours, strict=True):
        check_greedy(case.oracle, rows, output.outputs[0].token_ids)


@pytest.mark.parametrize("case", OF_STAGES, indirect=True)
async def test_vectors_are_those_of_one_worker(case: Case) -> None:
    kinds = [PoolingParams(task="embed", pooling=pooling) for pooling in ("mean", "cls", "last")]
    kinds.append(PoolingParams(task="encode"))
    asked = [({"prompt_token_ids": ids}, kind) for ids in prompts(6, seed=6) for kind in kinds]
    beside = asyncio.create_task(
        last_output(case.engine, {"prompt_token_ids": SHARED_PREFIX}, SamplingParams(temperature=0))
    )

    async def encode(prompt: Any, params: PoolingParams) -> np.ndarray[Any, Any]:
        (output,) = [output async for output in case.engine.encode(prompt, params)]
        return output.outputs.data

    ours = await asyncio.wait_for(asyncio.gather(*(encode(*pair) for pair in asked)), DEADLINE)
    check_greedy_output(case.oracle, await beside)
    expected = case.alone.encode([prompt for prompt, _ in asked], [kind for _, kind in asked], use_tqdm=False)
    for vector, output in zip(ours, expected, strict=True):
        np.testing.assert_allclose(vector, output.outputs.data, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("case", "level"), in_turn(TOPOLOGIES, [1, 2]), indirect=["case"], scope="module")
async def test_a_sleep_changes_nothing(case: Case, level: int) -> None:
    engine = case.engine
    asked = [{"prompt_token_ids": ids} for ids in prompts(4, seed=7)]
    params = [greedy(20)] * len(asked)
    before = await answers(engine, asked, params)
    for output in before:
        check_greedy_output(case.oracle, output)
    await engine.sleep(level)
    assert await engine.is_sleeping()
    await engine.check_health()
    waiting = asyncio.create_task(answers(engine, asked, params))
    await engine.wake_up()
    # Beside steps that are under way.
    await engine.check_health()
    after = await waiting
    assert told(after) == told(before)
    assert all(output.num_cached_tokens == 0 for output in after)


async def test_every_worker_is_known_with_its_figures(case: Case) -> None:
    topology, ready = case.topology, case.engine.ready
    places = [(w.rank, w.tp_rank, w.pp_rank) for w in ready.workers]
    assert places == [
        (pp * topology.tp + tp, tp, pp) for pp in range(topology.pp) for tp in range(topology.tp)
    ]
    stages = {w.pp_rank: range(w.first_layer, w.first_layer + w.num_layers) for w in ready.workers}
    assert [layer for stage in range(topology.pp) for layer in stages[stage]] == [0, 1, 2]
    assert len({w.pid for w in ready.workers} | {ready.pid}) == topology.tp * topology.pp + 1
    assert all(w.weights_bytes > 0 and w.kv_cache_bytes > 0 for w in ready.workers)
    await last_output(case.engine, {"prompt_token_ids": [1]}, greedy(0))
    async with asyncio.timeout(DEADLINE):
        workers = (await case.engine.stats()).engines[0].workers
        # A step ends with the answer of one of them: the others note it on their own time.
        while len({w.num_steps for w in workers}) != 1:
            workers = (await case.engine.stats()).engines[0].workers
    assert [w.rank for w in workers] == [w.rank for w in ready.workers]
    assert all(w.memory_bytes > 0 and w.step_seconds > 0 for w in workers)


@pytest.mark.parametrize("case", OF_STAGES, indirect=True)
async def test_another_user_finds_nothing_to_connect_to_read_plant_or_kill(case: Case) -> None:
    check_closed_to_strangers(case.engine.connection.name, case.watch)
