"""An engine asks a cluster for places, says what is missing when it has none, and takes the best nodes
first."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from nbengine.cluster.describe import describe_ray_error, no_cluster, no_room
from nbengine.cluster.models import with_model_here
from nbengine.cluster.resources import core_bundle, worker_bundle
from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.executor.ray import node_order
from nbengine.models.checkpoints.files import resolve_model


def config(device: str = "cpu", **parallel: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(device=device), parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("asked", "core", "worker"),
    [
        (config(), {"CPU": 1}, {"CPU": 1}),
        (config(tensor_parallel_size=2, pipeline_parallel_size=3), {"CPU": 6}, {"CPU": 1}),
        (config(tensor_parallel_size=2, ray_cpus_per_worker=4), {"CPU": 8}, {"CPU": 4}),
        (config("cuda", tensor_parallel_size=2), {"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 1}),
        (
            config("cuda", tensor_parallel_size=2, distributed_executor_backend="ray"),
            {"CPU": 1},
            {"CPU": 1, "GPU": 1},
        ),
    ],
)
def test_a_core_takes_what_its_workers_need_unless_they_have_places(
    asked: EngineConfig, core: dict[str, float], worker: dict[str, float]
) -> None:
    assert core_bundle(asked) == core
    assert worker_bundle(asked) == worker


def test_a_full_cluster_is_described_by_its_living_nodes() -> None:
    def node(name: str, alive: bool, **resources: float) -> dict[str, object]:
        return {
            "NodeID": name,
            "Alive": alive,
            "NodeManagerHostname": f"h{name}",
            "NodeManagerAddress": f"10.0.0.{name}",
            "Resources": resources | {"memory": 1e9, "node:10.0.0.1": 1.0},
        }

    nodes = [node("1", True, CPU=4, GPU=2), node("2", False, CPU=64), node("3", True)]
    said = no_room([{"CPU": 2, "GPU": 2}], 5, nodes, {"1": {"CPU": 1.0, "CPU_group_0_ab": 3.0}})
    assert said == (
        "the Ray cluster had no room for 1 x 2 CPU, 2 GPU within 5 s: "
        "h1 (10.0.0.1) has 1 CPU free of 4 CPU, 2 GPU; h3 (10.0.0.3) has nothing free of nothing"
    )


def test_a_node_without_the_package_is_told_what_to_install() -> None:
    error = RuntimeError("The actor failed to import\nModuleNotFoundError: No module named 'nbengine'")
    assert "install it on all nodes" in describe_ray_error(error)
    assert describe_ray_error(ValueError("")) == "ValueError"


def test_a_cluster_that_is_not_there_is_told_how_to_start() -> None:
    assert "on this machine (why); start one with `ray start --head`" in no_cluster("auto", "why")
    assert "at 10.0.0.1:6379 (why)" in no_cluster("10.0.0.1:6379", "why")


def test_nodes_with_most_places_come_first_in_the_order_of_their_coming() -> None:
    assert node_order(["a", "b", "c", "b", "c"]) == ["b", "c", "a"]


def test_workers_of_a_cluster_need_a_place_on_the_network_to_meet() -> None:
    with pytest.raises(InvalidArgumentError, match="distributed_init_method must be None or 'tcp"):
        config(distributed_executor_backend="ray", distributed_init_method="file:///tmp/x")


def test_engine_cores_in_lock_step_keep_their_workers_with_them() -> None:
    parallel = ParallelConfig(data_parallel_size=2, distributed_executor_backend="ray")
    with pytest.raises(InvalidArgumentError, match="distributed_executor_backend must be None or 'mp'"):
        EngineConfig(model=ModelConfig(is_moe=True), parallel=parallel)


def test_a_node_that_lacks_the_files_finds_the_model_again(tmp_path: Path) -> None:
    found = EngineConfig(model=resolve_model(ModelConfig("random-tiny")))
    assert with_model_here(found) is found
    elsewhere = replace(found, model=replace(found.model, directory=str(tmp_path / "not here")))
    assert with_model_here(elsewhere).model == found.model


def test_a_node_that_cannot_find_the_model_is_named(tmp_path: Path) -> None:
    model = ModelConfig(str(tmp_path / "gone"), directory=str(tmp_path / "gone"))
    with pytest.raises(ModelLoadError, match=rf"node {socket.gethostname()} does not have {tmp_path}/gone"):
        with_model_here(EngineConfig(model=model))
