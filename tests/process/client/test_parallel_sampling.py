"""Several completions and log probabilities through every client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from nbengine.outputs import Logprob
from nbengine.sampling_params import RequestOutputKind
from tests.process.client.conftest import fake_options

StartLLM = Callable[..., LLM]
StartAsync = Callable[..., AsyncLLM]

PROMPT = list(range(1, 101))
BLOCK_SIZE = 16
NUM_PROMPT_BLOCKS = 7
"""Of which the last is not full."""
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"n": 4, "max_tokens": 5, "ignore_eos": True, **options})


def used_blocks(llm: LLM) -> int:
    (engine,) = llm.stats().engines
    return engine.num_blocks - engine.num_free_blocks


@pytest.mark.parametrize("multiprocess", [False, True])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_completions_come_together_and_share_the_prompts_blocks(
    start_llm: StartLLM, multiprocess: bool, enable_prefix_caching: bool
) -> None:
    llm = start_llm(multiprocess=multiprocess, enable_prefix_caching=enable_prefix_caching)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params(), use_tqdm=False)
    assert [(c.index, c.token_ids) for c in output.outputs] == [(i, list(range(101, 106))) for i in range(4)]
    (engine,) = llm.stats().engines
    assert engine.num_free_blocks == engine.num_blocks
    shared = 3 * (NUM_PROMPT_BLOCKS - 1) * BLOCK_SIZE if enable_prefix_caching else 0
    assert engine.prefix_cache_hits == shared
    assert output.num_cached_tokens == 0
    if not multiprocess:
        engine_loop = llm.llm_engine
        engine_loop.add_request("r", {"prompt_token_ids": [0, *PROMPT]}, params())
        engine_loop.step()
        own = 1 if enable_prefix_caching else NUM_PROMPT_BLOCKS
        assert used_blocks(llm) == (NUM_PROMPT_BLOCKS - 1) * enable_prefix_caching + 4 * own
        engine_loop.abort_request("r")
        assert used_blocks(llm) == 0
        assert not engine_loop.has_unfinished_requests()


@pytest.mark.parametrize("multiprocess", [False, True])
def test_log_probabilities_come_with_the_tokens_they_belong_to(
    start_llm: StartLLM, multiprocess: bool
) -> None:
    llm = start_llm(multiprocess=multiprocess, max_num_batched_tokens=32)
    tokenizer = llm.get_tokenizer()
    prompt = {"prompt_token_ids": PROMPT[:40]}
    (output,) = llm.generate(prompt, params(n=2, logprobs=2, prompt_logprobs=0), use_tqdm=False)
    for completion in output.outputs:
        assert completion.cumulative_logprob == -sum(range(41, 46))
        assert completion.logprobs == [
            {token: Logprob(-float(token), token + 1, tokenizer.decode([token])) for token in (sampled, 0, 1)}
            for sampled in range(41, 46)
        ]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:] if entry] == [
        [token] for token in PROMPT[1:40]
    ]
    (plain,) = llm.generate(prompt, params(n=1), use_tqdm=False)
    assert plain.prompt_logprobs is None
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


async def test_streams_of_every_kind_say_the_same(start_async: StartAsync) -> None:
    llm = start_async(knobs={"step_seconds": 0.02})
    outputs: dict[RequestOutputKind, list[RequestOutput]] = {}
    for kind in RequestOutputKind:
        options = params(output_kind=kind, max_tokens=20, logprobs=1, prompt_logprobs=1)
        stream = llm.generate({"prompt_token_ids": PROMPT}, options)
        outputs[kind] = [output async for output in stream]
        assert [output.finished for output in outputs[kind]] == [False] * (len(outputs[kind]) - 1) + [True]
    (final,) = outputs[FINAL_ONLY]
    assert outputs[CUMULATIVE][-1].outputs == final.outputs
    # One that has ended before it is read comes in one piece.
    stream = llm.generate({"prompt_token_ids": PROMPT}, params(output_kind=CUMULATIVE, max_tokens=400))
    assert not (await anext(stream)).finished
    await stream.aclose()
    for completion in final.outputs:
        deltas = [c for output in outputs[DELTA] for c in output.outputs if c.index == completion.index]
        assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [entry for delta in deltas for entry in delta.logprobs or ()] == completion.logprobs
    prompts = [output.prompt_logprobs for output in outputs[DELTA] if output.prompt_logprobs is not None]
    assert prompts == [final.prompt_logprobs]
    assert all(output.prompt_logprobs == final.prompt_logprobs for output in outputs[CUMULATIVE])


async def test_an_abort_or_a_closed_stream_ends_all_completions_at_the_engine(
    start_async: StartAsync,
) -> None:
    llm = start_async(knobs={"step_seconds": 0.03})
    endless = params(max_tokens=400)
    stream = llm.generate({"prompt_token_ids": [5]}, endless, "mine")
    first = await anext(stream)
    assert not first.finished
    # They are sent one by one, and the first may run before the others have come.
    async with asyncio.timeout(60):
        while [engine.num_running_reqs for engine in (await llm.stats()).engines] != [4]:
            await asyncio.sleep(0.01)
    await llm.abort("mine")
    last = [output async for output in stream][-1]
    assert [completion.finish_reason for completion in last.outputs] == ["abort"] * 4
    await idle(llm)
    stream = llm.generate({"prompt_token_ids": [5]}, endless)
    await anext(stream)
    await stream.aclose()
    await idle(llm)


async def test_an_engine_from_its_arguments_takes_several_aborts_at_once(
    started_clients: list[AsyncLLM], start_async: StartAsync
) -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(**fake_options(knobs={"step_seconds": 0.03})))
    started_clients.append(llm)
    streams = [llm.generate({"prompt_token_ids": [5]}, params(max_tokens=400), name) for name in "abc"]
    for stream in streams:
        await anext(stream)
    await llm.abort(["a", "c"])
    for stream in (streams[0], streams[2]):
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
    assert not (await anext(streams[1])).finished
    await streams[1].aclose()
    await idle(llm)


async def idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while (await llm.stats()).engines_running:
            await asyncio.sleep(0.01)


def test_a_stop_string_ends_every_completion_at_the_engine_too(start_llm: StartLLM) -> None:
    llm = start_llm(knobs={"step_seconds": 0.01})
    first = llm.get_tokenizer().encode("a")[0]
    (output,) = llm.generate(
        {"prompt_token_ids": [first]}, params(stop=["de"], max_tokens=200), use_tqdm=False
    )
    assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [("bc", "stop", "de")] * 4
    assert [len(c.token_ids) for c in output.outputs] == [4] * 4
    wait_for(lambda: used_blocks(llm) == 0, "the end of the stopped completions")
