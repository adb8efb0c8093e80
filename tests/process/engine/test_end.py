"""Every way in which an engine ends: who is told what, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import EngineUnderTest, fake_config, wait_for
from process_support.fake_executor import VOCAB_SIZE
from process_support.raw_client import RawClient

from nbengine.ipc.control_messages import Detach, EngineDead, HeartbeatAck, LeaseLost, Progress, Shutdown
from nbengine.ipc.liveness import ProcessIdentity, identity_of, is_alive
from nbengine.ipc.messages import FinishReason
from nbengine.runtime.connection import ConnectionInfo, connection_file


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
        each.expect_end("the engine was shut down", expected=True)
    assert not engine.run_dir.exists()
    assert not connection_file(engine.name).exists()
    engine.wait_gone()


def test_a_draining_shutdown_finishes_what_runs_and_takes_nothing_new(start_engine, tmp_path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    engine = start_engine({"hold": str(hold)})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=30)
    wait_for(lambda: "a step is held" in engine.log(), "the step")
    client.tell(Shutdown(drain=True))
    # When this is answered the host has read what came before it.
    client.heartbeat()
    client.hear(HeartbeatAck)
    late = engine.client()
    late.tell(late.attach_message())
    assert late.hear(EngineDead).expected
    client.add("late", [1])
    # The thread that reads refuses this one itself: what came before it has been read.
    client.add("refused", [VOCAB_SIZE])
    client.wait_finished("refused")
    hold.unlink()
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
    stranger.expect_end("the engine was shut down", expected=True)
    engine.wait_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engine_in_order(start_engine, number) -> None:
    engine = start_engine()
    client = engine.client().attach()
    engine.host.send_signal(number)
    client.expect_end(f"ended by {number.name}", expected=True)
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
    client.expect_end("was ended by SIGTERM", expected=True)
    engine.wait_gone()


def test_a_failing_step_ends_every_stream_with_the_cause(start_engine) -> None:
    engine = start_engine({"fail_at_token": 13})
    client, other = engine.client().attach(), engine.client().attach()
    client.add("r", [10], max_tokens=50)
    for each in (client, other):
        each.wait_dead()
        dead = each.expect_end("failed: RuntimeError: the model broke at token 13", expected=False)
        assert dead.log_tail.splitlines()[-1] == "RuntimeError: the model broke at token 13"
        assert "Traceback" in dead.log_tail
        assert "r: 1" in dead.log_tail
    assert client.tokens("r") == [11, 12]
    engine.wait_gone()


def check_nothing_left(engine: EngineUnderTest, core: ProcessIdentity | None) -> None:
    """Check that neither the engine core nor a file is left of an engine whose host has been killed."""
    assert engine.host.returncode == -signal.SIGKILL
    assert core is not None
    assert not is_alive(core)
    places = (engine.run_dir, Path(engine.info.tensor_dir), connection_file(engine.name))
    assert [path for path in places if path.exists()] == []


def test_kill_9_of_the_core_is_named_and_leaves_nothing(start_engine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    core = engine.core()
    core.kill()
    dead = client.expect_end(f"engine core 0 (pid {core.pid}) was killed by signal 9", expected=False)
    assert "engine core 0: 64 blocks" in dead.log_tail
    engine.wait_gone()


def test_kill_9_of_the_host_ends_the_core_and_its_files(start_engine) -> None:
    engine = start_engine({"step_seconds": 0.01})
    client = engine.client().attach()
    client.add("r", [1], max_tokens=400)
    client.read_until(lambda: client.tokens("r"))
    core = identity_of(engine.core().pid)
    engine.host.kill()
    client.wait_dead()
    engine.wait_gone()
    assert not client.finished("r")
    check_nothing_left(engine, core)


def test_the_core_goes_with_its_host_even_in_the_middle_of_an_endless_step(start_engine) -> None:
    engine = start_engine({"step_seconds": 600})
    client = engine.client().attach()
    client.add("r", [1])
    wait_for(lambda: "an endless step begins" in engine.log(), "the step")
    core = identity_of(engine.core().pid)
    engine.host.kill()
    client.wait_dead()
    engine.wait_gone()
    assert client.tokens("r") == []
    check_nothing_left(engine, core)


def test_the_core_goes_with_its_host_while_it_loads(start_engine) -> None:
    engine = start_engine({"load_seconds": 600})
    client = engine.client()
    client.tell(client.attach_message())
    client.hear(Progress)
    core = identity_of(engine.core().pid)
    engine.host.kill()
    engine.wait_gone()
    check_nothing_left(engine, core)


def test_an_engine_stuck_in_a_step_is_killed_when_it_has_to_end(start_engine) -> None:
    engine = start_engine({"step_seconds": 600})
    client = engine.client().attach()
    client.add("r", [1])
    wait_for(lambda: "an endless step begins" in engine.log(), "the step")
    client.tell(Shutdown())
    client.expect_end("the engine was shut down", expected=True)
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


def test_a_bound_engine_ends_when_its_parent_is_killed_even_without_a_pipe() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    pid, name, run_dir, log_path = json.loads(parent.stdout.readline())
    info = ConnectionInfo(
        name=name, run_dir=run_dir, log_path=log_path, host_pid=pid, host_started=0, config=fake_config()
    )
    client = RawClient(info)
    try:
        client.attach()
        parent.kill()
        client.expect_end("the process that started it has ended", expected=True)
        wait_for(lambda: not psutil.pid_exists(pid), "the end of the host")
        assert not os.path.exists(run_dir)
    finally:
        parent.communicate()
        client.close()
