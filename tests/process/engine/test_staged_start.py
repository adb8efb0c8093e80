"""An engine of several cores that is ended while it starts: by a signal to its host, or with the process that owns it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, fake_config, wait_for

from nbengine.client import making
from nbengine.client.engines.launch import bury_child, host_exit, launch_engine
from nbengine.client.threads.loop_thread import LoopThread
from nbengine.config import EngineConfig, ParallelConfig
from nbengine.errors import EngineStartError
from nbengine.runtime.connection import ConnectionInfo, connection_file
from tests.support.thorough import amount

pytestmark = pytest.mark.fresh_processes

NUM_CORES = 8
PATIENCE = 60.0
"""Seconds for everything to be gone once the owner is, on a machine that does much else; alone it takes under two."""
NUM_KILLS = amount(4, thorough=200)
OWNER = """
import signal, sys
from process_support.engine_under_test import FAKE_EXECUTOR, fake_config
from nbengine.client.engines.launch import launch_engine
from nbengine.config import ParallelConfig
parallel = ParallelConfig(data_parallel_size=int(sys.argv[1]), distributed_executor_backend=FAKE_EXECUTOR)
info = launch_engine(fake_config(parallel=parallel, bound=True))
print(info.name, flush=True)
signal.pause()
"""


def eight_cores() -> ParallelConfig:
    return ParallelConfig(data_parallel_size=NUM_CORES, distributed_executor_backend=FAKE_EXECUTOR)


def processes_of(directories: list[Path]) -> list[int]:
    """Processes that write to a log in one of the directories, or whose parent does."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if any(os.readlink(f"/proc/{pid}/fd/2").startswith(f"{each}/") for each in directories):
                found.append(pid)
    return found


def files_in(directories: list[Path]) -> list[Path]:
    shared = [each for name in directories for each in Path("/dev/shm").glob(f"nbengine-{name.name}-*")]
    places = [*directories, *shared]
    return [
        path
        for place in places
        for path in [place, *place.rglob("*")]
        if path not in directories and path.suffix not in (".log", ".lock") and path.name != "nbengine-logs"
    ]


@pytest.fixture
def own_directories(tmp_path, private_socket_dir, monkeypatch) -> Iterator[list[Path]]:
    """Give a test's engines directories that no other engines use; they are empty in the end."""
    runtime, sockets = tmp_path / "runtime", Path(tempfile.mkdtemp(dir=private_socket_dir))
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    yield [runtime, sockets]
    sockets.rmdir()


def test_a_host_that_is_told_to_end_while_it_imports_leaves_nothing_behind(
    own_directories, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    info = launch_engine(fake_config(parallel=eight_cores()))
    # It has hardly begun to import anything.
    os.kill(info.host_pid, signal.SIGTERM)
    wait_for(lambda: not info.host_alive, "the end of the host")
    assert host_exit(info) == "exited with status 0"
    assert "the engine was ended by SIGTERM" in Path(info.log_path).read_text()
    assert not Path(info.run_dir).exists()
    assert not Path(info.tensor_dir).exists()
    assert not connection_file(info.name).exists()
    bury_child(info.run_dir)


def make_of_loop(config: EngineConfig) -> object:
    return making.make_async_mp_client(config, LoopThread.shared())


@pytest.mark.parametrize("make", [making.make_client, make_of_loop])
def test_an_engine_that_has_ended_before_it_has_a_client_is_told_with_its_cause(
    own_directories, monkeypatch, make
) -> None:
    def launch_and_end(config: EngineConfig, *, name: str | None) -> ConnectionInfo:
        info = launch_engine(config, name=name)
        os.kill(info.host_pid, signal.SIGTERM)
        wait_for(lambda: not info.host_alive, "the end of the host")
        return info

    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    monkeypatch.setattr(making, "launch_engine", launch_and_end)
    with pytest.raises(EngineStartError, match=r"host process \(pid \d+\) exited with status 0") as caught:
        make(fake_config())
    assert "the engine was ended by SIGTERM" in str(caught.value)
    assert files_in(own_directories) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.timeout(30 * NUM_KILLS)
def test_an_owner_that_dies_at_any_moment_of_a_start_leaves_nothing_behind(
    own_directories, tmp_path, number
) -> None:
    chooser = random.Random(int(number))
    environment = os.environ | {"PYTHONPATH": SUPPORT_PATH}
    for _ in range(NUM_KILLS // 2):
        command = [sys.executable, "-c", OWNER, str(NUM_CORES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip()
            # Moments are what is tried: from the host's first import until all cores have loaded.
            with pytest.raises(subprocess.TimeoutExpired):
                owner.wait(chooser.uniform(0, 2.0))
            owner.send_signal(number)
        wait_for(lambda: not processes_of(own_directories), "the end of the processes", PATIENCE)
        assert not files_in(own_directories)
