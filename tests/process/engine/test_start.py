"""An engine starts, or fails with the reason, and leaves nothing then."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbengine.config import CacheConfig
from nbengine.ipc.control_messages import Attached, EngineReady, Progress, Shutdown
from nbengine.runtime.connection import connection_file

pytestmark = pytest.mark.fresh_processes


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file, for `hold_load`: the load goes on when it is removed."""
    path = tmp_path / "hold"
    path.touch()
    return path


def test_a_starting_engine_reports_progress_then_is_ready(start_engine, hold: Path) -> None:
    engine = start_engine({"hold_load": str(hold)}, max_model_len=100)
    client = engine.client()
    client.tell(client.attach_message())
    assert client.hear(Attached).engine_ranks == [0]
    hold.unlink()
    stages = []
    while not isinstance(message := client.hear(), EngineReady):
        assert isinstance(message, Progress)
        stages.append(message.stage)
    assert list(dict.fromkeys(stages)) == ["load", "profile", "kv"]
    assert (message.num_blocks, message.block_size, message.max_model_len) == (64, 16, 100)
    assert message.pid == engine.core().pid
    assert message.kv_cache_bytes == 64 * 16 * 2 * 16


def test_the_connection_file_is_private_and_complete(start_engine) -> None:
    engine = start_engine()
    engine.client().attach()
    info = engine.read_connection()
    assert info.host_pid == engine.host.pid
    assert info.host_alive
    assert [ready.num_blocks for ready in info.ready] == [64]
    mode = stat.S_IMODE(connection_file(engine.name).stat().st_mode)
    assert mode == 0o600
    assert stat.S_IMODE(engine.run_dir.stat().st_mode) == 0o700
    sockets = [
        path for path in engine.run_dir.iterdir() if path.is_socket() and not path.name.startswith("c-")
    ]
    assert {path.name for path in sockets} == {
        "host.sock",
        "core.sock",
        "stats.sock",
        "back-out.sock",
        "back-pub.sock",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in sockets)


def test_processes_say_what_they_are_and_lose_the_notebooks_variables(start_engine, monkeypatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setenv("SPT_NOENV", "1")
    engine = start_engine()
    engine.client().attach()
    core = engine.core()
    assert psutil.Process(engine.host.pid).cmdline()[0] == f"nbengine: host {engine.name}"
    assert core.cmdline()[0] == f"nbengine: core 0 {engine.name}"
    assert not {"MPLBACKEND", "JPY_PARENT_PID"} & set(core.environ())
    assert os.getsid(core.pid) == engine.host.pid


def test_the_host_listens_at_once_and_never_loads_torch(start_engine) -> None:
    engine = start_engine({"load_seconds": 600})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    maps = psutil.Process(engine.host.pid).memory_maps()
    assert not [m.path for m in maps if "torch" in m.path]


def test_an_idle_engine_uses_no_cpu(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    processes = [psutil.Process(engine.host.pid), engine.core()]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    assert not client.output.poll(1500)
    used = [sum(process.cpu_times()[:2]) - b for process, b in zip(processes, before, strict=True)]
    assert max(used) <= 0.05


def test_a_failed_start_tells_the_cause_root_last_and_leaves_nothing(start_engine, hold: Path) -> None:
    engine = start_engine({"fail_load": "weights are missing", "hold_load": str(hold)})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Attached)
    hold.unlink()
    cause = "did not start: RuntimeError: weights are missing"
    dead = client.expect_end(cause, expected=False, started=False)
    assert dead.cause.endswith("caused by ValueError: the root of it")
    assert dead.log_tail.splitlines()[-1] == "RuntimeError: weights are missing"
    assert "ValueError: the root of it" in dead.log_tail
    engine.wait_gone()
    assert engine.host.returncode == 1


def test_what_does_not_fit_is_refused_at_the_start(start_engine, hold: Path) -> None:
    cache = CacheConfig(num_gpu_blocks_override=10)
    client = start_engine({"hold_load": str(hold)}, max_model_len=400, cache=cache).client()
    client.tell(client.attach_message())
    client.hear(Attached)
    hold.unlink()
    client.expect_end("max_model_len=400 needs 25 KV blocks", expected=False, started=False)


def test_a_core_that_dies_while_it_loads_ends_the_start(start_engine) -> None:
    engine = start_engine({"load_seconds": 60})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    engine.core().kill()
    client.expect_end("was killed by signal 9 (SIGKILL)", expected=False, started=False)
    engine.wait_gone()


def test_an_engine_can_be_ended_while_it_loads(start_engine) -> None:
    engine = start_engine({"load_seconds": 60})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    client.tell(Shutdown())
    client.expect_end("was shut down", expected=True, started=False)
    engine.wait_gone()
    assert engine.host.returncode == 0


def test_a_run_directory_without_a_configuration_is_an_error(tmp_path) -> None:
    command = [sys.executable, "-m", "nbengine.engine", "host", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "engine.json" in done.stderr


def test_a_name_in_use_is_refused_and_the_older_engine_goes_on(start_engine) -> None:
    first = start_engine(name="taken")
    client = first.client().attach()
    second = start_engine(name="taken")
    second.host.wait(60)
    assert second.host.returncode == 1
    assert "an engine named 'taken' is running" in second.log()
    assert not second.run_dir.exists()
    assert first.read_connection().host_pid == first.host.pid
    assert client.call("ping") == (None, "pong")
    client.tell(Shutdown())
    first.wait_gone()


def test_two_engines_live_side_by_side(start_engine) -> None:
    engines = [start_engine(), start_engine()]
    clients = [engine.client().attach() for engine in engines]
    for number, client in enumerate(clients):
        client.add("same id", [number * 100], max_tokens=3)
    for number, client in enumerate(clients):
        client.wait_finished("same id")
        assert client.tokens("same id") == [number * 100 + n for n in (1, 2, 3)]
    clients[0].tell(Shutdown())
    engines[0].wait_gone()
    assert clients[1].call("ping") == (None, "pong")
