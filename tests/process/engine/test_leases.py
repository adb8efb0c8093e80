"""Attaching, and every way in which a lease ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from process_support.engine_under_test import EngineUnderTest, fake_config, wait_for
from process_support.raw_client import RawClient

from nbengine.config import CacheConfig
from nbengine.ipc.control_messages import Detach, EngineDead, Heartbeat, HeartbeatAck, LeaseLost, Refused
from nbengine.ipc.protocol import PROTOCOL
from nbengine.runtime.connection import engine_file


@pytest.fixture(scope="module")
def engine(private_runtime_dir: Path, private_socket_dir: Path) -> Iterator[EngineUnderTest]:
    """One engine, with steps of 10 ms, for the tests that do not end it."""
    engine = EngineUnderTest(fake_config({"step_seconds": 0.01}))
    engine.wait_ready()
    yield engine
    engine.close()


@pytest.fixture
def new_client(engine: EngineUnderTest) -> Iterator[Callable[..., RawClient]]:
    """Make clients, not attached yet; those that are attached at the end are detached."""
    clients: list[RawClient] = []

    def make(**kwargs) -> RawClient:
        clients.append(RawClient(engine.info, **kwargs))
        return clients[-1]

    yield make
    for client in clients:
        client.heartbeat()
        if isinstance(client.hear((HeartbeatAck, LeaseLost)), HeartbeatAck):
            client.leave()
        client.close()


def test_a_heartbeat_is_answered_and_a_stranger_is_told_so(new_client) -> None:
    client = new_client().attach()
    client.heartbeat()
    client.hear(HeartbeatAck)
    stranger = new_client()
    stranger.tell(Heartbeat())
    assert "no lease" in stranger.hear(LeaseLost).reason


def test_detaching_aborts_what_was_asked_for_and_is_answered(new_client) -> None:
    leaving, staying = new_client().attach(), new_client().attach()
    stats = staying.subscribe()
    leaving.add("r", [1], max_tokens=400)
    leaving.read_until(lambda: leaving.tokens("r"))
    leaving.tell(Detach())
    assert leaving.hear(LeaseLost).reason == "detached"
    idle = staying.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64
    assert staying.call("ping") == (None, "pong")


def test_a_silent_client_keeps_its_lease_while_its_process_runs_and_else_may_come_back(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01}, lease=3.0)
    engine.wait_ready()
    silent = engine.client().attach()
    silent.add("s", [1], max_tokens=400)
    bystander = subprocess.Popen(["sleep", "60"])
    stopped = engine.client(pid=bystander.pid).attach()
    client = engine.client(pid=0).attach()
    first_epoch = client.client_index
    client.add("r", [1], max_tokens=400)
    bystander.send_signal(signal.SIGSTOP)
    assert client.hear(LeaseLost).reason == "no heartbeat for 3 s"
    assert stopped.hear(LeaseLost).reason.endswith(f"; process {bystander.pid} is stopped")
    bystander.kill()
    bystander.wait()
    silent.heartbeat()
    silent.hear(HeartbeatAck)
    silent.read_until(lambda: len(silent.tokens("s")) > 100)
    again = engine.client(session=client.session).attach()
    assert again.client_index > first_epoch
    again.add("r", [1], max_tokens=2)
    again.wait_finished("r")
    assert again.tokens("r") == [2, 3]


def test_heartbeats_keep_a_lease(start_engine) -> None:
    engine = start_engine(lease=4.0)
    engine.wait_ready()
    client = engine.client(pid=0).attach()
    end = time.monotonic() + 4.5
    while time.monotonic() < end:
        client.heartbeat()
        client.hear(HeartbeatAck)
        assert not client.host.poll(100)
    assert client.call("ping") == (None, "pong")


def test_a_new_attachment_of_a_session_replaces_the_old_one(new_client) -> None:
    old = new_client(session="notebook").attach()
    old.add("r", [1], max_tokens=400)
    old.read_until(lambda: old.tokens("r"))
    new = new_client(session="notebook").attach()
    assert "attached again" in old.hear(LeaseLost).reason
    new.add("r", [50], max_tokens=3)
    new.wait_finished("r")
    assert new.tokens("r") == [51, 52, 53]
    assert set(new.outputs) == {"r"}
    assert new.call("stats")[1][1:3] == [0, 0]


def test_a_client_whose_process_is_gone_loses_its_lease(new_client) -> None:
    watcher = new_client().attach()
    stats = watcher.subscribe()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = new_client(pid=bystander.pid).attach()
    client.add("r", [1], max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    bystander.kill()
    bystander.communicate()
    idle = watcher.read_stats(stats, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert idle.engines[0].num_free_blocks == 64
    assert str(bystander.pid) in client.hear(LeaseLost).reason


def test_a_client_of_another_protocol_is_refused_in_one_line_and_nobody_else_notices(new_client) -> None:
    bystander, older, newer = new_client().attach(), new_client(), new_client()
    # As the first protocol sent it, without its number and with a start time.
    old = {"type": "attach", "session": "old", "pid": 1, "create_time": 1.5, "replaces": 0}
    older.host.send(msgspec.msgpack.encode(old | {"input_address": "ipc:///a", "output_address": "ipc:///b"}))
    notice = older.hear(EngineDead)
    said = f"speaks protocol {PROTOCOL} of nbengine, this kernel or program protocol 1: restart this"
    assert said in notice.cause
    assert "\n" not in notice.cause + notice.log_tail
    newer.host.send(
        msgspec.msgpack.encode({"type": "attach", "protocol": 99, "session": ["another", "thing"]})
    )
    assert "this kernel or program protocol 99: restart the engine" in newer.hear(Refused).reason
    assert bystander.call("ping") == (None, "pong")


def test_a_host_that_was_started_by_another_protocol_ends_with_one_line(tmp_path: Path) -> None:
    content = b'{"name": "e", "run_dir": "/r", "host_pid": 0, "host_create_time": 0.0, "config": {}}'
    engine_file(tmp_path).write_bytes(content)
    engine_file(tmp_path).chmod(0o600)
    command = [sys.executable, "-m", "nbengine.engine", "host", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"the processes of the engine in {tmp_path} speak protocols 1 and {PROTOCOL} of nbengine"
    )
    assert "restart the kernel or program that starts it" in line


def test_an_engine_without_clients_ends_after_keep_alive(start_engine) -> None:
    engine = start_engine(keep_alive=0.4)
    client = engine.client().attach()
    assert not client.host.poll(800)
    began = time.monotonic()
    client.tell(Detach())
    engine.wait_gone()
    assert 0.3 < time.monotonic() - began < 60
    assert engine.host.returncode == 0


def test_malformed_control_messages_are_dropped(engine, new_client) -> None:
    client = new_client().attach()
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


def test_a_late_subscriber_gets_the_state_at_once_and_the_idle_state_last(start_engine) -> None:
    engine = start_engine(
        {"step_seconds": 0.002, "max_position_embeddings": 4096},
        cache=CacheConfig(num_gpu_blocks_override=300),
    )
    client = engine.client().attach()
    early = client.subscribe()
    client.add("r", [1] * 20, max_tokens=100)
    client.wait_finished("r")
    # The host may learn of the steps after the client has their tokens.
    client.read_stats(early, lambda s: s.engines[0].step_counter and not s.engines_running)
    late = client.subscribe()
    first = client.read_stats(late)
    assert first.engines[0].step_counter > 0
    client.add("s", [1] * 20, max_tokens=4000)
    seen = []
    client.read_stats(late, lambda s: seen.append(s) or s.engines_running)
    client.read_until(lambda: len(client.tokens("s")) >= 150)
    client.abort("s")
    client.read_stats(late, lambda s: seen.append(s) or not s.engines_running)
    # By the host's own clock: this process may read late.
    elapsed = seen[-1].timestamp - seen[0].timestamp
    assert len(seen) <= 4 + elapsed / 0.1
    assert seen[-1].engines[0].num_free_blocks == 300
    steps = [snapshot.engines[0].step_counter for snapshot in seen]
    assert steps == sorted(steps)
