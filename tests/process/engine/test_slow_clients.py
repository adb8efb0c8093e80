"""A client process that stops reading costs the engine bounded memory and nobody else anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from process_support.engine_under_test import SUPPORT_PATH, EngineUnderTest, wait_for
from stopping import stop

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.ipc.messages import FinishReason

NUM_REQUESTS = 64
NUM_TOKENS = 2000
GROWTH_MIB = 32
KNOBS = {"max_position_embeddings": 4096, "vocab_size": 100_000}

READER = f"""
import json, sys
from nbengine.runtime.connection import connection_file, read_connection
from process_support.raw_client import RawClient

client = RawClient(read_connection(connection_file(sys.argv[1]))).attach()
names = [f"slow-{{number}}" for number in range({NUM_REQUESTS})]
for number, name in enumerate(names):
    client.add(name, [1000 * number], max_tokens={NUM_TOKENS})
client.wait_finished(*names, deadline=60)
ends = {{name: client.outputs[name][-1] for name in names}}
print(json.dumps({{
    "tokens": {{name: client.tokens(name) for name in names}},
    "reasons": {{name: str(end.finish_reason) for name, end in ends.items()}},
    "errors": [end.error for end in ends.values()],
    "messages": sum(len(outputs) for outputs in client.outputs.values()),
}}))
client.leave()
"""

StartReader = Callable[[EngineUnderTest], "subprocess.Popen[str]"]


@pytest.fixture
def start_reader() -> Iterator[StartReader]:
    """Start the client that will be slow; it is killed after the test if it still runs."""
    readers: list[subprocess.Popen[str]] = []

    def start(engine: EngineUnderTest) -> subprocess.Popen[str]:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, engine.name],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([SUPPORT_PATH, *sys.path])},
        )
        readers.append(reader)
        return reader

    yield start
    for reader in readers:
        reader.kill()
        reader.communicate()


def start(start_engine, **options) -> EngineUnderTest:
    engine = start_engine(
        KNOBS,
        lease=100.0,
        cache=CacheConfig(num_gpu_blocks_override=NUM_REQUESTS * (NUM_TOKENS // 16 + 2)),
        scheduler=SchedulerConfig(max_num_seqs=NUM_REQUESTS + 8),
        **options,
    )
    engine.wait_ready()
    return engine


def counting(number: int, count: int) -> list[int]:
    return [(1000 * number + offset) % KNOBS["vocab_size"] for offset in range(1, count + 1)]


def run_while_stopped(
    engine: EngineUnderTest, start_reader: StartReader
) -> tuple[subprocess.Popen[str], float]:
    """Start the reader, stop it when it has asked, and let the engine answer it and a fast client.

    Returns the reader, and by how many MiB the engine core grew meanwhile.
    """
    fast = engine.client().attach()
    core = engine.core()
    # So that the reader is stopped before it has anything to read.
    assert fast.call("pause_generation", "keep", False) == (None, None)
    reader = start_reader(engine)
    wait_for(lambda: fast.call("stats")[1][2] == NUM_REQUESTS, "the reader's requests")
    stop(reader.pid)
    peak = before = core.memory_info().rss
    assert fast.call("resume_generation") == (None, None)

    def idle() -> bool:
        nonlocal peak
        peak = max(peak, core.memory_info().rss)
        name = f"fast-{len(fast.outputs)}"
        fast.add(name, [5], max_tokens=20)
        fast.wait_finished(name)
        assert fast.tokens(name) == list(range(6, 26))
        _, stats = fast.call("stats")
        return stats[1] == 0

    wait_for(idle, "the end of all requests", 60)
    return reader, (peak - before) / 2**20


def test_a_stopped_client_costs_little_memory_and_gets_every_token_once_when_it_goes_on(
    start_engine, start_reader: StartReader
) -> None:
    engine = start(start_engine)
    reader, growth = run_while_stopped(engine, start_reader)
    assert growth < GROWTH_MIB
    reader.send_signal(signal.SIGCONT)
    output, _ = reader.communicate(timeout=60)
    told = json.loads(output)
    for number in range(NUM_REQUESTS):
        assert told["tokens"][f"slow-{number}"] == counting(number, NUM_TOKENS)
    assert set(told["reasons"].values()) == {"length"}
    # Merged: far fewer than one output a token.
    assert told["messages"] < NUM_REQUESTS * NUM_TOKENS / 2


def test_a_client_beyond_its_limit_is_given_up_and_told_so(start_engine, start_reader: StartReader) -> None:
    limit = 1 << 20
    engine = start(start_engine, client_backlog_bytes=limit)
    reader, growth = run_while_stopped(engine, start_reader)
    assert growth < GROWTH_MIB
    other = engine.client().attach()
    other.add("after", [1], max_tokens=3)
    other.wait_finished("after")
    assert other.finish_reason("after") is FinishReason.LENGTH
    reader.send_signal(signal.SIGCONT)
    output, _ = reader.communicate(timeout=60)
    told = json.loads(output)
    assert set(told["reasons"].values()) == {"error"}
    assert all("did not read its outputs" in error for error in told["errors"])
    for number in range(NUM_REQUESTS):
        tokens = told["tokens"][f"slow-{number}"]
        assert len(tokens) < NUM_TOKENS
        assert tokens == counting(number, len(tokens))
    assert "is given up: the client did not read" in engine.log()
