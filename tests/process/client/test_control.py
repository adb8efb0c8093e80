"""Pausing, sleeping, profiling: through every client, over real processes, and when these are killed meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.errors import EngineDeadError, InvalidArgumentError, NBEngineError, UtilityError
from nbengine.frontend.control import Control
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.runtime.connection import connection_file
from nbengine.sampling_params import RequestOutputKind
from tests.process.client.conftest import left_idle
from tests.support.thorough import amount

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
PROMPT = {"prompt_token_ids": [5]}
LONG = SamplingParams(max_tokens=300, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
EXPECTED = [(5 + n) % 260 for n in range(1, 301)]
SLOW = {"step_seconds": 0.002}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, a step of the engine takes a fifth of a second, and no stream ends."""
    return tmp_path_factory.mktemp("pace") / "slow"


@pytest.fixture(scope="module")
def shared_async(start_shared: Callable[..., AsyncLLM], slow: Path) -> AsyncLLM:
    return start_shared(AsyncLLM, bound=False, knobs={**SLOW, "slow": str(slow)})


@pytest.fixture(scope="module")
def shared_llm(start_shared: Callable[..., LLM]) -> LLM:
    return start_shared(LLM)


@pytest.fixture
def llm(shared_async: AsyncLLM) -> Iterator[AsyncLLM]:
    """An engine that is shared by the tests that leave it as it is."""
    with left_idle(shared_async):
        yield shared_async


@pytest.fixture(params=["LLM", "LLM in this process", "LLMEngine", "AsyncLLM"])
def control(
    request: pytest.FixtureRequest, llm: AsyncLLM, shared_llm: LLM, start_llm: StartLLM
) -> Iterator[Control]:
    """The blocking utilities of each frontend, and so of each client."""
    if request.param == "AsyncLLM":
        yield llm.control
    elif request.param == "LLM in this process":
        yield start_llm(multiprocess=False)
    else:
        with left_idle(shared_llm):
            yield shared_llm.llm_engine if request.param == "LLMEngine" else shared_llm


def test_every_utility_works_through_every_client(control: Control, tmp_path: Path) -> None:
    assert control.get_supported_tasks() == ("generate",)
    assert control.reset_prefix_cache() is True
    assert control.reset_prefix_cache(reset_running_requests=True) is True
    control.pause_generation("keep", clear_cache=False)
    assert control.is_paused()
    control.resume_generation()
    assert not control.is_paused()
    control.pause()
    control.resume()
    control.sleep()
    assert control.is_sleeping()
    control.wake_up(["weights"])
    assert control.is_sleeping()
    control.wake_up()
    assert not control.is_sleeping()
    control.start_profile(str(tmp_path))
    assert control.stop_profile().path == "trace"
    for call in (
        lambda: control.sleep(3),
        lambda: control.pause("slowly"),
        lambda: control.wake_up(["kv"]),
        lambda: control.wake_up("kv_cache"),
        lambda: control.start_profile(max_steps=0),
    ):
        with pytest.raises(InvalidArgumentError):
            call()


async def test_every_utility_can_be_awaited(llm: AsyncLLM, tmp_path: Path) -> None:
    assert await llm.get_supported_tasks() == ("generate",)
    assert await llm.reset_prefix_cache() is True
    await llm.pause_generation("wait")
    assert await llm.is_paused()
    await llm.resume_generation()
    assert not await llm.is_paused()
    await llm.sleep(2)
    assert await llm.is_sleeping()
    assert (await llm.stats()).engines[0].is_sleeping
    await llm.wake_up()
    assert not await llm.is_sleeping()
    await llm.start_profile(str(tmp_path))
    assert (await llm.stop_profile()).num_steps == 3


async def test_a_request_that_waits_has_its_place_in_the_queue(llm: AsyncLLM) -> None:
    llm.control.pause_generation("keep")
    first, pair, last = [llm.submit(PROMPT, SamplingParams(max_tokens=5, n=n)) for n in (1, 2, 1)]
    places = [llm.place_within([c.engine_request_id], 60) for c in (first, pair, last)]
    # The second one has two completions, which both come before the third.
    assert [(place.rank, place.num_ahead) for place in places if place is not None] == [
        (0, 0),
        (0, 1),
        (0, 3),
    ]
    await llm.abort(first.request_id)
    place = llm.place_within([last.engine_request_id, pair.engine_request_id], 60)
    assert place is not None
    assert place.num_ahead == 0
    llm.control.resume_generation()
    while not (await last.get()).finished:
        pass
    assert llm.place_within([last.engine_request_id], 60) is None


