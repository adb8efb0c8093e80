"""What the host has to know of a model whose engine cores work in lock step, to change their number."""

from __future__ import annotations

from dataclasses import replace

from nbengine.client.connection import ConnectionInfo
from nbengine.config import EngineConfig
from nbengine.engine.scaling import LockStep
from nbengine.errors import InvalidArgumentError


def lock_step_of(info: ConnectionInfo) -> LockStep | None:
    """Where the engine cores meet, and how many there can be; None if they are independent."""
    if not info.config.lock_step:
        return None
    # Files are a place to meet at on one machine only.
    place = "" if info.keys is not None else f"file://{info.tensor_dir or info.run_dir}/rendezvous-change"
    return LockStep(place, lambda size: _misfit(info.config, size))


def _misfit(config: EngineConfig, size: int) -> str | None:
    from nbengine.models.hf_config import load_hf_config
    from nbengine.models.sharding import check_parallel

    if not config.model.resolved:
        # An executor of somebody's own, which knows no such files, must see for itself.
        return None
    try:
        check_parallel(load_hf_config(config.model), replace(config.parallel, data_parallel_size=size))
    except InvalidArgumentError as error:
        return str(error)
    return None
