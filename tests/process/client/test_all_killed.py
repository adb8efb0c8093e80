"""Every process of an engine, and the one that started it, killed at once: the next start clears away what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine import AsyncLLM
from nbengine.client.engines.directory import clear_dead_engines, list_engines
from nbengine.client.engines.processes import kill_session, session_processes
from nbengine.runtime.connection import ConnectionInfo, connection_file, read_connection

StartAsync = Callable[..., AsyncLLM]

START = """
from nbengine import AsyncLLM
llm = AsyncLLM("random-tiny", name="first", tensor_parallel_size=2, max_model_len=64, num_gpu_blocks_override=8)
print("ready", flush=True)
input()
"""


@pytest.fixture
def first(no_leftovers: None) -> Iterator[tuple[subprocess.Popen[bytes], ConnectionInfo]]:
    """A program with an engine of two workers."""
    with subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        info = read_connection(connection_file("first"))
        yield program, info
        kill_session(info)
        program.kill()


def test_the_next_start_leaves_nothing_of_it_and_touches_nothing_that_lives(
    first: tuple[subprocess.Popen[bytes], ConnectionInfo], start_async: StartAsync
) -> None:
    program, info = first
    processes = session_processes(info)
    assert len(processes) == 4
    clear_dead_engines()
    assert info.host_alive
    assert Path(info.run_dir).is_dir()
    stop(program.pid, *(process.pid for process in processes))
    # The host and the program last: the kernel wakes stopped processes whose parent has gone.
    for process in reversed(processes):
        os.kill(process.pid, signal.SIGKILL)
    program.kill()
    program.wait()
    wait_for(lambda: not (info.host_alive or session_processes(info)), "the end of the killed processes")
    assert Path(info.run_dir).is_dir()
    assert Path(info.tensor_dir).is_dir()
    second = start_async(name="second")
    assert not Path(info.run_dir).exists()
    assert not Path(info.tensor_dir).exists()
    assert not connection_file("first").exists()
    clear_dead_engines()
    assert [(listing.info.name, listing.state) for listing in list_engines()] == [("second", "ready")]
    assert second.call_utility_blocking("ping", timeout=60) == "pong"
