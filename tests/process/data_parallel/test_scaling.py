"""The number of engine cores in lock step changes in a whole engine with a real model, while it streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nbengine import AsyncLLM, SamplingParams
from nbengine.errors import NBEngineError

PATIENCE = 120.0
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 * n + 1, n + 2, 7]} for n in range(6)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def engine(no_leftovers: None) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        "random-tiny-moe",
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=128,
        enable_expert_parallel=True,
    )
    yield engine
    engine.shutdown()


async def tokens(engine: AsyncLLM, prompt: dict) -> list[int]:
    async for output in engine.generate(prompt, GREEDY):
        last = output
    return last.outputs[0].token_ids


async def test_tokens_stay_the_same_while_cores_with_experts_come_and_go(engine: AsyncLLM) -> None:
    expected = [await tokens(engine, prompt) for prompt in PROMPTS]
    sizes: list[int] = []

    async def keep_asking(n: int) -> int:
        count = 0
        while len(sizes) < 2 or count == 0:
            assert await tokens(engine, PROMPTS[n]) == expected[n], f"{count} after {sizes}"
            count += 1
        assert await tokens(engine, PROMPTS[n]) == expected[n]
        return count

    streams = [asyncio.create_task(keep_asking(n)) for n in range(len(PROMPTS))]
    for size in (2, 1):
        sizes.append(await engine.scale(size, PATIENCE))
    assert min(await asyncio.gather(*streams)) >= 1
    assert sizes == [2, 1]
    with pytest.raises(
        NBEngineError, match="was not scaled: .* at most 8, the number of the model's experts"
    ):
        await engine.scale(9, PATIENCE)
    assert await tokens(engine, PROMPTS[0]) == expected[0]
