"""The frontends over a real model: `random-tiny`, in processes of its own and in one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.sampling_params import RequestOutputKind

PROMPTS = ["hello", "a somewhat longer prompt, so that it spans more than one block of the cache", "東京 🙂"]
OPTIONS = {"model": "random-tiny", "num_gpu_blocks_override": 64}
PARAMS = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def llm(no_leftovers: None) -> Iterator[AsyncLLM]:
    made = AsyncLLM(name="tiny", bound=False, **OPTIONS)  # type: ignore[arg-type]
    yield made
    made.shutdown()


async def stream(engine: AsyncLLM, prompt: str) -> tuple[list[int], str]:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **PARAMS)  # type: ignore[arg-type]
    ids: list[int] = []
    text = ""
    async for output in engine.generate(prompt, params):
        ids += output.outputs[0].token_ids
        text += output.outputs[0].text
    return ids, text


async def all_streams(engine: AsyncLLM) -> list[tuple[list[int], str]]:
    return list(await asyncio.gather(*(stream(engine, prompt) for prompt in PROMPTS)))


def test_streams_attachments_and_the_in_process_engine_agree_token_for_token(llm: AsyncLLM) -> None:
    with LLM(multiprocess=False, **OPTIONS) as offline:  # type: ignore[arg-type]
        outputs = offline.generate(PROMPTS, SamplingParams(**PARAMS), use_tqdm=False)  # type: ignore[arg-type]
        expected = [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]
    streamed = asyncio.run(all_streams(llm))
    other = AsyncLLM.attach("tiny")
    assert asyncio.run(all_streams(other)) == streamed
    other.detach()
    assert streamed == expected
    tokenizer = llm.get_tokenizer()
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in streamed] == [
        text for _, text in streamed
    ]
    (engine,) = llm.stats_blocking().engines
    assert engine.num_free_blocks == engine.num_blocks
    assert engine.prefix_cache_hits > 0


def test_requests_without_a_seed_repeat_with_the_engines_seed(no_leftovers: None) -> None:
    def sampled(seed: int, *, multiprocess: bool) -> list[list[int]]:
        params = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
        with LLM(seed=seed, multiprocess=multiprocess, dtype="float32", **OPTIONS) as llm:  # type: ignore[arg-type]
            # The weights of random-tiny follow the seed too: another seed is another model.
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    first = sampled(3, multiprocess=True)
    assert sampled(3, multiprocess=False) == first
    assert len({tuple(ids) for ids in first}) == len(PROMPTS)
