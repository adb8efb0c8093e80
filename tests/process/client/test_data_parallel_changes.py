"""Engine cores that die, come back, join and leave, seen by clients with requests under way."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
import torch
from process_support.engine_under_test import wait_for
from process_support.trace_follower import TraceFollower
from stopping import stop

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams
from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.errors import (
    EngineDeadError,
    InvalidArgumentError,
    NBEngineError,
    NotSupportedError,
    RequestLostError,
    UtilityError,
)
from nbengine.kv_cache.events import KVCacheMirror, KVCacheSnapshot, KVEventBatch
from nbengine.sampling_params import RequestOutputKind

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]

DELTA = RequestOutputKind.DELTA
FOREVER = 400
PATIENCE = 60.0


def params(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def tokens(first: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [first]}


def counted_from(first: int, count: int = 20) -> list[int]:
    return [token % 260 for token in range(first + 1, first + 1 + count)]


async def collect(llm: AsyncLLM, first: int, max_tokens: int = 20, rank: int | None = None) -> list[int]:
    seen: list[int] = []
    wanted = params(max_tokens, output_kind=DELTA)
    async for output in llm.generate(tokens(first), wanted, data_parallel_rank=rank):
        seen += output.outputs[0].token_ids
    return seen


async def begin(
    llm: AsyncLLM, rank: int | None = None, first: int = 1
) -> AsyncGenerator[RequestOutput, None]:
    """A stream that has begun, and would go on for long."""
    stream = llm.generate(tokens(first), params(FOREVER), data_parallel_rank=rank)
    await anext(stream)
    return stream


async def drain(stream: AsyncGenerator[RequestOutput, None]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


def pid_of(llm: AsyncLLM, rank: int) -> int:
    (found,) = [core.pid for core in llm.connection.ready if core.rank == rank]
    return found


def usable(llm: AsyncLLM) -> list[int]:
    return list(llm.engine_core.cores.router.table.usable)


def in_flight(llm: AsyncLLM) -> int:
    return llm.engine_core.cores.router.num_in_flight


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_for, condition, what, PATIENCE)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file is there no step ends."""
    path = tmp_path / "hold"
    path.touch()
    return path


async def test_requests_without_output_are_sent_elsewhere_when_their_rank_is_killed(
    start_async: StartAsync, hold: Path
) -> None:
    llm = start_async(data_parallel_size=2, knobs={"hold": str(hold), "hidden_size": 64})
    tasks = [asyncio.create_task(collect(llm, first)) for first in range(6)]
    several = SamplingParams(n=3, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    whole = asyncio.create_task(anext(llm.generate(tokens(50), several)))
    # The fake model takes the very last number for the last token.
    embeds = torch.full((2, 64), 70.0)
    final = params(output_kind=RequestOutputKind.FINAL_ONLY)
    embedded = asyncio.create_task(anext(llm.generate({"prompt_embeds": embeds}, final)))
    await until(lambda: in_flight(llm) == 10, "all requests on their way")
    pid = pid_of(llm, 1)
    os.kill(pid, signal.SIGKILL)
    # The rank may be back before this is looked at.
    await until(lambda: usable(llm) == [0] or pid_of(llm, 1) != pid, "news of the death")
    hold.unlink()
    assert await asyncio.gather(*tasks) == [counted_from(first) for first in range(6)]
    assert [completion.token_ids for completion in (await whole).outputs] == [counted_from(50)] * 3
    assert (await embedded).outputs[0].token_ids == counted_from(70)
    assert in_flight(llm) == 0


async def test_streams_of_a_killed_rank_fail_alone_and_the_rank_comes_back(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.03})
    pid = pid_of(llm, 1)
    doomed = await begin(llm, 1)
    lucky = await begin(llm, 0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RequestLostError, match=rf"engine core 1 .*\(pid {pid}\).*SIGKILL") as caught:
        await drain(doomed)
    assert caught.value.rank == 1
    assert (await anext(lucky)).outputs[0].finish_reason is None
    await lucky.aclose()
    await until(lambda: usable(llm) == [0, 1], "the rank's return")
    assert pid_of(llm, 1) != pid
    assert await collect(llm, 9, rank=1) == counted_from(9)
    streams = await asyncio.gather(*(begin(llm) for _ in range(4)))
    assert [engine.num_running_reqs for engine in (await llm.stats()).engines] == [2, 2]
    await asyncio.gather(*(stream.aclose() for stream in streams))


