"""Clients of engine cores in lock step: a request wakes all of them up, whichever client or core says so
first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from process_support.lock_step_executor import LOCK_STEP_EXECUTOR

from nbengine import LLM, AsyncLLM, SamplingParams
from tests.process.client.conftest import left_idle

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]


def params(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def counted_from(first: int, count: int = 20) -> list[int]:
    return [token % 260 for token in range(first + 1, first + 1 + count)]


async def tokens_of(llm: AsyncLLM, first: int, rank: int | None = None) -> list[int]:
    stream = llm.generate({"prompt_token_ids": [first]}, params(), data_parallel_rank=rank)
    return [output async for output in stream][-1].outputs[0].token_ids


def lock_step_in(directory: Path) -> dict[str, object]:
    """Engine arguments of two ranks in lock step, which meet in a directory."""
    return {
        "model": "random-tiny-moe",
        "data_parallel_size": 2,
        "distributed_executor_backend": LOCK_STEP_EXECUTOR,
        "knobs": {"meeting": str(directory / "meeting")},
    }


@pytest.fixture
def lock_step(tmp_path: Path) -> dict[str, object]:
    return lock_step_in(tmp_path)


@pytest.fixture(scope="module")
def shared(start_shared: Callable[..., AsyncLLM], tmp_path_factory: pytest.TempPathFactory) -> AsyncLLM:
    return start_shared(AsyncLLM, **lock_step_in(tmp_path_factory.mktemp("shared")))


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Two ranks in lock step, for the tests that leave them as they are."""
    with left_idle(shared):
        yield shared


async def test_requests_in_every_state_of_the_waves_are_answered(llm: AsyncLLM) -> None:
    feed = llm.engine_core.cores._feed
    assert feed is not None
    waves = []
    for rank in (0, 1, None, 1):
        assert await tokens_of(llm, 7, rank) == counted_from(7)
        await asyncio.to_thread(wait_for, lambda: not feed.newest.engines_running, "the end of the wave")
        waves.append(feed.newest.current_wave)
    # Each came while all paused, and was a wave of its own.
    assert waves == sorted(set(waves))
    many = await asyncio.gather(*(tokens_of(llm, first) for first in range(30)))
    assert many == [counted_from(first) for first in range(30)]
    stats = await llm.stats()
    assert all(engine.num_dummy_steps > 0 for engine in stats.engines)


async def test_two_clients_wake_the_ranks_up(llm: AsyncLLM) -> None:
    other = AsyncLLM.attach(llm.name, data_parallel_rank=1)
    try:
        for _ in range(5):
            answers = await asyncio.gather(tokens_of(llm, 3, 0), tokens_of(other, 9))
            assert answers == [counted_from(3), counted_from(9)]
    finally:
        other.detach()


def test_llm_gets_every_answer_from_ranks_in_lock_step(
    start_llm: StartLLM, lock_step: dict[str, object]
) -> None:
    llm = start_llm(**lock_step)
    prompts = [{"prompt_token_ids": [first]} for first in range(20)]
    for _ in range(2):
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [counted_from(n) for n in range(20)]


async def test_scaling_in_lock_step_loses_and_repeats_nothing(
    start_async: StartAsync, lock_step: dict[str, object]
) -> None:
    llm = start_async(**lock_step)
    scaled = False

    async def stream(first: int) -> None:
        """One completion after another until the engine has been scaled, and once more."""
        last_time = False
        while not last_time:
            last_time = scaled
            assert await tokens_of(llm, first) == counted_from(first)

    streams = [asyncio.create_task(stream(first)) for first in range(16)]
    assert await llm.scale(4, 60.0) == 4
    assert await tokens_of(llm, 7, 2) == counted_from(7)
    assert await llm.scale(1, 60.0) == 1
    scaled = True
    await asyncio.gather(*streams)
    assert await tokens_of(llm, 7, 0) == counted_from(7)
