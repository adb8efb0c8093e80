"""Two Ray nodes with addresses of their own: calls, tensors and statistics really cross a network."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import EngineUnderTest, fake_config
from process_support.namespaces import TwoMachines, why_not
from process_support.ray_cluster import START, RayCluster, on_cluster

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model
from nbengine.runtime.connection import connection_file

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    machines = TwoMachines()
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def cluster(machines: TwoMachines) -> Iterator[RayCluster]:
    """A node on each of them, with a CPU."""
    places = ((machines.here, machines.here_address), (machines.there, machines.there_address))
    cluster = RayCluster([{"CPU": 1}, {"CPU": 1}], places)
    yield cluster
    cluster.close()


def test_a_notebook_beside_one_engine_core_uses_both(
    cluster: RayCluster,
    machines: TwoMachines,
    private_runtime_dir: Path,
    private_socket_dir: Path,
    tmp_path: Path,
) -> None:
    parallel = on_cluster(cluster, data_parallel_address=machines.here_address)
    config = fake_config({"vocab_size": 260}, parallel=parallel)
    # The client needs a tokenizer.
    model = resolve_model(dataclasses.replace(config.model, model="random-tiny"))
    engine = EngineUnderTest(dataclasses.replace(config, model=model), prefix=machines.on_here())
    try:
        engine.wait_ready(START)
        client = machines.client(
            connection_file(engine.name), tmp_path / "home", [private_runtime_dir, private_socket_dir]
        )
        assert "end" in client.hear("attach"), engine.log()
        for number in range(6):
            client.say("generate", f"r{number}", 10 * number, 20)
        for number in range(6):
            tokens, last = client.collect(f"r{number}")
            assert tokens == list(range(10 * number + 1, 10 * number + 21))
            assert "end" in last
        client.say("stats")
        assert client.hear(stats=...)["stats"] > 0
        client.close()
    finally:
        engine.close()


def test_workers_on_two_machines_compute_together(
    cluster: RayCluster,
    machines: TwoMachines,
    private_runtime_dir: Path,
    private_socket_dir: Path,
    tmp_path: Path,
) -> None:
    parallel = on_cluster(
        cluster,
        1,
        tensor_parallel_size=2,
        data_parallel_backend="mp",
        distributed_executor_backend="ray",
        data_parallel_address=machines.here_address,
    )
    model = resolve_model(ModelConfig("random-tiny", dtype="float32", device="cpu"))
    config = dataclasses.replace(fake_config(parallel=parallel), model=model)
    engine = EngineUnderTest(config, prefix=machines.on_here())
    try:
        engine.wait_ready(START)
        assert [len(node.engine_processes("nbengine: worker ")) for node in cluster.nodes] == [1, 1]
        [worker] = cluster.nodes[1].engine_processes("nbengine: worker ")
        here = socket.inet_aton(machines.here_address)[::-1].hex().upper()
        assert here in Path(f"/proc/{worker.pid}/net/tcp").read_text()
        client = machines.client(
            connection_file(engine.name), tmp_path / "home", [private_runtime_dir, private_socket_dir]
        )
        assert "end" in client.hear("attach"), engine.log()
        client.say("generate", "r", 5, 20)
        tokens, last = client.collect("r")
        assert len(tokens) == 20
        assert "end" in last
        client.close()
    finally:
        engine.close()
