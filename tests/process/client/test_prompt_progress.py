"""A prompt that takes several steps: who asked for it hears after each of them how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, InvalidTypeError, PromptProgress, RequestOutputKind, SamplingParams
from tests.process.client.conftest import left_idle

STEP = 16
PROMPT = {"prompt_token_ids": list(range(100)) + list(range(50))}
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def read(parts: list[PromptProgress]) -> list[tuple[int, int, int]]:
    return [(part.num_read_tokens, part.num_cached_tokens, part.num_prompt_tokens) for part in parts]


@pytest.fixture(scope="module")
def llm(start_shared: Callable[..., Any]) -> LLM:
    return start_shared(LLM, max_num_batched_tokens=STEP)


@pytest.fixture(scope="module")
def async_llm(start_shared: Callable[..., Any]) -> AsyncLLM:
    return start_shared(AsyncLLM, max_num_batched_tokens=STEP)


def test_a_batch_is_told_of_each_long_prompt_and_of_what_was_reused(llm: LLM) -> None:
    told: list[PromptProgress] = []
    with left_idle(llm):
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False, on_prompt_progress=told.append)
        assert read(told) == [(end, 0, 150) for end in range(STEP, 150, STEP)]
        assert {part.request_id for part in told} == {output.request_id}
        assert output.metrics.prompt_progress == told[-1]
        assert [part.seconds for part in told] == sorted(part.seconds for part in told)
        told.clear()
        again, short = llm.generate(
            [PROMPT, {"prompt_token_ids": [7, 8]}], ONE, use_tqdm=False, on_prompt_progress=told.append
        )
    # Nine blocks were found, and the rest is done in one step.
    assert told == []
    assert again.num_cached_tokens == 144
    assert short.metrics.prompt_progress is None


def test_what_the_function_raises_ends_the_call_and_leaves_nothing_running(llm: LLM) -> None:
    class Enough(Exception):
        pass

    def refuse(_: PromptProgress) -> None:
        raise Enough

    other = {"prompt_token_ids": list(range(200, 240)) * 3}
    with left_idle(llm):
        with pytest.raises(Enough):
            llm.generate([other, other], ONE, use_tqdm=False, on_prompt_progress=refuse)
        assert llm.generate("go on", ONE, use_tqdm=False)[0].finished
        with pytest.raises(InvalidTypeError, match="on_prompt_progress"):
            llm.generate("x", ONE, on_prompt_progress=1)  # type: ignore[arg-type]


def test_what_the_function_raises_comes_after_the_outputs_that_other_requests_have_got(llm: LLM) -> None:
    class Enough(Exception):
        pass

    def refuse(_: PromptProgress) -> None:
        raise Enough

    engine = llm.llm_engine
    with left_idle(llm):
        many = SamplingParams(temperature=0.0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
        engine.add_request("short", {"prompt_token_ids": [1]}, many)
        texts = engine.step()
        engine.add_request("long", {"prompt_token_ids": [9] * 150}, ONE, on_prompt_progress=refuse)
        refused = 0
        while engine.has_unfinished_requests():
            try:
                texts += engine.step()
            except Enough:
                refused += 1
    assert refused > 1
    short = [output.outputs[0].token_ids for output in texts if output.request_id == "short"]
    assert [token for tokens in short for token in tokens] == list(range(2, 42))


async def test_a_stream_is_told_on_its_own_loop_before_its_first_output(async_llm: AsyncLLM) -> None:
    told: list[PromptProgress] = []
    loops = set()

    def note(part: PromptProgress) -> None:
        told.append(part)
        loops.add(asyncio.get_running_loop())

    with left_idle(async_llm):
        outputs = [output async for output in async_llm.generate(PROMPT, ONE, on_prompt_progress=note)]
        # A reader that is late hears the newest alone.
        ends = [end for end, _, _ in read(told)]
        assert ends
        assert set(ends) <= set(range(STEP, 150, STEP))
        assert ends == sorted(set(ends))
        assert loops == {asyncio.get_running_loop()}
        assert outputs[-1].metrics.prompt_progress is not None
        assert outputs[-1].metrics.prompt_progress.num_read_tokens == 144
        with pytest.raises(InvalidTypeError, match="on_prompt_progress"):
            async for _ in async_llm.generate("x", ONE, on_prompt_progress="x"):  # type: ignore[arg-type]
                pass


async def test_what_the_function_raises_ends_the_stream_and_its_request(async_llm: AsyncLLM) -> None:
    def refuse(_: PromptProgress) -> None:
        raise ZeroDivisionError

    other = {"prompt_token_ids": list(range(200, 240)) * 12}
    with left_idle(async_llm), pytest.raises(ZeroDivisionError):
        async for _ in async_llm.generate(other, ONE, on_prompt_progress=refuse):
            pass
