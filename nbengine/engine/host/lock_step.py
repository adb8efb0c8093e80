"""The facts about a model in lock step that the host needs to change the number of engine cores."""

from __future__ import annotations

from dataclasses import replace

from nbengine.config import EngineConfig
from nbengine.engine.host.scaling import LockStep
from nbengine.errors import InvalidArgumentError
from nbengine.runtime.connection import ConnectionInfo


def lock_step_of(info: ConnectionInfo) -> LockStep | None:
    """Find the engine cores' meeting place and the check of their number; None if they are independent."""
    if not info.config.lock_step:
        return None
    # Processes can meet at a file on one machine only.
    place = "" if info.keys is not None else f"file://{info.tensor_dir or info.run_dir}/rendezvous-change"
    return LockStep(place, lambda size: _misfit(info.config, size))


def _misfit(config: EngineConfig, size: int) -> str | None:
    from nbengine.models.configs.hf_config import load_hf_config
    from nbengine.models.division import check_parallel

    if not config.model.resolved:
        # A custom executor, whose model has no such files, must check by itself.
        return None
    try:
        check_parallel(load_hf_config(config.model), replace(config.parallel, data_parallel_size=size))
    except InvalidArgumentError as error:
        return str(error)
    return None
