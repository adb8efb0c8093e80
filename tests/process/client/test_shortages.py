"""A shortage that passes ends nothing, and an engine can be ended during it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from descriptors import exhausted, starved
from process_support.engine_under_test import wait_for

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.client.link.host_link import HostLink
from nbengine.client.mp import MPClient
from nbengine.errors import EngineDeadError
from nbengine.runtime.connection import ConnectionInfo, connection_file

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]

PROMPT = {"prompt_token_ids": [5]}
ON_A_NETWORK = {"data_parallel_address": "127.0.0.1"}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def generate(llm: LLM, count: int) -> list[int]:
    return llm.generate(PROMPT, greedy(count), use_tqdm=False)[0].outputs[0].token_ids


def stream(llm: AsyncLLM, count: int, begun: threading.Event | None = None) -> list[int]:
    async def read() -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(PROMPT, greedy(count)):
            tokens = output.outputs[0].token_ids
            if begun is not None:
                begun.set()
        return tokens

    return asyncio.run(read())


def assert_nothing_left(info: ConnectionInfo) -> None:
    assert not session_processes(info)
    assert not Path(info.run_dir).exists()
    assert not connection_file(info.name).exists()


@contextlib.contextmanager
def attached(llm: LLM) -> Iterator[AsyncLLM]:
    other = AsyncLLM.attach(llm.llm_engine.connection.name)
    yield other
    other.detach()


def client_of(llm: LLM) -> MPClient:
    client = llm.llm_engine.engine_core
    assert isinstance(client, MPClient)
    return client


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[HostLink]:
    """The links that have looked at their engine's processes, which they do often."""
    monkeypatch.setattr("nbengine.client.link.host_link.WATCH_INTERVAL", 0.05)
    found: list[HostLink] = []
    look = HostLink._look_at_processes

    def noted(link: HostLink, now: float) -> None:
        look(link, now)
        found.append(link)

    monkeypatch.setattr(HostLink, "_look_at_processes", noted)
    return found


@pytest.mark.parametrize("options", [{}, ON_A_NETWORK], ids=["here", "network"])
def test_requests_go_on_while_there_are_no_descriptors(
    start_llm: StartLLM, looks: list[HostLink], caplog: pytest.LogCaptureFixture, options: dict
) -> None:
    llm = start_llm(knobs={"step_seconds": 0.005}, **options)
    with attached(llm) as other, ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        streamed = pool.submit(stream, other, 100, begun)
        assert begun.wait(60)
        with exhausted():
            looks.clear()
            assert generate(llm, 100) == list(range(6, 106))
            for link in (client_of(llm).link, other.engine_core.link):
                wait_for(lambda link=link: looks.count(link) >= 3, "three looks")
        assert streamed.result(60) == list(range(6, 106))
        # For longer than the host waits until it looks at its clients' processes again.
        with starved(llm.llm_engine.connection.host_pid), starved(llm.llm_engine.ready.pid):
            assert generate(llm, 230) == list(range(6, 236))
        assert stream(other, 3) == generate(llm, 3) == [6, 7, 8]
    info = llm.llm_engine.connection
    with exhausted():
        llm.shutdown()
    assert "may be left" not in caplog.text
    assert_nothing_left(info)


@pytest.mark.parametrize("way", ["shutdown", "release"])
def test_an_engine_whose_link_has_failed_is_ended_by_a_signal(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    llm = start_async()
    client, info = llm.engine_core, llm.connection

    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(client.link, "_look_at_processes", fail)
    wait_for(lambda: client.standing.is_dead, "the end of the link")
    with pytest.raises(
        EngineDeadError, match=r"the link to the engine's host failed: RuntimeError\('a bug'\)"
    ):
        llm.submit("x")
    wait_for(lambda: "client 1 detached" in Path(info.log_path).read_text(), "the end of the lease")
    with exhausted():
        if way == "release":
            client.release()
            wait_for(client.link._watch.host_gone, "the end of the host")
        else:
            llm.shutdown()
            assert client.link._over
    if way == "release":
        llm.shutdown()
    assert_nothing_left(info)


def test_a_shortage_that_does_not_end_leaves_files_alone(
    start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nbengine.client.link.engine_end.CLEAR_TIMEOUT", 0.05)
    monkeypatch.setattr("nbengine.client.link.engine_end.RESERVE", 1000)
    llm = start_llm()
    info = llm.llm_engine.connection
    with exhausted():
        llm.shutdown()
    assert f"something of engine {info.name} may be left: `nbengine reap` removes it" in caplog.text
    # Not even as a zombie.
    assert not psutil.pid_exists(info.host_pid)
    assert not session_processes(info)


def faltering(function: Callable[..., None]) -> tuple[Callable[..., None], list[int]]:
    """`function`, which finds no descriptor the first two times that it is called, and a list of its calls."""
    calls: list[int] = []

    def falter(*args: object) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(errno.EMFILE, "short")
        function(*args)

    return falter, calls


def test_a_shortage_on_a_clients_threads_passes_and_a_bug_ends_the_client_alone(
    start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start_llm()
    with attached(llm) as other:
        for client in (client_of(llm), other.engine_core):
            falter, calls = faltering(lambda: None)
            client._thread.run_soon(falter)
            wait_for(lambda calls=calls: len(calls) >= 3, "the third attempt")
            falter, calls = faltering(client.link._look_at_clock)
            monkeypatch.setattr(client.link, "_look_at_clock", falter)
            wait_for(lambda calls=calls: len(calls) >= 3, "the third turn")
        assert stream(other, 3) == generate(llm, 3) == [6, 7, 8]

        def fail() -> None:
            raise RuntimeError("a bug")

        other.engine_core._thread.run_soon(fail)
        wait_for(lambda: other.engine_core.standing.is_dead, "the end of one client")
        with pytest.raises(
            EngineDeadError, match=r"the connection to the engine failed: RuntimeError\('a bug'\)"
        ):
            stream(other, 3)
        assert generate(llm, 3) == [6, 7, 8]
        client_of(llm)._thread.run_soon(fail)
        with pytest.raises(EngineDeadError, match="a bug"):
            generate(llm, 3)
    info = llm.llm_engine.connection
    llm.shutdown()
    assert_nothing_left(info)
