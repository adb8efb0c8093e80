"""Pooling over real processes: embeddings stream beside generation, and what ends a request ends it for its caller."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, AsyncLLM, PoolingParams, SamplingParams
from nbengine.errors import EngineDeadError, InvalidArgumentError, InvalidTypeError, RequestError
from tests.process.client.conftest import left_idle

StartAsync = Callable[..., AsyncLLM]
TINY: dict[str, Any] = {"model": "random-tiny", "num_gpu_blocks_override": 64, "max_num_batched_tokens": 32}
PROMPTS = [
    "hello",
    "a somewhat longer prompt, so that it spans more than one block of the cache",
    "東京 🙂",
] * 4
GENERATE = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(no_leftovers_of_module: None) -> Iterator[AsyncLLM]:
    made = AsyncLLM(name="pooling", bound=False, **TINY)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def offline(no_leftovers_of_module: None) -> Iterator[LLM]:
    with LLM(**TINY) as made:
        yield made


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """A real model's engine that the tests share."""
    with left_idle(shared):
        yield shared


async def generated(llm: AsyncLLM, prompt: str) -> list[int]:
    async for output in llm.generate(prompt, GENERATE):
        ids = output.outputs[0].token_ids
    return ids


async def encoded(llm: AsyncLLM, prompt: str, params: PoolingParams) -> np.ndarray:
    outputs = [output async for output in llm.encode(prompt, params)]
    assert len(outputs) == 1
    assert outputs[0].finished
    return outputs[0].outputs.data


async def test_streams_and_vectors_share_an_engine_and_equal_those_of_one_process(llm: AsyncLLM) -> None:
    kinds = [PoolingParams(task="embed", pooling=pooling) for pooling in ("mean", "cls", "last")]
    asked = [(prompt, kind) for prompt in PROMPTS for kind in [*kinds, PoolingParams(task="encode")]]
    alone = await asyncio.gather(*(generated(llm, prompt) for prompt in PROMPTS))
    together, vectors = await asyncio.gather(
        asyncio.gather(*(generated(llm, prompt) for prompt in PROMPTS)),
        asyncio.gather(*(encoded(llm, prompt, kind) for prompt, kind in asked)),
    )
    assert together == alone
    with LLM(multiprocess=False, **TINY) as offline:
        outputs = offline.encode(
            [prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False
        )
    for vector, output in zip(vectors, outputs, strict=True):
        np.testing.assert_allclose(vector, output.outputs.data, rtol=0, atol=1e-5)
    one = await llm.embed(PROMPTS[0], PoolingParams(pooling="mean"))
    np.testing.assert_allclose(one.outputs.embedding, vectors[0], rtol=0, atol=1e-5)
    (stats,) = (await llm.stats()).engines
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running_reqs == stats.num_waiting_reqs == 0


async def test_aborts_refusals_and_the_engines_end_reach_their_caller_alone(start_async: StartAsync) -> None:
    """With the fake executor, which pools nothing: what it is asked for waits until it is ended."""
    llm = start_async(knobs={"step_seconds": 0.02})
    llm.input_processor.pooling.supported_tasks = ("generate", "embed")
    # The engine, which knows its model best, refuses the task; generation beside it goes on.
    tokens, refused = await asyncio.gather(
        generated(llm, "abc"), llm.embed("abc", PoolingParams(pooling="mean")), return_exceptions=True
    )
    assert len(tokens) == 20
    assert isinstance(refused, RequestError)
    assert "cannot be asked to embed" in str(refused)


async def test_an_abort_and_a_cancelled_task_end_the_request_in_the_engine(llm: AsyncLLM) -> None:
    # Long prompts behind a busy engine: none of them is done when it is ended.
    busy = [asyncio.create_task(generated(llm, prompt)) for prompt in PROMPTS]
    prompt = {"prompt_token_ids": [1] * 500}
    aborted = asyncio.create_task(llm.embed(prompt, PoolingParams(), "mine"))
    cancelled = asyncio.create_task(llm.embed(prompt))
    await asyncio.sleep(0)
    # All has been asked for, and nothing more is computed until both have ended.
    await llm.pause_generation("keep")
    await llm.abort("mine")
    with pytest.raises(RequestError, match="request mine was aborted"):
        await aborted
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await llm.resume_generation()
    await asyncio.gather(*busy)
    (stats,) = (await llm.stats()).engines
    assert stats.num_running_reqs == stats.num_waiting_reqs == 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    ("how", "ended_by"),
    [("pause", "paused"), ("sleep", "put to sleep")],
)
def test_vectors_that_another_client_ends_say_how_and_later_ones_come(
    offline: LLM, how: str, ended_by: str
) -> None:
    other = AsyncLLM.attach(offline.llm_engine.connection.name)
    control = other.control
    try:
        control.pause_generation("keep")
        with ThreadPoolExecutor(1) as pool:
            vectors = pool.submit(offline.embed, PROMPTS[:2], use_tqdm=False)
            wait_for(lambda: control.stats().engines[0].num_waiting_reqs == 2, "the requests")
            if how == "pause":
                control.pause_generation("abort")
            else:
                control.sleep(1, "abort")
            with pytest.raises(
                RequestError, match=f"it was aborted: the engine was {ended_by} with mode='abort'"
            ):
                vectors.result(60)
            later = pool.submit(offline.embed, PROMPTS[0], use_tqdm=False)
            wait_for(lambda: control.stats().engines[0].num_waiting_reqs == 1, "the later request")
            if how == "sleep":
                control.wake_up()
            control.resume_generation()
            assert len(later.result(60)[0].outputs.embedding) > 1
    finally:
        other.detach()


