"""Servers for engines with the fake executor (the next token is the last one plus 1)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
import psutil
import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, wait_for

from nbengine import AsyncLLM
from nbengine.ipc.liveness import is_alive
from nbengine.server.launch import start_server, stop_server
from nbengine.server.records import ServerRecord
from nbengine.server.settings import ServerSettings

if TYPE_CHECKING:
    import openai

VOCAB_SIZE = 260
"""Of random-tiny, whose tokenizer these engines have: a token a byte, and 4 special ones."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass
class Served:
    """An engine and its server."""

    llm: AsyncLLM
    record: ServerRecord
    settings: ServerSettings
    clients: list[openai.OpenAI | httpx2.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.record.url}/v1"

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.record.pid)

    def client(self, **options: Any) -> openai.OpenAI:
        import openai

        client = openai.OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, **options})
        self.clients.append(client)
        return client

    def http(self) -> httpx2.Client:
        client = httpx2.Client(base_url=self.record.url, timeout=60)
        self.clients.append(client)
        return client

    def close_clients(self) -> None:
        """Close the connections that were made so far."""
        while self.clients:
            self.clients.pop().close()

    def has_ended(self) -> bool:
        """Tell whether the server's process has ended."""
        return not is_alive(self.record.process)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, **options})

    def idle(self) -> None:
        """Wait until the engine has nothing to do and all of its blocks."""

        def is_idle() -> bool:
            engines = self.llm.stats_blocking().engines
            return all(
                not engine.num_running_reqs + engine.num_waiting_reqs
                and engine.num_free_blocks == engine.num_blocks
                for engine in engines
            )

        wait_for(is_idle, "the engine to have nothing left")


Serve = Callable[..., Served]


@contextlib.contextmanager
def serving() -> Iterator[Serve]:
    """Start engines and a server for each; all of them are ended behind the block."""
    started: list[Served] = []

    def start(
        *, knobs: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **options: Any
    ) -> Served:
        defaults: dict[str, Any] = {
            "distributed_executor_backend": FAKE_EXECUTOR,
            "num_gpu_blocks_override": 4096,
            "chat_template": TEMPLATE,
            "lease": 10.0,
            "hf_overrides": {"vocab_size": VOCAB_SIZE, **(knobs or {})},
        }
        llm = AsyncLLM("random-tiny", **{**defaults, **options})
        chosen = ServerSettings(**{"port": 0, **(settings or {})})
        try:
            record = start_server(llm.connection, chosen)
        except BaseException:
            llm.shutdown()
            raise
        started.append(Served(llm, record, chosen))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)
        yield start
        for served in started:
            served.close_clients()
            stop_server(served.record, drain_timeout=0)
            served.llm.shutdown()


@pytest.fixture
def serve(no_leftovers: None) -> Iterator[Serve]:
    """Start an engine and a server for it; both are ended after the test."""
    with serving() as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_server(no_leftovers_of_module: None) -> Iterator[Serve]:
    """Start an engine and a server for it; both are ended after the last test of the file."""
    with serving() as start:
        yield start


@pytest.fixture(scope="module")
def shared_server(start_shared_server: Serve) -> Served:
    """An engine and its server for all tests of a file."""
    return start_shared_server()


@pytest.fixture
def served(shared_server: Served) -> Iterator[Served]:
    """The shared engine and its server, for the tests that leave both as they are."""
    yield shared_server
    shared_server.close_clients()
    shared_server.idle()


@pytest.fixture
def with_a_key(served: Served) -> Iterator[Served]:
    """A second server of the engine, which asks for a key."""
    with second_server(served, api_keys=("a-secret-key",)) as second:
        yield second


@pytest.fixture
def told_together(served: Served) -> Iterator[Served]:
    """A second server of the engine, which lets it hold the tokens of streams for a minute."""
    with second_server(served, output_interval=60) as second:
        yield second


@contextlib.contextmanager
def second_server(served: Served, **options: Any) -> Iterator[Served]:
    """Start another server of an engine; end it behind the block."""
    settings = ServerSettings(port=0, **options)
    second = dataclasses.replace(
        served, record=start_server(served.llm.connection, settings), settings=settings, clients=[]
    )
    try:
        yield second
    finally:
        second.close_clients()
        stop_server(second.record, drain_timeout=0)
