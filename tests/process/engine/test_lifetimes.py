"""Attaching, leases, and every way in which an engine can end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest
import zmq
from process_support.engine_under_test import EngineUnderTest, fake_config, wait_for
from process_support.raw_client import RawClient

from nbengine.client.connection import ConnectionInfo, connection_file
from nbengine.config import CacheConfig
from nbengine.ipc.messages import (
    Attached,
    Detach,
    EngineDead,
    EngineReady,
    FinishReason,
    Heartbeat,
    HeartbeatAck,
    LeaseLost,
    Progress,
    Shutdown,
)


def expect_end(client: RawClient, cause: str, *, expected: bool, started: bool = True) -> EngineDead:
    dead = client.hear(EngineDead)
    assert cause in dead.cause
    assert (dead.expected, dead.started) == (expected, started)
    return dead


# The start.


def test_a_starting_engine_reports_progress_then_is_ready(start_engine) -> None:
    engine = start_engine({"load_seconds": 0.3}, max_model_len=100)
    client = engine.client()
    client.tell(client.attach_message())
    assert client.hear(Attached).engine_ranks == [0]
    stages = []
    while not isinstance(message := client.hear(), EngineReady):
        assert isinstance(message, Progress)
        stages.append(message.stage)
    assert stages == ["load", "profile", "kv"]
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
    began = time.monotonic()
    engine = start_engine()
    wait_for((engine.run_dir / "host.sock").exists, "host.sock")
    assert time.monotonic() - began < 2.0
    engine.client().attach()
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


def test_a_failed_start_tells_the_cause_root_last_and_leaves_nothing(start_engine) -> None:
    engine = start_engine({"fail_load": "weights are missing", "load_seconds": 0.5})
    client = engine.client()
    client.tell(client.attach_message())
    dead = expect_end(
        client, "did not start: RuntimeError: weights are missing", expected=False, started=False
    )
    assert dead.cause.endswith("caused by ValueError: the root of it")
    assert dead.log_tail.splitlines()[-1] == "RuntimeError: weights are missing"
    assert "ValueError: the root of it" in dead.log_tail
    engine.wait_gone()
    assert engine.host.returncode == 1


@pytest.mark.parametrize(
    ("knobs", "config", "cause"),
    [
        ({}, {"max_model_len": 513}, "max_model_len=513 exceeds the 512 positions"),
        (
            {},
            {"max_model_len": 400, "cache": CacheConfig(num_gpu_blocks_override=10)},
            "max_model_len=400 needs",
        ),
        ({}, {"cache": CacheConfig(kv_cache_memory_bytes=1)}, "no room for the KV cache"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(start_engine, knobs, config, cause) -> None:
    engine = start_engine({"load_seconds": 0.3} | knobs, **config)
    client = engine.client()
    client.tell(client.attach_message())
    expect_end(client, cause, expected=False, started=False)


def test_an_unspecified_max_model_len_is_what_fits(start_engine) -> None:
    engine = start_engine(cache=CacheConfig(num_gpu_blocks_override=10))
    assert engine.client().attach().ready.max_model_len == 160
    assert "max_model_len is 160" in engine.log()


def test_a_core_that_dies_while_it_loads_ends_the_start(start_engine) -> None:
    engine = start_engine({"load_seconds": 60})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    engine.core().kill()
    expect_end(client, "was killed by signal 9 (SIGKILL)", expected=False, started=False)
    engine.wait_gone()


def test_an_engine_can_be_ended_while_it_loads(start_engine) -> None:
    engine = start_engine({"load_seconds": 60})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    client.tell(Shutdown())
    expect_end(client, "was shut down", expected=True)
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
    second.host.wait(10)
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


# Leases.


def test_a_heartbeat_is_answered_and_a_stranger_is_told_so(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    client.heartbeat()
    client.hear(HeartbeatAck)
    stranger = engine.client()
    stranger.tell(Heartbeat())
    assert "no lease" in stranger.hear(LeaseLost).reason


def test_detaching_aborts_what_was_asked_for_and_is_answered(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    leaving, staying = engine.client().attach(), engine.client().attach()
    stats = staying.subscribe()
    leaving.add("r", [1], max_tokens=400)
    leaving.read_until(lambda: leaving.tokens("r"))
    leaving.tell(Detach())
    assert leaving.hear(LeaseLost).reason == "detached"
    idle = staying.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64
    assert staying.call("ping") == (None, "pong")


def test_a_lease_without_heartbeats_lapses_and_the_client_may_come_back(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01}, lease=1.0)
    engine.wait_ready()
    client = engine.client().attach()
    first_epoch = client.client_index
    client.add("r", [1], max_tokens=400)
    assert "no heartbeat for 1 s" in client.hear(LeaseLost).reason
    again = engine.client(session=client.session).attach()
    assert again.client_index > first_epoch
    again.add("r", [1], max_tokens=2)
    again.wait_finished("r")
    assert again.tokens("r") == [2, 3]


def test_heartbeats_keep_a_lease(start_engine) -> None:
    engine = start_engine(lease=1.0)
    engine.wait_ready()
    client = engine.client().attach()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        client.heartbeat()
        client.hear(HeartbeatAck)
        assert not client.host.poll(100)
    assert client.call("ping") == (None, "pong")


def test_a_new_attachment_of_a_session_replaces_the_old_one(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    old = engine.client(session="notebook").attach()
    old.add("r", [1], max_tokens=400)
    old.read_until(lambda: old.tokens("r"))
    new = engine.client(session="notebook").attach()
    assert "attached again" in old.hear(LeaseLost).reason
    new.add("r", [50], max_tokens=3)
    new.wait_finished("r")
    assert new.tokens("r") == [51, 52, 53]
    assert set(new.outputs) == {"r"}
    assert new.call("stats")[1][1:3] == [0, 0]


def test_a_client_whose_process_is_gone_loses_its_lease(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    watcher = engine.client().attach()
    stats = watcher.subscribe()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = engine.client(pid=bystander.pid).attach()
    client.add("r", [1], max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    bystander.kill()
    bystander.communicate()
    idle = watcher.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64
    assert str(bystander.pid) in client.hear(LeaseLost).reason


def test_an_engine_without_clients_ends_after_keep_alive(start_engine) -> None:
    engine = start_engine(keep_alive=0.4)
    client = engine.client().attach()
    assert not client.host.poll(800)
    client.tell(Detach())
    began = time.monotonic()
    engine.wait_gone()
    assert 0.3 < time.monotonic() - began < 5
    assert engine.host.returncode == 0


# The end.


def test_a_shutdown_aborts_streams_then_says_dead_then_expected(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    client, other = engine.client().attach(), engine.client().attach()
    for each in (client, other):
        each.add(f"r{each.client_index}", [1], max_tokens=400)
        each.read_until(lambda each=each: each.outputs)
    client.tell(Shutdown())
    for each in (client, other):
        each.wait_dead()
        assert each.finish_reason(f"r{each.client_index}") is FinishReason.ABORT
        expect_end(each, "the engine was shut down", expected=True)
    assert not engine.run_dir.exists()
    assert not connection_file(engine.name).exists()
    engine.wait_gone()


def test_a_draining_shutdown_finishes_what_runs_and_takes_nothing_new(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.02})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=30)
    client.read_until(lambda: client.tokens("r"))
    client.tell(Shutdown(drain=True))
    late = engine.client()
    late.tell(late.attach_message())
    assert late.hear(EngineDead).expected
    client.add("late", [1])
    client.wait_finished("late", "r")
    assert client.finish_reason("late") is FinishReason.ERROR
    assert len(client.tokens("r")) == 30
    engine.wait_gone()


def test_a_drain_can_be_cut_short(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.02})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    client.tell(Shutdown(drain=True))
    client.tell(Shutdown())
    client.wait_finished("r")
    assert client.finish_reason("r") is FinishReason.ABORT
    engine.wait_gone()


def test_anyone_with_the_connection_file_may_end_the_engine(start_engine) -> None:
    engine = start_engine()
    engine.client().attach()
    stranger = engine.client()
    stranger.tell(Shutdown())
    expect_end(stranger, "the engine was shut down", expected=True)
    engine.wait_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engine_in_order(start_engine, number) -> None:
    engine = start_engine()
    client = engine.client().attach()
    engine.host.send_signal(number)
    expect_end(client, f"ended by {number.name}", expected=True)
    engine.wait_gone()
    assert engine.host.returncode == 0


def test_an_interrupt_ends_nothing(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=20)
    client.read_until(lambda: client.tokens("r"))
    os.killpg(engine.host.pid, signal.SIGINT)
    client.wait_finished("r")
    assert len(client.tokens("r")) == 20
    assert client.call("ping") == (None, "pong")


def test_sigterm_to_the_core_ends_the_engine_in_order(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    engine.core().terminate()
    client.wait_dead()
    expect_end(client, "was ended by SIGTERM", expected=True)
    engine.wait_gone()


def test_a_failing_step_ends_every_stream_with_the_cause(start_engine) -> None:
    engine = start_engine({"fail_at_token": 13})
    client, other = engine.client().attach(), engine.client().attach()
    client.add("r", [10], max_tokens=50)
    for each in (client, other):
        each.wait_dead()
        dead = expect_end(each, "failed: RuntimeError: the model broke at token 13", expected=False)
        assert dead.log_tail.splitlines()[-1] == "RuntimeError: the model broke at token 13"
        assert "Traceback" in dead.log_tail
        assert "r: 1" in dead.log_tail
    assert client.tokens("r") == [11, 12]
    engine.wait_gone()


def test_kill_9_of_the_core_is_named_and_leaves_nothing(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    core = engine.core()
    core.kill()
    dead = expect_end(client, f"engine core 0 (pid {core.pid}) was killed by signal 9", expected=False)
    assert "engine core 0: 64 blocks" in dead.log_tail
    engine.wait_gone()


def test_kill_9_of_the_host_ends_the_core_and_its_files(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    engine.host.kill()
    client.wait_dead(2)
    engine.wait_gone(3)


def test_the_core_goes_with_its_host_even_in_the_middle_of_an_endless_step(start_engine) -> None:
    engine = start_engine({"step_seconds": 600})
    client = engine.client().attach()
    client.add("r", [1])
    wait_for(lambda: "an endless step begins" in engine.log(), "the step")
    engine.host.kill()
    client.wait_dead(2)
    engine.wait_gone(4)


def test_the_core_goes_with_its_host_while_it_loads(start_engine) -> None:
    engine = start_engine({"load_seconds": 600})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    engine.host.kill()
    engine.wait_gone(3)


def test_an_engine_stuck_in_a_step_is_killed_when_it_has_to_end(start_engine) -> None:
    engine = start_engine({"step_seconds": 600})
    client = engine.client().attach()
    client.add("r", [1])
    wait_for(lambda: "an endless step begins" in engine.log(), "the step")
    client.tell(Shutdown())
    expect_end(client, "the engine was shut down", expected=True)
    engine.wait_gone()


def test_a_bound_engine_ends_when_its_parents_pipe_closes(start_engine) -> None:
    engine, pipe = EngineUnderTest.with_parent_pipe(fake_config(bound=True))
    try:
        client = engine.client().attach()
        client.tell(Detach())
        client.hear(LeaseLost)
        assert engine.host.poll() is None
        os.close(pipe)
        engine.wait_gone()
        assert "the process that started it has ended" in engine.log()
    finally:
        engine.close()


PARENT = """
import json, sys
from process_support.engine_under_test import EngineUnderTest, fake_config
engine = EngineUnderTest(fake_config(bound=True))
print(json.dumps([engine.host.pid, engine.name, str(engine.run_dir), str(engine.log_path)]), flush=True)
input()
"""


def test_a_bound_engine_ends_when_its_parent_is_killed_and_there_is_no_pipe() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    pid, name, run_dir, log_path = json.loads(parent.stdout.readline())
    info = ConnectionInfo(
        name=name, run_dir=run_dir, log_path=log_path, host_pid=pid, host_create_time=0, config=fake_config()
    )
    client = RawClient(info)
    try:
        client.attach()
        parent.kill()
        expect_end(client, "the process that started it has ended", expected=True)
        wait_for(lambda: not psutil.pid_exists(pid), "the end of the host")
        assert not os.path.exists(run_dir)
    finally:
        parent.communicate()
        client.close()


# What the host makes of nonsense.


def test_malformed_control_messages_are_dropped(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    impostor = client._socket(zmq.DEALER)
    impostor.connect(engine.info.address("core.sock"))
    for socket in (client.host, impostor):
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x81\xa4type\xa7nothing"]):
            socket.send_multipart(frames)
    pusher = client._socket(zmq.PUSH)
    pusher.connect(engine.info.address("back-out.sock"))
    pusher.send(b"nonsense")
    client.heartbeat()
    client.hear(HeartbeatAck)
    assert client.call("ping") == (None, "pong")
    wait_for(lambda: "dropped a message to the coordinator" in engine.log(), "the log of the coordinator")


# Statistics.


def test_a_late_subscriber_gets_the_state_at_once_and_the_idle_state_last(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.002})
    client = engine.client().attach()
    client.add("r", [1] * 20, max_tokens=100)
    client.wait_finished("r")
    late = client.subscribe()
    first = client.read_stats(late)
    assert first.engines[0].step_counter > 0
    client.add("s", [1] * 20, max_tokens=200)
    seen = []
    client.read_stats(late, lambda s: seen.append(s) or s.engines_running)
    began = time.monotonic()
    client.read_stats(late, lambda s: seen.append(s) or not s.engines_running)
    elapsed = time.monotonic() - began
    assert len(seen) <= 4 + elapsed / 0.1
    assert seen[-1].engines[0].num_free_blocks == 64
    steps = [snapshot.engines[0].step_counter for snapshot in seen]
    assert steps == sorted(steps)