EXIT = """
import atexit, warnings
warnings.simplefilter("error")

@atexit.register  # the last to run: what nbengine registers comes before it
def at_the_very_end():
    assert llm.engine_core.loop_thread.loop.is_closed()
    asyncio.run(stream.aclose())
    llm.abort_soon("0")
    assert vector.cancel()
    print("done", flush=True)

import asyncio
from nbengine import AsyncLLM, PoolingParams, SamplingParams

async def begin():
    stream = llm.generate("abc", SamplingParams(max_tokens=900, ignore_eos=True))
    await anext(stream)
    await llm.pause_generation("keep")
    return stream, llm.submit_pooling("abc", PoolingParams(task="embed"))

llm = AsyncLLM.attach("pooling")
loop = asyncio.new_event_loop()
stream, vector = loop.run_until_complete(begin())
loop.close()
"""


def test_what_is_aborted_at_the_interpreters_exit_after_the_end_of_the_loop_says_nothing(
    llm: AsyncLLM, script: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = script(EXIT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")
    llm.call_utility_blocking("resume_generation")


async def test_after_the_shutdown_a_pooling_request_fails_at_once(start_async: StartAsync) -> None:
    llm = start_async()
    llm.input_processor.pooling.supported_tasks = ("generate", "embed")
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        await llm.embed("x")


async def test_an_encoder_answers_beside_itself_and_refuses_to_generate(no_leftovers: None) -> None:
    llm = AsyncLLM("all-minilm-l6-v2")
    try:
        outputs = await asyncio.gather(*(llm.embed(prompt) for prompt in PROMPTS))
        lengths = {round(float(np.linalg.norm(output.outputs.embedding)), 5) for output in outputs}
        assert lengths == {1.0}
        assert outputs[0].outputs.embedding == pytest.approx(outputs[3].outputs.embedding, abs=1e-5)
        with pytest.raises(InvalidArgumentError, match="task must be one of embed, score, encode"):
            llm.submit("x")
        with pytest.raises(InvalidTypeError, match="sampling_params must be SamplingParams"):
            llm.submit("x", PoolingParams())  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="pooling_params must be PoolingParams"):
            llm.submit_pooling("x", SamplingParams())  # type: ignore[arg-type]
        (stats,) = (await llm.stats()).engines
        assert stats.num_blocks == stats.num_waiting_reqs == stats.num_running_reqs == 0
    finally:
        llm.shutdown()
