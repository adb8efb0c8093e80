"""The streaming frontend over real processes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from process_support.raw_client import DEADLINE

import nbengine
from nbengine import AsyncLLM, SamplingParams
from nbengine.client.engines.directory import count_clients, stop_engine
from nbengine.errors import InvalidArgumentError, NBEngineError, UtilityError
from nbengine.ipc.control_messages import Progress
from nbengine.sampling_params import RequestOutputKind
from tests.process.client.conftest import left_idle

# Each stage of a start is told only where it takes a while.
pytestmark = pytest.mark.fresh_processes

StartAsync = Callable[..., AsyncLLM]
Script = Callable[[str], "subprocess.Popen[str]"]

DELTA = RequestOutputKind.DELTA


def params(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def tokens(first: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [first]}


async def collect(llm: AsyncLLM, first: int, sampling_params: SamplingParams) -> list[int]:
    """All tokens of a request, from its deltas."""
    seen = []
    async for output in llm.generate(tokens(first), sampling_params):
        seen += output.outputs[0].token_ids
    return seen


@pytest.fixture(scope="module")
def shared(start_shared: Callable[..., AsyncLLM]) -> AsyncLLM:
    """An engine that takes long enough for a step to be caught in the middle of a request."""
    return start_shared(AsyncLLM, bound=False, knobs={"step_seconds": 0.02})


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """The shared engine, for the tests that leave it as it is."""
    with left_idle(shared):
        yield shared


async def idle(llm: AsyncLLM) -> None:
    end = time.monotonic() + DEADLINE
    while (await llm.stats()).engines_running:
        assert time.monotonic() < end, "the engine is still busy"
        await asyncio.sleep(0.01)


async def test_a_stream_brings_every_token_once_and_in_order(llm: AsyncLLM) -> None:
    assert await collect(llm, 10, params(output_kind=DELTA)) == list(range(11, 31))
    lengths = [len(o.outputs[0].token_ids) async for o in llm.generate(tokens(10), params())]
    assert lengths[-1] == 20
    assert lengths == sorted(lengths)
    stream = llm.generate(tokens(10), params(400))
    assert len((await anext(stream)).outputs[0].token_ids) < 400
    await stream.aclose()


async def test_tokens_of_an_interval_come_together(llm: AsyncLLM) -> None:
    collector = llm.submit(tokens(10), params(output_kind=DELTA), output_interval=60)
    parts: list[list[int]] = []
    finished = False
    while not finished:
        output = await collector.get()
        parts.append(output.outputs[0].token_ids)
        finished = output.finished
    assert [token for part in parts for token in part] == list(range(11, 31))
    assert parts[0] == [11]
    # An interval may end in between.
    assert len(parts) <= 3
    for wrong in (-1, 61, float("nan")):
        with pytest.raises(InvalidArgumentError, match="output_interval"):
            llm.submit(tokens(10), params(), output_interval=wrong)


async def test_many_requests_share_the_engine(llm: AsyncLLM) -> None:
    firsts = list(range(1, 61))
    results = await asyncio.gather(*(collect(llm, first, params(output_kind=DELTA)) for first in firsts))
    assert results == [list(range(first + 1, first + 21)) for first in firsts]


def test_threads_and_loops_of_any_kind_can_use_it_at_once(llm: AsyncLLM) -> None:
    results: dict[str, list[int]] = {}

    def blocking() -> None:
        collector = llm.submit(tokens(100), params(output_kind=DELTA))
        seen: list[int] = []
        finished = False
        while not finished:
            output = collector.get_blocking(timeout=60)
            seen += output.outputs[0].token_ids
            finished = output.finished
        results["blocking"] = seen

    def own_loop(first: int) -> None:
        results[f"loop {first}"] = asyncio.run(collect(llm, first, params(output_kind=DELTA)))

    threads = [threading.Thread(target=blocking)]
    threads += [threading.Thread(target=own_loop, args=(first,)) for first in (10, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {
        "blocking": list(range(101, 121)),
        "loop 10": list(range(11, 31)),
        "loop 50": list(range(51, 71)),
    }


async def test_closing_a_stream_aborts_its_request_at_the_engine(llm: AsyncLLM) -> None:
    stream = llm.generate(tokens(5), params(400))
    await anext(stream)
    assert (await llm.stats()).engines_running
    await stream.aclose()
    await idle(llm)
    (engine,) = (await llm.stats()).engines
    assert engine.num_free_blocks == engine.num_blocks


async def test_cancelling_the_reading_task_aborts_its_request(llm: AsyncLLM) -> None:
    task = asyncio.create_task(collect(llm, 5, params(400)))
    while not (await llm.stats()).engines_running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(llm)


async def test_an_abort_keeps_what_there_is(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate(tokens(5), params(400), "mine"):
        outputs.append(output)
        if len(outputs) == 3:
            await llm.abort("mine")
    last = outputs[-1]
    assert (last.request_id, last.finished, last.outputs[0].finish_reason) == ("mine", True, "abort")
    count = len(last.outputs[0].token_ids)
    assert last.outputs[0].token_ids == list(range(6, 6 + count))
    await idle(llm)


async def test_a_stop_string_ends_the_request_at_the_engine(llm: AsyncLLM) -> None:
    first = llm.get_tokenizer().encode("a")[0]
    async for output in llm.generate(tokens(first), params(200, stop=["de"])):
        last = output
    assert (last.outputs[0].text, last.outputs[0].stop_reason) == ("bc", "de")
    await idle(llm)


async def test_errors_come_where_the_request_was_made(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt"):
        llm.submit("", params())
    with pytest.raises(UtilityError, match="no utility method"):
        await llm.call_utility("nonsense")
    assert await llm.call_utility("ping") == "pong"
    assert llm.call_utility_blocking("ping", timeout=60) == "pong"


def test_the_start_is_reported_stage_by_stage_on_the_calling_thread(
    start_async: StartAsync, tmp_path: Path
) -> None:
    seen: list[tuple[str, str]] = []
    # A client that attaches late is told of the newest stage alone.
    hold = tmp_path / "hold"
    hold.touch()

    def note(progress: Progress) -> None:
        seen.append((progress.stage, threading.current_thread().name))
        if progress.stage == "load":
            hold.unlink(missing_ok=True)

    llm = start_async(progress=note, name="reported", bound=False, knobs={"hold_load": str(hold)})
    stages = [stage for stage, _ in seen if stage != "fetch"]
    assert list(dict.fromkeys(stages)) == ["load", "profile", "kv"]
    assert stages == sorted(stages, key=["load", "profile", "kv"].index)
    assert {thread for stage, thread in seen if stage != "fetch"} == {"MainThread"}
    assert llm.name == llm.connection.name == "reported"
    assert llm.ready.max_model_len == 512
    assert llm.config.model.resolved
    assert llm.has_chat_template
    assert llm.render_chat([{"role": "user", "content": "hi"}])["prompt"].endswith("assistant\n")


def test_an_engine_outlives_its_detached_client_and_keeps_its_cache(
    start_async: StartAsync, script: Script
) -> None:
    first = start_async(name="kept", bound=False)
    prompt = list(range(1, 60))
    asyncio.run(_finish(first, prompt))
    first.detach()
    first.detach()
    with pytest.raises(NBEngineError, match="detached"):
        first.submit("x", params())
    # Another process, as another kernel would.
    process = script(
        "import asyncio, json\n"
        "from nbengine import AsyncLLM, SamplingParams\n"
        "llm = AsyncLLM.attach('kept')\n"
        "async def main():\n"
        f"    async for out in llm.generate({{'prompt_token_ids': {prompt}}}, SamplingParams(temperature=0)):\n"
        "        last = out\n"
        "    print(json.dumps([last.num_cached_tokens, last.outputs[0].token_ids]))\n"
        "asyncio.run(main())\n"
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert json.loads(out) == [48, list(range(60, 76))]
    again = AsyncLLM.attach("kept")
    assert again.connection.host_alive
    again.shutdown()
    assert not again.connection.host_alive


async def _read(llm: AsyncLLM, prompt: list[int]) -> None:
    async for _ in llm.generate({"prompt_token_ids": prompt}, params()):
        pass


async def _finish(llm: AsyncLLM, prompt: list[int]) -> None:
    await _read(llm, prompt)


async def test_attaching_again_under_a_sessions_name_ends_what_it_had_asked_for(
    llm: AsyncLLM,
) -> None:
    first = AsyncLLM.attach(llm.name, session="notebook")
    stream = first.generate(tokens(5), params(400))
    await anext(stream)
    successor = AsyncLLM.attach(llm.name, session="notebook")
    with pytest.raises(NBEngineError, match="attached again"):
        async for _ in stream:
            pass
    assert await collect(successor, 10, params(3, output_kind=DELTA)) == [11, 12, 13]
    await idle(successor)
    successor.detach()
    first.detach()


async def test_two_clients_of_one_engine_do_not_disturb_each_other(llm: AsyncLLM) -> None:
    other = AsyncLLM.attach(llm.name)
    mine, theirs = await asyncio.gather(
        collect(llm, 10, params(output_kind=DELTA)), collect(other, 50, params(output_kind=DELTA))
    )
    assert (mine, theirs) == (list(range(11, 31)), list(range(51, 71)))
    other.detach()
    assert await collect(llm, 3, params(2, output_kind=DELTA)) == [4, 5]


def test_an_unbound_engine_outlives_a_script_that_just_ends(script: Script) -> None:
    process = script(
        "from nbengine import AsyncLLM\n"
        "llm = AsyncLLM(name='left', bound=False, **OPTIONS)\n"
        "llm.submit('endless', None)\n"
        "print('ready')\n"
    )
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "ready\n", "")
    llm = AsyncLLM.attach("left")
    wait_for(lambda: not llm.stats_blocking().engines_running, "the end of the lost client's request")
    llm.shutdown()


def test_a_client_that_nobody_refers_to_leaves_an_unbound_engine_running(
    start_async: StartAsync, started_clients: list[AsyncLLM]
) -> None:
    info = start_async(name="dropped", bound=False).connection
    assert count_clients(info) == 1
    started_clients.clear()
    wait_for(lambda: count_clients(info) == 0, "the end of the client's sockets")
    assert info.host_alive
    stop_engine(info)


def test_a_name_that_runs_is_not_taken_twice(start_async: StartAsync) -> None:
    start_async(name="unique")
    with pytest.raises(InvalidArgumentError, match="'unique'"):
        start_async(name="unique")


async def test_leaving_a_block_ends_the_engine_that_it_started_and_leaves_others_running(
    start_async: StartAsync,
) -> None:
    async with start_async(name="mine") as llm:
        info = llm.connection
        async with AsyncLLM.attach("mine") as guest:
            assert await collect(guest, 10, params(3, output_kind=DELTA)) == [11, 12, 13]
        wait_for(lambda: count_clients(info) == 1, "the end of the guest's lease")
        with pytest.raises(NBEngineError, match="detached"):
            guest.submit(tokens(1), params())
        assert await collect(llm, 10, params(3, output_kind=DELTA)) == [11, 12, 13]
        log = Path(info.log_path).read_text().splitlines()
    assert not info.host_alive
    assert "engine mine, model random-tiny (" in log[0]
    assert f"), nbengine {nbengine.__version__}, torch " in log[0]
    stages = [line.partition("start: ")[2] for line in log if "start: " in line]
    assert [re.sub(r"[\d.]+ s\b.*", "N s", stage) for stage in stages] == [
        "process took N s",
        "load took N s",
        "profile took N s",
        "kv took N s",
        "takes requests after N s",
    ]


async def test_an_engine_that_outlives_its_process_outlives_a_block_too(start_async: StartAsync) -> None:
    with pytest.raises(ZeroDivisionError):
        async with start_async(bound=False) as llm:
            raise ZeroDivisionError
    assert llm.connection.host_alive
    wait_for(lambda: count_clients(llm.connection) == 0, "the end of the client's lease")
