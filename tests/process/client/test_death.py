"""However an engine dies, its clients learn it soon, with the reason, and nothing of it is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.client.engines.directory import stop_engine
from nbengine.client.engines.processes import session_processes
from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError
from nbengine.ipc.liveness import ProcessIdentity
from nbengine.runtime.connection import connection_file
from nbengine.sampling_params import RequestOutputKind

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]

ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PROMPT = {"prompt_token_ids": [5]}
DEADLINE = 60.0


async def read_to_the_end(llm: AsyncLLM, started: asyncio.Event) -> None:
    async for _ in llm.generate(PROMPT, ENDLESS):
        started.set()


async def death_of(llm: AsyncLLM, kill: Callable[[], None]) -> EngineDeadError:
    """Kill the engine under two running streams and return what they raise; both have to within the deadline."""
    started = [asyncio.Event(), asyncio.Event()]
    streams = [asyncio.create_task(read_to_the_end(llm, event)) for event in started]
    await asyncio.gather(*(asyncio.wait_for(event.wait(), DEADLINE) for event in started))
    kill()
    killed_at = time.monotonic()
    errors = await asyncio.gather(*streams, return_exceptions=True)
    assert time.monotonic() - killed_at < DEADLINE
    for error in errors:
        assert isinstance(error, EngineDeadError), error
    first, second = errors
    assert isinstance(first, EngineDeadError)
    assert str(first) == str(second)
    return first


def assert_nothing_left(llm: AsyncLLM) -> None:
    info = llm.connection
    wait_for(lambda: not session_processes(info), "the end of the engine's processes")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of the run directory")
    wait_for(lambda: not connection_file(info.name).exists(), "the end of the connection file")


def host_of(llm: AsyncLLM) -> int:
    return llm.connection.host_pid


def core_of(llm: AsyncLLM) -> int:
    return llm.ready.pid


@pytest.mark.parametrize("victims", ["core", "host", "core and host"])
async def test_killed_processes_end_every_stream_with_the_reason_and_the_log(
    start_async: StartAsync, victims: str
) -> None:
    llm = start_async(name="victim", bound=False, knobs={"step_seconds": 0.03})
    pids = [core_of(llm)] if "core" in victims else []
    pids += [host_of(llm)] if "host" in victims else []

    def kill() -> None:
        # One that runs could end by itself once the other is dead.
        stop(*pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    error = await death_of(llm, kill)
    assert "SIGKILL" in error.cause
    assert "ready" in error.log_tail
    assert str(error).endswith(error.cause)
    with pytest.raises(EngineDeadError):
        llm.submit("x", ENDLESS)
    with pytest.raises(EngineDeadError):
        await llm.stats()
    assert_nothing_left(llm)
    again = start_async(name="victim", bound=False)
    outputs = [output async for output in again.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))]
    assert outputs[-1].outputs[0].token_ids == [6, 7]


async def test_a_failing_step_gives_the_models_own_error(start_async: StartAsync) -> None:
    llm = start_async(knobs={"fail_at_token": 250, "step_seconds": 0.01})
    error = await death_of(llm, lambda: None)
    assert "the model broke at token 250" in error.cause
    assert "Traceback" in error.log_tail
    assert_nothing_left(llm)


async def test_an_orderly_end_from_outside_keeps_what_streams_have(start_async: StartAsync) -> None:
    llm = start_async(knobs={"step_seconds": 0.03})
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await asyncio.get_running_loop().run_in_executor(None, stop_engine, llm.connection)
    outputs = [output async for output in stream]
    count = len(outputs[-1].outputs[0].token_ids)
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids == list(range(6, 6 + count))
    assert_nothing_left(llm)
    wait_for(lambda: llm.engine_core.standing.is_dead, "the news of the end")
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.submit("x", ENDLESS)


async def test_the_notice_of_an_orderly_end_does_not_overtake_the_last_outputs(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.client.link.engine_verdict.LAST_OUTPUTS_TIMEOUT", DEADLINE)
    llm = start_async(knobs={"step_seconds": 0.03})
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    # The thread that reads the outputs is late.
    late = threading.Event()
    llm.engine_core.loop_thread.call_soon(late.wait, DEADLINE)
    ending = asyncio.get_running_loop().run_in_executor(None, stop_engine, llm.connection)
    wait_for(lambda: llm.engine_core.link._verdict.notice is not None, "the host's notice")
    late.set()
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await ending


def test_an_orderly_end_from_outside_returns_what_a_blocking_generate_has(start_llm: StartLLM) -> None:
    llm = start_llm(knobs={"step_seconds": 0.03})
    info = llm.llm_engine.engine_core.info  # type: ignore[attr-defined]

    def stop_when_running() -> None:
        wait_for(lambda: llm.stats().engines_running, "a running request")
        stop_engine(info)

    stopper = threading.Thread(target=stop_when_running)
    stopper.start()
    outputs = llm.generate([PROMPT, PROMPT], ENDLESS, use_tqdm=False)
    stopper.join()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]


def test_a_dead_engine_ends_a_blocking_generate(start_llm: StartLLM) -> None:
    llm = start_llm(knobs={"step_seconds": 0.03})
    info = llm.llm_engine.engine_core.info  # type: ignore[attr-defined]

    def kill_when_running() -> None:
        wait_for(lambda: llm.stats().engines_running, "a running request")
        os.kill(info.host_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_running)
    killer.start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate(PROMPT, ENDLESS, use_tqdm=False)
    killer.join()
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPT, ENDLESS, use_tqdm=False)
    llm.shutdown()
    assert not session_processes(info)


def test_a_model_that_does_not_load_is_a_start_error_with_the_root_cause(
    start_async: StartAsync, private_socket_dir: Path
) -> None:
    with pytest.raises(EngineStartError) as caught:
        start_async(knobs={"fail_load": "the weights are rotten"})
    assert "the weights are rotten" in caught.value.cause
    assert "the root of it" in caught.value.cause
    assert "Traceback" in caught.value.log_tail
    wait_for(lambda: not list(private_socket_dir.iterdir()), "the end of the run directory")


def test_a_host_that_fails_at_once_is_a_start_error_with_its_output(
    start_llm: StartLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setproctitle.py").write_text("raise RuntimeError('no titles here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(EngineStartError, match="exited with status 1") as caught:
        start_llm()
    assert "no titles here" in caught.value.log_tail
    assert time.monotonic() - start < DEADLINE


def test_a_file_of_the_notebooks_directory_does_not_shadow_a_module(
    start_llm: StartLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("random", "queue", "zmq"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    assert start_llm().llm_engine.call_utility("ping", timeout=60) == "pong"


def test_an_interrupted_start_leaves_nothing(start_async: StartAsync, private_socket_dir: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_async(progress=interrupt, knobs={"load_seconds": 0.5})
    wait_for(lambda: not list(private_socket_dir.iterdir()), "the end of the run directory")


@pytest.fixture
def seen_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host not look at this process, so that heartbeats alone keep its leases."""
    monkeypatch.setattr("nbengine.client.link.lease.this_process", lambda: ProcessIdentity(0, 0))


