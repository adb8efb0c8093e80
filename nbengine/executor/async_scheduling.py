"""Whether steps are planned ahead of the tokens that they need."""

from __future__ import annotations

from nbengine.config import EngineConfig


def schedules_asynchronously(config: EngineConfig) -> bool:
    """As configured; else on a GPU, where it hides what a step costs the CPU. On a CPU the model leaves no core idle to
    hide it on, and with several pipeline stages other steps fill the time.

    To be asked where the model runs: it may have to look for a device.
    """
    wanted = config.scheduler.async_scheduling
    if wanted is not None:
        return wanted
    if config.parallel.pipeline_parallel_size > 1:
        return False
    from nbengine.models.registry import resolve_device

    return resolve_device(config.model).type != "cpu"
