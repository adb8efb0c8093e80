"""Several engine cores behind one client: who gets a request, and who is told of its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from process_support.raw_client import DEADLINE

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams
from nbengine.errors import InvalidArgumentError, InvalidTypeError, UtilityError
from nbengine.sampling_params import RequestOutputKind
from tests.process.client.conftest import left_idle
from tests.support.thorough import amount

StartAsync = Callable[..., AsyncLLM]

DELTA = RequestOutputKind.DELTA
FOREVER = 400
NUM_STREAMS = amount(300, thorough=600)


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there no step of the shared engine ends."""
    return tmp_path_factory.mktemp("pace") / "hold"


@pytest.fixture(scope="module")
def shared_async(start_shared: Callable[..., AsyncLLM], hold: Path) -> AsyncLLM:
    return start_shared(AsyncLLM, data_parallel_size=2, knobs={"step_seconds": 0.03, "hold": str(hold)})


@pytest.fixture(scope="module")
def shared_llm(start_shared: Callable[..., LLM]) -> LLM:
    return start_shared(LLM, data_parallel_size=2, knobs={"step_seconds": 0.03})


@pytest.fixture
def llm(shared_async: AsyncLLM) -> Iterator[AsyncLLM]:
    """Two engine cores that are shared by the tests that leave them as they are."""
    with left_idle(shared_async):
        yield shared_async


@pytest.fixture
def offline(shared_llm: LLM) -> Iterator[LLM]:
    """Two engine cores of a blocking frontend, shared likewise."""
    with left_idle(shared_llm):
        yield shared_llm


