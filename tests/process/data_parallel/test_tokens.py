"""Several engine cores say what one says and what transformers says, token by token, however uneven their load is."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest
from process_support.data_parallel_engines import TOPOLOGIES, Case
from process_support.held_back import held_back
from process_support.other_user import check_closed_to_strangers
from process_support.tiny_models import VOCAB_SIZE, check_greedy_output

from nbengine import AsyncLLM, RequestOutput, SamplingParams
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount, in_turn

DEADLINE = 60.0
LAST = amount(["dp2-ep-ahead"], thorough=list(TOPOLOGIES))
"""For what does not depend on the division of a model."""
SHARED_PREFIX = [(7 * i) % 200 + 20 for i in range(40)]

pytestmark = pytest.mark.timeout(240)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Make prompts of 1 to 90 tokens; every fourth begins like the others of its kind."""
    chooser = random.Random(seed)
    lengths = [chooser.randint(1, 90) for _ in range(count)]
    drawn = [[chooser.randrange(VOCAB_SIZE - 2) for _ in range(length)] for length in lengths]
    return [SHARED_PREFIX + ids[:40] if number % 4 == 0 else ids for number, ids in enumerate(drawn)]


def greedy(number: int) -> SamplingParams:
    """Make greedy parameters of very different lengths, so that engine cores run out of work at different
    times."""
    return SamplingParams(
        temperature=0,
        max_tokens=14 + number * 7 % 44,
        ignore_eos=number % 2 == 0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def answers(
    engine: AsyncLLM, asked: Sequence[list[int]], ranks: Sequence[int | None]
) -> list[RequestOutput]:
    """Ask prompts at once, each of the engine core of a rank, and return the outputs."""

    async def one(number: int) -> RequestOutput:
        prompt, rank = {"prompt_token_ids": asked[number]}, ranks[number]
        async for output in engine.generate(prompt, greedy(number), data_parallel_rank=rank):
            last = output
        return last

    return await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(len(asked)))), DEADLINE)


async def abandon(engine: AsyncLLM, prompt: list[int], rank: int, enough: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    stream = engine.generate({"prompt_token_ids": prompt}, params, data_parallel_rank=rank)
    async with contextlib.aclosing(stream) as outputs:
        seen = 0
        async for _ in outputs:
            seen += 1
            if seen == enough:
                return


def check(case: Case, asked: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> None:
    """Compare outputs with transformers, and with one engine core."""
    for output in outputs:
        check_greedy_output(case.oracle, output)
    expected = case.alone.generate(
        [{"prompt_token_ids": ids} for ids in asked], [greedy(n) for n in range(len(asked))], use_tqdm=False
    )
    assert tokens_of(outputs) == tokens_of(expected)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("case", "loaded"), in_turn(TOPOLOGIES, [0, -1]), indirect=["case"], scope="module")
async def test_engine_cores_without_requests_compute_for_the_one_that_has_them(
    case: Case, loaded: int
) -> None:
    rank = loaded % case.topology.dp
    asked = prompts(10, seed=rank)
    check(case, asked, await answers(case.engine, asked, [rank] * len(asked)))
    await until_idle(case.engine)
    engines = (await case.engine.stats()).engines
    idle = [engine.num_dummy_steps for number, engine in enumerate(engines) if number != rank]
    assert all(steps == 0 if case.topology.is_dense else steps > 0 for steps in idle)


async def test_tokens_are_the_same_with_uneven_load_preemption_prefix_hits_and_aborts(case: Case) -> None:
    engine, dp, chooser = case.engine, case.topology.dp, random.Random(7)
    asked = prompts(amount(20, thorough=32), seed=5)
    # Three in four ask the first, the others any.
    ranks = [0 if number % 4 else chooser.randrange(dp) for number in range(len(asked))]
    others = prompts(8, seed=6)
    # Together they need more blocks than there are.
    async with held_back(engine, len(asked) + len(others)):
        left = [
            asyncio.create_task(abandon(engine, ids, number % dp, chooser.randrange(1, 20)))
            for number, ids in enumerate(others)
        ]
        asking = asyncio.create_task(answers(engine, asked, ranks))
    cold = await asking
    await asyncio.gather(*left)
    check(case, asked, cold)
    before = (await engine.stats()).engines
    assert before[0].num_preemptions > 0
    warm = await answers(engine, asked, ranks)
    assert tokens_of(warm) == tokens_of(cold)
    await until_idle(engine)
    after = (await engine.stats()).engines
    assert after[0].prefix_cache_hits > before[0].prefix_cache_hits
    for stats in after:
        assert stats.num_running_reqs == stats.num_waiting_reqs == 0
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("case", LAST, indirect=True)
async def test_requests_with_pauses_between_them_begin_wave_after_wave(case: Case) -> None:
    """Short ones with pauses, so that the engine cores pause and begin again, at every moment of each other."""
    chooser = random.Random(3)
    asked = prompts(amount(8, thorough=12), seed=8)

    async def one(number: int) -> RequestOutput:
        await asyncio.sleep(chooser.random() * 0.3)
        # Whether a wave runs or none does.
        await case.engine.check_health()
        (output,) = await answers(case.engine, [asked[number]], [None])
        return output

    outputs = await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(len(asked)))), DEADLINE)
    for output in outputs:
        check_greedy_output(case.oracle, output)


async def until_idle(engine: AsyncLLM) -> None:
    """Wait for the end of the wave that runs."""

    async def poll() -> None:
        while any(core.engines_running or core.num_running_reqs for core in (await engine.stats()).engines):
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), DEADLINE)


@pytest.mark.parametrize("case", LAST, indirect=True)
async def test_another_user_finds_nothing_to_connect_to_read_plant_or_kill(case: Case) -> None:
    check_closed_to_strangers(case.engine.connection.name, case.watch)
