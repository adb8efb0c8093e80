"""The frontends over a real model: `random-tiny`, in processes of its own and in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.sampling_params import RequestOutputKind

PROMPTS = ["hello", "a somewhat longer prompt, so that it spans more than one block of the cache", "東京 🙂"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm(no_leftovers: None) -> Iterator[AsyncLLM]:
    made = AsyncLLM("random-tiny", num_gpu_blocks_override=64, name="tiny", bound=False)
    yield made
    made.shutdown()


def test_streams_attachments_and_the_offline_api_agree_token_for_token(llm: AsyncLLM) -> None:
    with LLM("random-tiny", num_gpu_blocks_override=64, multiprocess=False) as inproc:
        offline = inproc.generate(PROMPTS, GREEDY, use_tqdm=False)

    async def stream(engine: AsyncLLM, prompt: str) -> tuple[list[int], str]:
        delta = SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        ids: list[int] = []
        text = ""
        async for output in engine.generate(prompt, delta):
            ids += output.outputs[0].token_ids
            text += output.outputs[0].text
        return ids, text

    async def all_streams(engine: AsyncLLM) -> list[tuple[list[int], str]]:
        return list(await asyncio.gather(*(stream(engine, prompt) for prompt in PROMPTS)))

    expected = [(output.outputs[0].token_ids, output.outputs[0].text) for output in offline]
    assert asyncio.run(all_streams(llm)) == expected
    other = AsyncLLM.attach("tiny")
    assert asyncio.run(all_streams(other)) == expected
    other.detach()
    tokenizer = llm.get_tokenizer()
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in expected] == [
        text for _, text in expected
    ]
    (engine,) = llm.stats_blocking().engines
    assert engine.num_free_blocks == engine.num_blocks
    assert engine.prefix_cache_hits > 0
