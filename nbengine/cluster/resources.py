"""The resources that the processes of an engine take from a cluster's nodes."""

from __future__ import annotations

from nbengine.config import EngineConfig

Bundle = dict[str, float]


def core_bundle(config: EngineConfig) -> Bundle:
    """Return the resources of an engine core: those of its workers, unless these have their own places."""
    if config.parallel.distributed_executor_backend == "ray":
        return {"CPU": 1.0}
    return {name: amount * config.parallel.world_size for name, amount in worker_bundle(config).items()}


def worker_bundle(config: EngineConfig) -> Bundle:
    """Return the resources of one worker: CPUs, and a GPU if `device` says so."""
    bundle = {"CPU": float(config.parallel.ray_cpus_per_worker)}
    return bundle | {"GPU": 1.0} if config.model.device == "cuda" else bundle