@pytest.mark.usefixtures("seen_from_elsewhere")
async def test_a_lost_lease_fails_what_was_asked_for_and_the_client_comes_back(
    start_async: StartAsync,
) -> None:
    llm = start_async(lease=3.0, bound=False, knobs={"step_seconds": 0.03})
    link = llm.engine_core.link
    # As if this process had been stopped for longer than the lease.
    link._lease.heartbeat_interval, link._lease.heartbeat_at = 0.2, float("inf")
    started = asyncio.Event()
    with pytest.raises(LeaseExpiredError, match="no heartbeat"):
        await asyncio.wait_for(read_to_the_end(llm, started), DEADLINE)
    assert started.is_set()
    wait_for(lambda: llm.engine_core.standing.error is None, "a new lease")
    outputs = [output async for output in llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))]
    assert outputs[-1].outputs[0].token_ids == [6, 7]
    assert not (await llm.stats()).engines_running


@pytest.mark.usefixtures("seen_from_elsewhere")
def test_a_lease_lost_while_idle_goes_unnoticed_by_the_next_generate(start_llm: StartLLM) -> None:
    llm = start_llm(lease=3.0)
    client = llm.llm_engine.engine_core
    link = client.link  # type: ignore[attr-defined]
    greedy = SamplingParams(temperature=0, max_tokens=2)
    llm.generate(PROMPT, greedy, use_tqdm=False)
    before = client.client_index  # type: ignore[attr-defined]
    link._lease.heartbeat_interval, link._lease.heartbeat_at = 0.2, float("inf")
    wait_for(lambda: client.client_index > before and client.standing.error is None, "a new lease")  # type: ignore[attr-defined]
    assert llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids == [6, 7]


def test_a_death_that_was_raised_keeps_no_client_in_memory(
    start_async: StartAsync, started_clients: list[AsyncLLM]
) -> None:
    remains = weakref.ref(start_async())
    raise_its_death(started_clients.pop())
    # The thread that has read the news may still be about to let go of the client.
    wait_for(lambda: (gc.collect(), remains())[1] is None, "the end of the client")


def raise_its_death(llm: AsyncLLM) -> None:
    os.kill(host_of(llm), signal.SIGKILL)
    wait_for(lambda: llm.engine_core.standing.is_dead, "the news of the end")
    with pytest.raises(EngineDeadError):
        llm.submit("x")
    with pytest.raises(EngineDeadError):
        llm.stats_blocking()


async def test_a_shutdown_that_drains_lets_requests_finish(start_async: StartAsync) -> None:
    llm = start_async(knobs={"step_seconds": 0.01})
    collector = llm.submit(PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    output = await collector.get()
    await asyncio.get_running_loop().run_in_executor(None, lambda: llm.shutdown(drain=True))
    while not output.finished:
        output = await asyncio.wait_for(collector.get(), DEADLINE)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (50, "length")


def test_a_stopped_host_is_killed_in_the_end(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.client.link.host_link.HOST_EXIT_TIMEOUT", 0.5)
    llm = start_async()
    stop(host_of(llm))
    llm.shutdown()
    assert not session_processes(llm.connection)
    assert_nothing_left(llm)


async def test_a_core_that_dies_under_a_stopped_host_is_noticed_all_the_same(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.client.link.engine_verdict.LAST_WORDS_TIMEOUT", 0.3)
    for name in ("HOST_EXIT_TIMEOUT", "CORE_EXIT_GRACE"):
        monkeypatch.setattr(f"nbengine.client.link.host_link.{name}", 0.3)
    llm = start_async(bound=False, knobs={"step_seconds": 0.03})

    def kill() -> None:
        stop(host_of(llm))
        os.kill(core_of(llm), signal.SIGKILL)

    error = await death_of(llm, kill)
    assert "does not say why" in error.cause
    assert_nothing_left(llm)
