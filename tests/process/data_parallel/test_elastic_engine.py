"""An engine with experts changes its number of engine cores under streaming requests, which do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nbengine import AsyncLLM, SamplingParams
from nbengine.errors import NBEngineError
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount

NUM_STREAMS = amount(24, thorough=64)
NUM_TOKENS = amount(40, thorough=60)
DEADLINE = 120.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def engine(no_leftovers: None) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        "random-tiny-moe",
        dtype="float32",
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_model_len=512,
        num_gpu_blocks_override=1024,
    )
    yield engine
    engine.shutdown()


async def stream(engine: AsyncLLM, number: int) -> list[int]:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    prompt = {"prompt_token_ids": [1 + number] * (3 + number % 30)}
    pieces = [delta.outputs[0].token_ids async for delta in engine.generate(prompt, params)]
    return [token for piece in pieces for token in piece]


async def test_no_stream_is_lost_or_changed_while_the_number_goes_from_2_to_4_to_1(engine: AsyncLLM) -> None:
    async def all_streams() -> list[list[int]]:
        return await asyncio.gather(*(stream(engine, number) for number in range(NUM_STREAMS)))

    expected = await all_streams()
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    is_over = asyncio.Event()

    async def go_on(number: int) -> list[list[int]]:
        answers = [await stream(engine, number)]
        while not is_over.is_set():
            answers.append(await stream(engine, number))
        return answers

    streams = [asyncio.create_task(go_on(number)) for number in range(NUM_STREAMS)]
    for size in (4, 1):
        assert await asyncio.wait_for(engine.scale(size), DEADLINE) == size
        # Everybody has something under way with the new number, too.
        await all_streams()
        assert len((await engine.stats()).engines) == size
    with pytest.raises(
        NBEngineError, match=r"was not scaled: .* at most 8, the number of the model's experts"
    ):
        await engine.scale(9)
    is_over.set()
    for answers, tokens in zip(
        await asyncio.wait_for(asyncio.gather(*streams), DEADLINE), expected, strict=True
    ):
        assert all(answer == tokens for answer in answers)
