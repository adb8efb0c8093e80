"""What an engine asks of a cluster."""

from __future__ import annotations

from nbengine.config import EngineConfig

Bundle = dict[str, float]


def core_bundle(config: EngineConfig) -> Bundle:
    """What an engine core takes of its node: room for its workers, unless they have places of their own."""
    num_here = 1 if config.parallel.distributed_executor_backend == "ray" else config.parallel.world_size
    if config.model.device == "cuda" and config.parallel.distributed_executor_backend != "ray":
        return {"CPU": 1.0, "GPU": float(num_here)}
    return {"CPU": float(num_here)}


def worker_bundle(config: EngineConfig) -> Bundle:
    """What one worker takes of its node."""
    return {"CPU": 1.0, "GPU": 1.0} if config.model.device == "cuda" else {"CPU": 1.0}
