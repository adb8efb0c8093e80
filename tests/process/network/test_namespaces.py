"""Engine and client on two machines: TCP, CURVE, leases and statistics really cross a network."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, EngineUnderTest, fake_config
from process_support.namespaces import FarClient, TwoMachines, why_not
from stopping import stop

from nbengine.config import ParallelConfig
from nbengine.models.checkpoints.files import resolve_model
from nbengine.runtime.connection import connection_file, remove_engine_files

LEASE = 8.0
SLACK = 20.0
"""Seconds that a busy machine may add: together they are fewer than a lease has unless it is told otherwise."""

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture(scope="module")
def machines(no_leftovers_of_module: None) -> Iterator[TwoMachines]:
    machines = TwoMachines()
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def engine(machines: TwoMachines) -> Iterator[EngineUnderTest]:
    """An engine here, a token a step of 20 ms, for all tests of this file up to the one that kills it."""
    knobs = {"vocab_size": 260, "step_seconds": 0.02}
    config = fake_config(
        knobs,
        lease=LEASE,
        parallel=ParallelConfig(
            distributed_executor_backend=FAKE_EXECUTOR,
            data_parallel_size=2,
            data_parallel_address=machines.here_address,
        ),
    )
    # The client needs a tokenizer.
    model = resolve_model(dataclasses.replace(config.model, model="random-tiny"))
    config = dataclasses.replace(config, model=model)
    engine = EngineUnderTest(config, prefix=machines.on_here())
    # A core that came later would be found by the first test, and kept against it.
    engine.wait_ready()
    yield engine
    engine.close()


@pytest.fixture
def far_client(
    machines: TwoMachines,
    engine: EngineUnderTest,
    private_runtime_dir: Path,
    private_socket_dir: Path,
    tmp_path: Path,
) -> Iterator[FarClient]:
    """A client there that has nothing of the engine's but a copy of its connection file."""
    hidden = [private_runtime_dir, private_socket_dir, Path("/dev/shm")]
    client = machines.client(connection_file(engine.name), tmp_path / "home", hidden)
    assert "end" in client.hear("attach"), engine.log()
    yield client
    client.close()


def test_a_client_on_another_machine_uses_the_engine_and_outlives_its_missing_pid(
    engine: EngineUnderTest, machines: TwoMachines, far_client: FarClient
) -> None:
    assert engine.info.address("host.sock").startswith(f"tcp://{machines.here_address}:")
    for number in range(6):
        far_client.say("generate", f"r{number}", 10 * number, 20)
    for number in range(6):
        tokens, last = far_client.collect(f"r{number}")
        assert tokens == list(range(10 * number + 1, 10 * number + 21))
        assert "end" in last
    far_client.say("stats")
    assert far_client.hear(stats=...)["stats"] > 0
    far_client.say("memory")
    assert far_client.hear(tensors=...)["tensors"] is False
    # Several looks at the clients' processes, and heartbeats enough to renew the lease.
    far_client.say("generate", "long", 0, 450)
    tokens, last = far_client.collect("long")
    assert len(tokens) == 450
    assert "end" in last
    assert "is gone" not in engine.log()


def test_a_cable_that_is_out_for_long_ends_requests_with_an_error_and_can_be_plugged_in_again(
    engine: EngineUnderTest, machines: TwoMachines, far_client: FarClient
) -> None:
    far_client.say("generate", "r", 0, 100_000)
    assert far_client.hear("r")["tokens"]
    machines.pull_cable()
    pulled = time.monotonic()
    _, last = far_client.collect("r")
    assert last["error"] == "LeaseExpiredError"
    assert "the connection to its host broke" in last["message"]
    assert time.monotonic() - pulled < LEASE + SLACK
    machines.plug_cable()
    far_client.say("generate", "again", 0, 5)
    tokens, last = far_client.collect("again")
    while last.get("error") == "LeaseExpiredError":
        time.sleep(0.05)
        far_client.say("generate", "again", 0, 5)
        tokens, last = far_client.collect("again")
    assert tokens == [1, 2, 3, 4, 5]
    assert "end" in last


def test_a_cable_that_stays_out_leaves_the_engine_out_of_reach(
    engine: EngineUnderTest, machines: TwoMachines, far_client: FarClient
) -> None:
    far_client.say("generate", "r", 0, 100_000)
    assert far_client.hear("r")["tokens"]
    machines.pull_cable()
    far_client.collect("r")
    far_client.say("generate", "later", 0, 1)
    last = far_client.collect("later")[1]
    while last["error"] != "EngineDeadError":
        time.sleep(0.05)
        far_client.say("generate", "later", 0, 1)
        last = far_client.collect("later")[1]
    assert "out of reach at tcp://" in last["message"]
    # The engine has given the client up, too, and goes on.
    assert engine.host.poll() is None
    machines.plug_cable()


def test_a_client_hears_that_the_engine_was_killed(engine: EngineUnderTest, far_client: FarClient) -> None:
    far_client.say("generate", "r", 0, 100_000)
    assert far_client.hear("r")["tokens"]
    killed = time.monotonic()
    processes = engine.processes()
    stop(*(process.pid for process in processes))
    # The host last: the kernel wakes stopped cores whose host has gone.
    for process in reversed(processes):
        process.kill()
    engine.host.wait()
    # Nothing of it is left that could; elsewhere `reap` would come upon its files.
    remove_engine_files(engine.info)
    _, last = far_client.collect("r")
    assert last["error"] in ("EngineDeadError", "LeaseExpiredError")
    far_client.say("generate", "later", 0, 1)
    while far_client.collect("later")[1]["error"] != "EngineDeadError":
        far_client.say("generate", "later", 0, 1)
        time.sleep(0.05)
    assert time.monotonic() - killed < LEASE + SLACK