def params(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def tokens(first: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [first]}


def counted_from(first: int, count: int = 20) -> list[int]:
    return [token % 260 for token in range(first + 1, first + 1 + count)]


async def collect(
    llm: AsyncLLM, first: int, sampling_params: SamplingParams | None = None, rank: int | None = None
) -> list[int]:
    seen: list[int] = []
    sampling_params = sampling_params or params(output_kind=DELTA)
    async for output in llm.generate(tokens(first), sampling_params, data_parallel_rank=rank):
        seen += output.outputs[0].token_ids
    return seen


async def begin(llm: AsyncLLM, rank: int | None = None) -> AsyncGenerator[RequestOutput, None]:
    """A stream that has begun, and would go on for long."""
    stream = llm.generate(tokens(1), params(FOREVER), data_parallel_rank=rank)
    await anext(stream)
    return stream


async def load(llm: AsyncLLM) -> list[int]:
    """Unfinished requests of each rank, as the engine cores say."""
    return [engine.num_running_reqs + engine.num_waiting_reqs for engine in (await llm.stats()).engines]


async def until_load(llm: AsyncLLM, expected: list[int]) -> None:
    end = time.monotonic() + DEADLINE
    while (seen := await load(llm)) != expected:
        assert time.monotonic() < end, f"load {seen}, not {expected}"
        await asyncio.sleep(0.01)


async def test_an_explicit_rank_is_obeyed_and_a_wrong_one_is_refused_before_anything_is_sent(
    llm: AsyncLLM,
) -> None:
    for rank in (1, 0, 1, 1):
        before = (await llm.stats()).engines
        assert await collect(llm, 7, rank=rank) == counted_from(7)
        after = (await llm.stats()).engines
        worked = [a.step_counter > b.step_counter for a, b in zip(after, before, strict=True)]
        assert worked == [other == rank for other in range(2)]
        assert [engine.num_dummy_steps for engine in after] == [0, 0], (
            "a model without experts knows no waves"
        )
    for wrong in (2, -1):
        with pytest.raises(InvalidArgumentError, match=r"data_parallel_rank must be .*\(0, 1\)"):
            llm.submit(tokens(1), data_parallel_rank=wrong)
    with pytest.raises(InvalidTypeError, match="data_parallel_rank"):
        llm.submit(tokens(1), data_parallel_rank="1")  # type: ignore[arg-type]
    assert llm.engine_core.cores.router.num_in_flight == 0


async def test_an_abort_reaches_the_rank_that_has_the_request_and_only_that_one(
    llm: AsyncLLM,
) -> None:
    streams = [await begin(llm, rank) for rank in (0, 0, 1, 1)]
    assert await load(llm) == [2, 2]
    await streams[2].aclose()
    await until_load(llm, [2, 1])
    await streams[0].aclose()
    await streams[1].aclose()
    await until_load(llm, [0, 1])
    assert (await anext(streams[3])).outputs[0].finish_reason is None
    await streams[3].aclose()
    await until_load(llm, [0, 0])


async def test_requests_that_come_at_once_are_spread_evenly(llm: AsyncLLM, hold: Path) -> None:
    # The first outputs of a rank, which make it look less busy, would come in the middle of them.
    hold.touch()
    try:
        beginning = [asyncio.create_task(begin(llm)) for _ in range(10)]
        async with asyncio.timeout(60):
            while llm.engine_core.cores.router.num_in_flight < 10:
                await asyncio.sleep(0.01)
    finally:
        hold.unlink()
    streams = await asyncio.gather(*beginning)
    assert await load(llm) == [5, 5]
    await asyncio.gather(*(stream.aclose() for stream in streams))


async def test_two_clients_share_the_ranks_by_the_statistics(llm: AsyncLLM) -> None:
    other = AsyncLLM.attach(llm.name)
    try:
        mine = [await begin(llm, 0) for _ in range(4)]
        # The other client knows of them from the coordinator alone.
        balancer = other.engine_core.cores.router.balancer
        wait_for(lambda: balancer.score(0) >= 4, "statistics of the other client's requests")
        theirs = [await begin(other) for _ in range(4)]
        assert await load(llm) == [4, 4]
        await asyncio.gather(*(stream.aclose() for stream in [*mine, *theirs]))
    finally:
        other.detach()


async def test_a_client_bound_to_a_rank_sends_everything_there(llm: AsyncLLM) -> None:
    bound = AsyncLLM.attach(llm.name, data_parallel_rank=1)
    try:
        streams = await asyncio.gather(*(begin(bound) for _ in range(5)))
        assert await load(bound) == [0, 5]
        with pytest.raises(InvalidArgumentError, match=r"rank of the engine \(1\), got 0"):
            bound.submit(tokens(1), data_parallel_rank=0)
        await asyncio.gather(*(stream.aclose() for stream in streams))
    finally:
        bound.detach()
    with pytest.raises(InvalidArgumentError, match=r"\(0, 1\), got 2"):
        AsyncLLM.attach(llm.name, data_parallel_rank=2)


def test_llm_over_two_ranks_answers_in_prompt_order(offline: LLM) -> None:
    llm = offline
    lengths = list(itertools.islice(itertools.cycle((30, 3, 1, 17)), 40))
    prompts = [{"prompt_token_ids": [first]} for first in range(40)]
    outputs = llm.generate(prompts, [params(length) for length in lengths], use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [counted_from(first, length) for first, length in enumerate(lengths)]
    engines = llm.stats().engines
    assert [engine.engine_index for engine in engines] == [0, 1]
    assert all(engine.step_counter > 0 for engine in engines)


def test_an_interrupt_aborts_the_requests_at_every_rank(offline: LLM) -> None:
    llm = offline

    def busy() -> list[bool]:
        return [engine.num_running_reqs > 0 for engine in llm.stats().engines]

    def interrupt_when_running() -> None:
        wait_for(lambda: all(busy()), "running requests")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_when_running)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([tokens(1)] * 4, params(FOREVER), use_tqdm=False)
    interrupter.join()
    wait_for(lambda: not any(busy()), "the end of the aborted requests")
    (output,) = llm.generate(tokens(7), params(), use_tqdm=False)
    assert output.outputs[0].token_ids == counted_from(7)


def test_utilities_concern_all_ranks(offline: LLM) -> None:
    llm = offline
    engine = llm.llm_engine
    for _ in range(2):
        engine.add_request("r", tokens(5), params(FOREVER))
    with pytest.raises(UtilityError, match=r"engine core 0: .*unfinished"):
        engine.sleep()
    engine.abort_all()
    wait_for(lambda: not llm.stats().engines_running, "idle ranks")
    engine.sleep(level=2)
    assert [core.sleep_level for core in llm.stats().engines] == [2, 2]
    engine.wake_up(["weights"])
    assert engine.is_sleeping()
    engine.wake_up()
    assert [core.sleep_level for core in llm.stats().engines] == [0, 0]
    engine.pause_generation("keep")
    assert [core.is_paused for core in llm.stats().engines] == [True, True]
    engine.resume_generation()
    assert [core.is_paused for core in llm.stats().engines] == [False, False]
    assert engine.reset_prefix_cache()
    engine.start_profile()
    assert engine.stop_profile().num_steps == 6
    assert engine.get_supported_tasks() == ("generate",)


async def test_a_sleep_that_one_rank_refuses_leaves_all_awake(llm: AsyncLLM) -> None:
    stream = await begin(llm, 1)
    with pytest.raises(UtilityError, match=r"engine core 1: .*unfinished"):
        await llm.sleep()
    assert await collect(llm, 7, rank=0) == counted_from(7)
    await stream.aclose()


async def test_128_streams_over_four_ranks_are_answered_whole_and_none_stays_counted(
    start_async: StartAsync,
) -> None:
    """The balance of work is tested in `tests/unit/client/test_load_balancer.py` and measured by
    `benchmarks/bench_data_parallel.py`: here it would depend on which process gets a processor."""
    llm = start_async(
        data_parallel_size=4, knobs={"step_seconds": 0.005}, max_num_seqs=16, num_gpu_blocks_override=512
    )
    chance = random.Random(5)
    lengths = [100 if chance.random() < 0.2 else 20 for _ in range(NUM_STREAMS)]
    names = iter(range(len(lengths)))

    async def stream() -> None:
        for name in names:
            answer: list[int] = []
            wanted = params(lengths[name], output_kind=DELTA)
            async for output in llm.generate(tokens(name % 260), wanted, str(name)):
                answer += output.outputs[0].token_ids
            assert answer == counted_from(name % 260, lengths[name])

    await asyncio.gather(*(stream() for _ in range(128)))
    await until_load(llm, [0] * 4)
    engines = (await llm.stats()).engines
    assert min(engine.num_generation_tokens for engine in engines) > 0
    assert sum(engine.num_generation_tokens for engine in engines) == sum(lengths)
    balancer = llm.engine_core.cores.router.balancer
    end = time.monotonic() + DEADLINE
    while scores := [score for score in map(balancer.score, balancer.ranks) if score]:
        assert time.monotonic() < end, f"idle ranks have scores: {scores}"
        await asyncio.sleep(0.01)