async def test_a_request_for_a_killed_rank_waits_until_that_rank_is_back(
    start_async: StartAsync, hold: Path
) -> None:
    llm = start_async(data_parallel_size=2, knobs={"hold": str(hold)})
    waiting = asyncio.create_task(collect(llm, 5, rank=1))
    await until(lambda: in_flight(llm) == 1, "the request on its way")
    pid = pid_of(llm, 1)
    os.kill(pid, signal.SIGKILL)
    router = llm.engine_core.cores.router
    # It waits no more if the rank is back before this is looked at.
    await until(lambda: router.num_waiting == 1 or pid_of(llm, 1) != pid, "the request waits")
    late = asyncio.create_task(collect(llm, 6, rank=1))
    hold.unlink()
    assert await waiting == counted_from(5)
    assert await late == counted_from(6)
    assert (await llm.stats()).engines[0].step_counter == 0


async def test_a_call_to_a_killed_rank_fails_at_once(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2)
    pid = pid_of(llm, 1)
    stop(pid)
    pending = asyncio.create_task(llm.stats())
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UtilityError, match="stats: engine core 1 has ended"):
        await pending
    asked = [engine.engine_index for engine in (await llm.stats()).engines]
    assert asked == [0] or pid_of(llm, 1) != pid


async def test_a_rank_whose_model_breaks_is_reported_with_its_cause(start_async: StartAsync) -> None:
    knobs = {"fail_at_token": 30, "step_seconds": 0.03, "vocab_size": 100_000}
    llm = start_async(data_parallel_size=2, knobs=knobs)
    # It counts on from there, and never comes to 30.
    lucky = await begin(llm, 0, first=30)
    with pytest.raises(RequestLostError, match="the model broke at token 30"):
        await collect(llm, 20, rank=1)
    assert (await anext(lucky)).outputs[0].finish_reason is None
    await lucky.aclose()
    await until(lambda: usable(llm) == [0, 1], "the rank's return")


async def test_when_the_last_rank_dies_everything_ends_with_one_clear_error(
    start_async: StartAsync, hold: Path
) -> None:
    llm = start_async(data_parallel_size=2, knobs={"hold": str(hold)})
    waiting = [asyncio.create_task(collect(llm, first)) for first in range(4)]
    await until(lambda: in_flight(llm) == 4, "the requests on their way")
    # The host could start one again before the other is killed.
    pids = [pid_of(llm, rank) for rank in (0, 1)]
    stop(llm.connection.host_pid, *pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os.kill(llm.connection.host_pid, signal.SIGCONT)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, EngineDeadError)


async def test_scaling_under_streams_loses_and_repeats_nothing(start_async: StartAsync) -> None:
    llm = start_async(data_parallel_size=2, knobs={"step_seconds": 0.002}, max_num_seqs=8)
    scaled = False

    async def stream(first: int) -> int:
        """Ask for one completion after another until the engine has been scaled, and once more."""
        count = 0
        last_time = False
        while not last_time:
            last_time = scaled
            length = 40 + 7 * (first + count) % 100
            assert await collect(llm, first, length) == counted_from(first, length)
            count += 1
        return count

    subscriber = StatsSubscriber(llm.connection, trace=True)
    trace = TraceFollower(subscriber)
    streams = [asyncio.create_task(stream(first)) for first in range(64)]
    await until(lambda: in_flight(llm) == 64, "all streams")
    assert await llm.scale(4, PATIENCE) == 4
    assert usable(llm) == [0, 1, 2, 3]
    # A rank that has come is told what is wanted, too.
    follow = functools.partial(asyncio.to_thread, trace.read_until)
    await follow(lambda: trace.mirrors.keys() == {0, 1, 2, 3}, "the trace of four ranks")
    await follow(lambda: all(mirror.finished for mirror in trace.mirrors.values()), "requests on all ranks")
    before = (await llm.stats()).engines
    await asyncio.sleep(0.2)
    assert await llm.scale(1, PATIENCE) == 1
    assert usable(llm) == [0]
    scaled = True
    counts = await asyncio.gather(*streams)
    assert min(counts) >= 1
    assert len(before) == 4
    assert in_flight(llm) == 0
    assert llm.engine_core.cores.router.num_waiting == 0
    with pytest.raises(InvalidArgumentError, match=r"\(0\), got 1"):
        llm.submit(tokens(1), data_parallel_rank=1)
    assert await llm.scale(2, PATIENCE) == 2
    assert await collect(llm, 3, rank=1) == counted_from(3)
    await follow(lambda: trace.mirrors[1].incarnation == 1 and trace.mirrors[1].finished, "the new rank 1")
    subscriber.close()


