"""The choice whether steps are planned ahead of the tokens that they need."""

from __future__ import annotations

from nbengine.config import EngineConfig


def schedules_asynchronously(config: EngineConfig) -> bool:
    """Return whether steps are planned ahead: as configured, or else on a GPU.

    On a GPU that hides a step's cost on the CPU. On a CPU the model leaves no core idle for it, and with
    several pipeline stages other steps fill the time.

    Call this where the model runs: it may have to look for a device.
    """
    wanted = config.scheduler.async_scheduling
    if wanted is not None:
        return wanted
    if config.parallel.pipeline_parallel_size > 1:
        return False
    from nbengine.models.loading import resolve_device

    return resolve_device(config.model).type != "cpu"
