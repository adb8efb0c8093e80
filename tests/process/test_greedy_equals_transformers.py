"""Greedy float32 output of the default model is transformers' output, whatever the engine's circumstances."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

import pytest

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams
from tests.support.thorough import amount

CheckTokens = Callable[[list[int], list[int]], None]

TOPICS = ["the sea", "a clock", "bread", "the moon", "an old map", "rain", "a bicycle", "glass"]
TOPICS = amount(TOPICS[:2], thorough=TOPICS)
RAW_PROMPTS = [
    f"{opening} {topic}"
    for opening in ("Once upon a time there was a story about", "def main():\n    # a function about")
    for topic in TOPICS
]
CHATS = [[{"role": "user", "content": f"Write two sentences about {topic}."}] for topic in TOPICS]
MAX_TOKENS = amount(8, thorough=24)
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

pytestmark = pytest.mark.timeout(300)


def check_all(outputs: list[RequestOutput], check: CheckTokens) -> None:
    for output in outputs:
        assert output.finished
        assert output.prompt_token_ids is not None
        check(output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.fixture(
    scope="module", params=amount([16], thorough=[16, 2048]), ids=lambda budget: f"chunks-of-{budget}"
)
def llm(request: pytest.FixtureRequest, no_leftovers_of_module: None) -> Iterator[LLM]:
    """An engine in processes of its own with room for all."""
    with LLM(
        "smollm2-135m",
        dtype="float32",
        max_num_batched_tokens=request.param,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
    ) as engine:
        yield engine


def test_tokens_are_the_same_alone_together_raw_chat_cold_and_warm(
    llm: LLM, assert_greedy: CheckTokens
) -> None:
    alone = llm.generate(RAW_PROMPTS[0], GREEDY, use_tqdm=False)
    check_all(alone, assert_greedy)
    cold = llm.generate(RAW_PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in cold] == RAW_PROMPTS
    check_all(cold, assert_greedy)
    chats = llm.chat(CHATS, GREEDY, use_tqdm=False)
    check_all(chats, assert_greedy)
    warm = llm.chat(CHATS, GREEDY, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in warm)
    assert [o.outputs[0].token_ids for o in warm] == [o.outputs[0].token_ids for o in chats]
    assert llm.reset_prefix_cache()
    cold_again = llm.chat(CHATS[:2], GREEDY, use_tqdm=False)
    assert cold_again[0].num_cached_tokens == 0
    assert [o.outputs[0].token_ids for o in cold_again] == [o.outputs[0].token_ids for o in chats[:2]]
    stats = llm.stats().engines[0]
    assert stats.num_free_blocks == stats.num_blocks


# `test_prompt_embeds_against_transformers.py` has other prompts in chunks, preempted, and whole with room for all.
@pytest.mark.parametrize("budget", amount([2048], thorough=[16, 2048]))
def test_tokens_are_the_same_with_preemption(budget: int, assert_greedy: CheckTokens) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(
        "smollm2-135m",
        dtype="float32",
        max_model_len=160,
        num_gpu_blocks_override=amount(10, thorough=24),
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        multiprocess=False,
    ) as engine:
        outputs = engine.generate(RAW_PROMPTS, params, use_tqdm=False)
        stats = engine.stats().engines[0]
    check_all(outputs, assert_greedy)
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_tokens_are_the_same_with_activations_of_16_bits(assert_greedy: CheckTokens) -> None:
    """The weights stay quantised, as the model's file has them; transformers has their values in float32."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM("smollm2-135m", activation_dtype="int16", max_model_len=160, multiprocess=False) as engine:
        check_all(engine.generate(RAW_PROMPTS, params, use_tqdm=False), assert_greedy)


async def test_tokens_are_the_same_after_random_aborts_of_neighbours(
    llm: LLM, assert_greedy: CheckTokens
) -> None:
    chooser = random.Random(7)
    assert llm.reset_prefix_cache()
    engine = AsyncLLM.attach(llm.llm_engine.connection.name)
    try:

        async def keep(prompt: str) -> RequestOutput:
            async for output in engine.generate(prompt, GREEDY):
                last = output
            return last

        async def abandon(prompt: str) -> int:
            seen = 0
            stop_after = chooser.randrange(1, MAX_TOKENS)
            async with contextlib.aclosing(engine.generate(prompt + " which", GREEDY)) as stream:
                async for _ in stream:
                    seen += 1
                    if seen >= stop_after:
                        break
            return seen

        kept = [asyncio.create_task(keep(prompt)) for prompt in RAW_PROMPTS]
        left = [asyncio.create_task(abandon(prompt)) for prompt in RAW_PROMPTS]
        check_all(await asyncio.gather(*kept), assert_greedy)
        assert all(await asyncio.gather(*left))
        again = await asyncio.gather(*(keep(prompt) for prompt in RAW_PROMPTS[: amount(2, thorough=4)]))
        check_all(list(again), assert_greedy)
        stats = (await engine.stats()).engines[0]
        assert stats.num_running_reqs == 0
        assert stats.num_free_blocks == stats.num_blocks
    finally:
        engine.detach()