async def test_a_scaling_that_cannot_be_is_an_error(start_async: StartAsync) -> None:
    llm = start_async()
    with pytest.raises(NBEngineError, match="data_parallel_size must be"):
        await llm.scale(0, PATIENCE)
    assert llm.scale_blocking(1, PATIENCE) == 1


def test_llm_scales_too(start_llm: StartLLM) -> None:
    llm = start_llm()
    assert llm.scale(2, PATIENCE) == 2
    assert llm.llm_engine.engine_core.engine_ranks == [0, 1]
    prompts = [{"prompt_token_ids": [first]} for first in range(20)]
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [counted_from(n) for n in range(20)]
    assert llm.scale(1, PATIENCE) == 1
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [counted_from(n) for n in range(20)]


def test_an_engine_in_this_process_is_not_scaled(start_llm: StartLLM) -> None:
    llm = start_llm(multiprocess=False)
    with pytest.raises(NotSupportedError, match="multiprocess=False"):
        llm.scale(2)


async def test_a_follower_of_the_prefix_caches_goes_on_with_a_rank_that_was_started_again(
    start_async: StartAsync,
) -> None:
    llm = start_async(data_parallel_size=2, block_size=4)
    mirrors = {rank: KVCacheMirror() for rank in range(2)}
    with StatsSubscriber(llm.connection, kv_events=True, trace=True) as subscriber:
        trace = TraceFollower(subscriber)

        def follow_until(condition: Callable[[], object]) -> None:
            def step() -> object:
                message = subscriber.poll(0.05)
                trace.take(message)
                if isinstance(message, KVCacheSnapshot | KVEventBatch):
                    assert mirrors[message.engine_index].apply(message)
                return condition()

            wait_for(step, "the followed state", PATIENCE)

        # What ends before the subscription has arrived is in no snapshot.
        await asyncio.to_thread(follow_until, lambda: sorted(trace.mirrors) == [0, 1])
        for rank, first in ((0, 1), (1, 50), (1, 100)):
            await collect(llm, first, rank=rank)
        # 20 tokens fill 5 blocks, but the last is not computed.
        await asyncio.to_thread(follow_until, lambda: [len(m.blocks) for m in mirrors.values()] == [5, 10])
        await asyncio.to_thread(
            follow_until, lambda: [len(trace.mirrors[rank].finished) for rank in range(2)] == [1, 2]
        )
        os.kill(pid_of(llm, 1), signal.SIGKILL)
        await asyncio.to_thread(
            follow_until, lambda: mirrors[1].incarnation == trace.mirrors[1].incarnation == 1
        )
        assert not mirrors[1].blocks
        restarted = trace.mirrors[1]
        assert (len(restarted.finished), len(restarted.steps)) == (0, 0)
        assert not restarted.blocks.cached.any()
        await until(lambda: usable(llm) == [0, 1], "the rank's return")
        for rank in (0, 1):
            await collect(llm, 200, rank=rank)
        await asyncio.to_thread(follow_until, lambda: [len(m.blocks) for m in mirrors.values()] == [10, 5])
        await asyncio.to_thread(
            follow_until,
            lambda: [len(trace.mirrors[rank].finished) for rank in range(2)] == [2, 1],
        )
        assert list(restarted.finished) == [0]
        assert subscriber.num_losses == 0
