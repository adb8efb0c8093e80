"""Fake workers on the nodes of a Ray cluster."""

from __future__ import annotations

from dataclasses import replace

from process_support.fake_worker import fake_workers_config

from nbengine.config import EngineConfig
from nbengine.executor.ray import RayExecutor

FAKE_RAY_EXECUTOR = "process_support.fake_ray:FakeRayExecutor"


class FakeRayExecutor(RayExecutor):
    worker_class = "process_support.fake_worker:FakeWorker"


def fake_ray_config(address: str, tp: int = 2, **knobs) -> EngineConfig:
    config = fake_workers_config(tp, **knobs)
    parallel = replace(
        config.parallel,
        distributed_executor_backend=FAKE_RAY_EXECUTOR,
        ray_address=address,
        ray_timeout=20.0,
    )
    return replace(config, parallel=parallel)
