"""Several engine cores behind one client: who gets a request, and who is told of its end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.sampling_params import RequestOutputKind

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]

DELTA = RequestOutputKind.DELTA
FOREVER = 400


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
    for _ in range(1000):
        if await load(llm) == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"load {await load(llm)}, not {expected}")


async def test_an_explicit_rank_is_obeyed_and_a_wrong_one_is_refused_before_anything_is_sent(
    start_async: StartAsync,
) -> None:
    llm = start_async(data_parallel_size=2)
    for rank in (1, 0, 1, 1):
        before = (await llm.stats()).engines
        assert await collect(llm, 7, rank=rank) == counted_from(7)
        after = (await llm.stats()).engines
        worked = [a.step_counter > b.step_counter for a, b in zip(after, before, strict=True)]
        assert worked == [other == rank for other in range(2)]
    for wrong in (2, -1):
        with pytest.raises(InvalidArgumentError, match=r"data_parallel_rank must be .*\(0, 1\)"):
            llm.submit(tokens(1), data_parallel_rank=wrong)
    with pytest.raises(InvalidTypeError, match="data_parallel_rank"):
        llm.submit(tokens(1), data_parallel_rank="1")  # type: ignore[arg-type]
    assert llm.engine_core.cores.router.num_in_flight == 0


async def test_an_abort_reaches_the_rank_that_has_the_request_and_only_that_one(
    start_async: StartAsync,
) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.005})
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


async def test_requests_that_come_at_once_are_spread_evenly(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.005})
    streams = await asyncio.gather(*(begin(llm) for _ in range(10)))
    assert await load(llm) == [5, 5]
    await asyncio.gather(*(stream.aclose() for stream in streams))


async def test_two_clients_share_the_ranks_by_the_statistics(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.005})
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


async def test_a_client_bound_to_a_rank_sends_everything_there(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.005})
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


def test_llm_over_two_ranks_answers_in_prompt_order(start_llm: StartLLM) -> None:
    llm = start_llm(data_parallel_size=2, knobs={"step_seconds": 0.002})
    lengths = list(itertools.islice(itertools.cycle((30, 3, 1, 17)), 40))
    prompts = [{"prompt_token_ids": [first]} for first in range(40)]
    outputs = llm.generate(prompts, [params(length) for length in lengths], use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [counted_from(first, length) for first, length in enumerate(lengths)]
    engines = llm.stats().engines
    assert [engine.engine_index for engine in engines] == [0, 1]
    assert all(engine.step_counter > 0 for engine in engines)
