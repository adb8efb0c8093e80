"""An engine on a network: its sockets are TCP ports with CURVE, and all else is as on one machine."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.trace_follower import TraceFollower
from stopping import stop

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.client.engines.directory import count_clients, find_engine, list_engines, reap, stop_engine
from nbengine.client.observe.process_usage import client_pids
from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError, NBEngineError
from nbengine.ipc.control_messages import LeaseLost
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo, connection_file

StartEngine = Callable[..., EngineUnderTest]
StartFrontend = Callable[..., Any]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def tokens_of(llm: AsyncLLM, first: int, count: int) -> list[int]:
    async for output in llm.generate({"prompt_token_ids": [first]}, params(count)):
        tokens: list[int] = output.outputs[0].token_ids
    return tokens


def shut_down(descriptor: int) -> None:
    """Cut a connection of this process's, as a network would."""
    with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def copied(info: ConnectionInfo, directory: Path, **changes: Any) -> Path:
    """A copy of an engine's connection file, as on another machine."""
    elsewhere = msgspec.structs.replace(info, machine="elsewhere", **changes)
    path = directory / "copied.json"
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(elsewhere))
    return path


def test_requests_and_statistics_stream_over_tcp(start_networked: StartEngine) -> None:
    engine = start_networked()
    client = engine.client().attach()
    subscriber = client.subscribe()
    client.add("r", [1, 2, 3])
    client.wait_finished("r")
    assert client.tokens("r") == [4, 5, 6, 7, 8, 9, 10, 11]
    idle = client.read_stats(subscriber, lambda s: not s.engines_running and s.engines[0].step_counter > 0)
    assert idle.engines[0].num_free_blocks == 64
    with StatsSubscriber(engine.info, trace=True) as follower:
        trace = TraceFollower(follower)
        mirror = trace.begin()
        client.add("followed", [1, 2, 3])
        trace.read_until(lambda: mirror.finished and not mirror.requests, "the end of a request")
    assert [view.num_output_tokens for view in mirror.finished.values()] == [8]
    client.leave()


async def test_an_async_frontend_and_its_engine_cores_are_on_a_network(start_frontend: StartFrontend) -> None:
    llm = start_frontend(AsyncLLM, data_parallel_size=2)
    info = llm.connection
    assert set(info.addresses) >= {"host.sock", "stats.sock"}
    for number in range(4):
        assert await tokens_of(llm, number, 5) == list(range(number + 1, number + 6))
    with StatsSubscriber(info, kv_events=True) as subscriber:
        assert isinstance(subscriber.poll(60), EngineStats)
    assert find_engine(info.name).keys == info.keys
    assert count_clients(info) == 1
    assert client_pids(info) == [psutil.Process().pid]
    [listing] = list_engines()
    assert (listing.state, listing.num_clients) == ("ready", 1)
    llm.detach()
    wait_for(lambda: count_clients(info) == 0, "the end of the connection")
    stop_engine(info)
    assert not info.host_alive


def test_a_blocking_frontend_is_on_a_network(start_frontend: StartFrontend) -> None:
    llm = start_frontend(LLM)
    prompts = [{"prompt_token_ids": [first]} for first in (1, 50)]
    outputs = llm.generate(prompts, params(3), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[2, 3, 4], [51, 52, 53]]


async def test_a_copied_connection_file_is_enough_on_another_machine(
    start_frontend: StartFrontend, tmp_path: Path
) -> None:
    llm = start_frontend(AsyncLLM)
    path = copied(llm.connection, tmp_path, run_dir="/nowhere", log_path="/nowhere", tensor_dir="/nowhere")
    far = AsyncLLM.attach(path)
    assert not far.connection.is_here
    assert await tokens_of(far, 7, 4) == [8, 9, 10, 11]
    [near], [other] = list_engines(), [far.connection]
    assert (near.info.name, other.name) == (llm.connection.name,) * 2
    far.shutdown()
    wait_for(lambda: not llm.connection.host_alive, "the end of the engine")
    with pytest.raises(EngineDeadError):
        await tokens_of(llm, 1, 1)