def test_in_this_process_a_request_cannot_wait_for_what_nobody_would_do(start_llm: StartLLM) -> None:
    llm = start_llm(multiprocess=False)
    llm.sleep()
    with pytest.raises(NBEngineError, match=r"wake_up\(\) first"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.wake_up()
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == EXPECTED[:5]


def test_in_this_process_a_pause_that_waits_runs_the_steps_it_waits_for(start_llm: StartLLM) -> None:
    engine = start_llm(multiprocess=False).llm_engine
    engine.add_request("r", PROMPT, GREEDY)
    engine.step()
    engine.pause_generation("wait")
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        tokens = [*tokens, *(output.outputs[0].token_ids for output in engine.step())][-1]
    assert tokens == EXPECTED[:5]


@pytest.mark.parametrize(
    ("hold", "go_on", "warning"),
    [
        ("sleep", "wake_up", "sleeps, so that requests wait: wake_up() lets them go on"),
        ("pause", "resume", "is paused, so that requests wait: resume_generation() lets them go on"),
    ],
)
def test_a_batch_that_waits_for_an_engine_that_is_held_back_says_so(
    shared_llm: LLM, caplog: pytest.LogCaptureFixture, hold: str, go_on: str, warning: str
) -> None:
    with left_idle(shared_llm), ThreadPoolExecutor(1) as pool:
        shared_llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert "requests wait" not in caplog.text
        getattr(shared_llm, hold)()
        outputs = pool.submit(shared_llm.generate, PROMPT, GREEDY, use_tqdm=False)
        wait_for(lambda: "requests wait" in caplog.text, "the warning", 60)
        getattr(shared_llm, go_on)()
        assert outputs.result(60)[0].outputs[0].token_ids == EXPECTED[:5]
    said = [record.getMessage() for record in caplog.records if "requests wait" in record.getMessage()]
    assert said == [f"engine {shared_llm.llm_engine.connection.name} {warning}"]


async def test_a_stream_that_waits_for_an_engine_that_sleeps_says_so(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def read() -> list[int]:
        return [output.outputs[0].token_ids async for output in llm.generate(PROMPT, GREEDY)][-1]

    await llm.sleep()
    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while "requests wait" not in caplog.text:
            await asyncio.sleep(0.01)
    await llm.wake_up()
    assert await asyncio.wait_for(reading, 60) == EXPECTED[:5]
    assert [record.getMessage() for record in caplog.records if "requests wait" in record.getMessage()] == [
        f"engine {llm.name} sleeps, so that requests wait: wake_up() lets them go on"
    ]


class Reader:
    """A stream that is being read, its request sent when this returns; `beginning` is set with its first token."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.beginning = asyncio.Event()
        self.task = asyncio.create_task(self._read(llm.submit(PROMPT, LONG)))

    async def _read(self, collector: RequestOutputCollector) -> None:
        while self.reason is None:
            output = collector.get_nowait() or await collector.get()
            self.tokens += output.outputs[0].token_ids
            self.reason = output.outputs[0].finish_reason
            self.beginning.set()


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 60)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("how", ["pause", "sleep"])
async def test_streams_are_kept_or_ended_and_later_requests_wait(
    llm: AsyncLLM, slow: Path, how: str, mode: str
) -> None:
    other = AsyncLLM.attach(llm.name)
    try:
        slow.touch()
        running = Reader(other)
        await soon(running.beginning.wait())
        if mode == "wait":
            # It waits for the stream's end, whenever that comes.
            slow.unlink()
        await soon(llm.pause_generation(mode) if how == "pause" else llm.sleep(1, mode))
        slow.unlink(missing_ok=True)
        (stats,) = (await llm.stats()).engines
        assert (stats.is_paused, stats.is_sleeping) == (how == "pause", how == "sleep")
        late = Reader(llm)
        await llm.call_utility("ping")
        (stats,) = (await llm.stats()).engines
        assert stats.num_running_reqs == 0
        assert stats.num_waiting_reqs == (2 if mode == "keep" else 1)
        assert stats.num_free_blocks == stats.num_blocks
        if mode != "keep":
            await soon(running.task)
            assert running.reason == {"abort": "abort", "wait": "length"}[mode]
        assert late.tokens == []
        await soon(llm.resume_generation() if how == "pause" else llm.wake_up())
        await soon(asyncio.gather(late.task, running.task))
        assert late.tokens == EXPECTED
        assert running.tokens == EXPECTED[: len(running.tokens)]
        assert (running.tokens == EXPECTED) == (mode != "abort")
    finally:
        slow.unlink(missing_ok=True)
        other.detach()


async def test_it_does_not_sleep_over_requests_unless_told_what_to_do_with_them(
    llm: AsyncLLM, slow: Path
) -> None:
    slow.touch()
    try:
        running = Reader(llm)
        await soon(running.beginning.wait())
        with pytest.raises(UtilityError, match="1 unfinished requests are not paused"):
            await llm.sleep()
    finally:
        slow.unlink()
    await soon(running.task)
    assert running.tokens == EXPECTED


async def test_wake_up_can_fail_and_says_why(start_async: StartAsync) -> None:
    llm = start_async(knobs={"fail_wake_up": "does not fit any more"})
    await llm.sleep()
    with pytest.raises(UtilityError, match="does not fit any more"):
        await llm.wake_up()
    assert await llm.is_sleeping()


# Ends.


def assert_nothing_left(llm: AsyncLLM) -> None:
    info = llm.connection
    wait_for(lambda: not session_processes(info), "the end of the engine's processes")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of the run directory")
    wait_for(lambda: not connection_file(info.name).exists(), "the end of the connection file")


@pytest.mark.parametrize("victim", ["core", "host"])
async def test_killed_asleep_it_is_gone_and_who_waits_is_told(start_async: StartAsync, victim: str) -> None:
    llm = start_async(bound=False)
    await llm.sleep(2)
    waiting = Reader(llm)
    await llm.call_utility("ping")
    os.kill(llm.ready.pid if victim == "core" else llm.connection.host_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await soon(waiting.task)
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("how", "drain"),
    amount(
        [("pause", False), ("sleep", True)],
        thorough=list(itertools.product(["pause", "sleep"], [False, True])),
    ),
)
async def test_a_held_engine_ends_when_asked_to_and_so_do_its_requests(
    start_async: StartAsync, how: str, drain: bool
) -> None:
    llm = start_async(bound=False)
    await (llm.pause_generation() if how == "pause" else llm.sleep())
    waiting = Reader(llm)
    await llm.call_utility("ping")
    await soon(asyncio.to_thread(llm.shutdown, drain=drain))
    await asyncio.wait([waiting.task], timeout=60)
    assert waiting.reason == "abort" or isinstance(waiting.task.exception(), EngineDeadError)
    assert_nothing_left(llm)


# A real model.

PROMPTS = ["Hello, my name is", "The capital of France is"]


def rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def test_sleep_gives_memory_back_and_the_tokens_stay_the_same(no_leftovers: None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    with LLM("smollm2-135m", kv_cache_memory_bytes=256 << 20) as llm:
        ready = llm.llm_engine.ready
        whole = ready.kv_cache_bytes + ready.weights_bytes
        expected = tokens(llm)
        llm.sleep(2)
        asleep = rss(ready.pid)
        llm.wake_up()
        assert tokens(llm) == expected
        # The pages of the KV cache are taken in the background.
        wait_for(lambda: rss(ready.pid) - asleep >= 0.97 * whole, "the memory of an engine that is awake", 90)
        awake = rss(ready.pid)
        llm.sleep()
        assert awake - rss(ready.pid) >= 0.9 * ready.kv_cache_bytes
        llm.sleep(2)
        assert awake - rss(ready.pid) >= 0.9 * whole
        llm.wake_up()
        assert tokens(llm) == expected
        assert llm.stats().engines[0].num_free_blocks == ready.num_blocks


def test_a_profile_is_written_where_it_was_asked_for_and_a_kill_leaves_nothing(
    no_leftovers: None, tmp_path: Path
) -> None:
    llm = AsyncLLM(
        "random-tiny", num_gpu_blocks_override=64, bound=False, profile_dir=str(tmp_path / "default")
    )
    try:
        control = llm.control
        control.start_profile()
        collector = llm.submit("hello", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        wait_for(lambda: (output := collector.get_nowait()) and output.finished, "the end of the request")
        report = control.stop_profile()
        assert report.num_steps == 3
        assert "aten::" in report.summary
        assert Path(report.path).parent == tmp_path / "default"
        with gzip.open(report.path) as file:
            assert json.load(file)["traceEvents"]
        control.start_profile(str(tmp_path / "other"))
        assert (tmp_path / "other").is_dir()
        os.kill(llm.ready.pid, signal.SIGKILL)
        assert_nothing_left(llm)
        assert list((tmp_path / "other").iterdir()) == []
    finally:
        llm.shutdown()