def test_an_engine_elsewhere_is_asked_to_end(start_networked: StartEngine, tmp_path: Path) -> None:
    engine = start_networked()
    engine.wait_ready()
    client = engine.client().attach()
    stop_engine(find_engine(copied(engine.info, tmp_path)))
    client.expect_end("the engine was shut down", expected=True)
    engine.wait_gone()
    assert engine.host.returncode == 0


def test_an_engine_elsewhere_that_does_not_end_is_left_alone(
    start_networked: StartEngine, tmp_path: Path
) -> None:
    engine = start_networked()
    engine.wait_ready()
    stop(engine.host.pid)
    try:
        with pytest.raises(NBEngineError, match="has not ended within"):
            stop_engine(find_engine(copied(engine.info, tmp_path)), timeout=0.5)
        assert engine.run_dir.exists()
    finally:
        engine.host.send_signal(signal.SIGCONT)


def test_a_connection_file_of_an_engine_that_is_gone_says_so(
    start_networked: StartEngine, tmp_path: Path
) -> None:
    engine = start_networked(lease=2.0)
    path = copied(engine.info, tmp_path)
    engine.close()
    begun = time.monotonic()
    with pytest.raises(
        EngineStartError, match=r"out of reach at tcp://127\.0\.0\.1:.*is this its connection"
    ):
        AsyncLLM.attach(path)
    assert time.monotonic() - begun > 0.9


def test_a_connection_file_that_others_can_read_is_refused(
    start_networked: StartEngine, tmp_path: Path
) -> None:
    path = copied(start_networked().info, tmp_path)
    path.chmod(0o644)
    with pytest.raises(NBEngineError, match="must be its owner's alone"):
        AsyncLLM.attach(path)


def test_the_run_directory_of_a_living_engine_is_no_stray(start_networked: StartEngine) -> None:
    engine = start_networked()
    client = engine.client().attach()
    connection_file(engine.name).rename(connection_file(f"{engine.name}.away"))
    assert reap().removed_dirs == []
    client.add("r", [1])
    client.wait_finished("r")
    connection_file(f"{engine.name}.away").rename(connection_file(engine.name))


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_client_of_which_one_connection_breaks_loses_its_lease(
    start_networked: StartEngine, which: str
) -> None:
    engine = start_networked({"step_seconds": 0.01})
    client, other = engine.client().attach(), engine.client().attach()
    client.add("r", [1], max_tokens=100_000 // 100)
    getattr(client, which).close()
    lost = client.hear(LeaseLost)
    assert "the connection to engine core 0 broke" in lost.reason
    other.add("s", [1])
    other.wait_finished("s")
    idle = other.read_stats(other.subscribe(), lambda s: not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64


async def test_a_broken_connection_to_the_host_is_made_again(start_frontend: StartFrontend) -> None:
    llm = start_frontend(AsyncLLM, knobs={"step_seconds": 0.01})
    host = llm.engine_core.link._host
    stream = llm.generate({"prompt_token_ids": [1]}, params(1000))
    await anext(stream)
    [ours] = [
        connection
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr and connection.raddr.port == int(host.address.rpartition(":")[2])
    ]
    shut_down(ours.fd)
    with pytest.raises(LeaseExpiredError, match="the connection to its host broke"):
        async for _ in stream:
            pass
    for _ in range(200):
        try:
            assert await tokens_of(llm, 1, 3) == [2, 3, 4]
            break
        except LeaseExpiredError:
            await asyncio.sleep(0.05)
    assert count_clients(llm.connection) == 1


async def test_an_engine_core_without_its_host_ends(start_networked: StartEngine) -> None:
    # A connection ends when a process is silent for half of it.
    engine = start_networked(lease=8.0)
    client = engine.client().attach()
    core = engine.core()
    # Its pipe stays open: only the connection tells.
    stop(engine.host.pid)
    try:
        client.wait_dead()
        wait_for(lambda: core.status() == psutil.STATUS_ZOMBIE, "the end of the core")
        assert "the connection to the engine's host broke" in engine.log()
    finally:
        engine.host.send_signal(signal.SIGCONT)
    engine.wait_gone()
