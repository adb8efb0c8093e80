"""The part of a worker in a change of the number of engine cores in lock step, between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import ParallelState, SingleGroup
from nbengine.distributed.data_parallel import DataParallelEnd
from nbengine.errors import NBEngineError
from nbengine.models.causal_model import CausalModel
from nbengine.models.checkpoints.loader import read_weights
from nbengine.models.division import check_parallel
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.redivision import Redivision
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.worker.joining import data_parallel_group


def resized(config: EngineConfig, size: int, init_method: str) -> EngineConfig:
    """Return the configuration of one of `size` engine cores, which meet at a new place."""
    parallel = replace(
        config.parallel,
        data_parallel_size=size,
        data_parallel_init_method=init_method,
        data_parallel_joins_later=False,
    )
    return replace(config, parallel=parallel)


def change_group(
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    model: CausalModel | EncoderModel,
    parallel: ParallelState,
    files: ExecutorFiles | None,
    before: int,
) -> ParallelState:
    """Go from `before` engine cores to as many as `config` has now, and bring the model's weights in order.

    If there are more engine cores than before, all of them meet first, and the new ones get their weights
    from the others. If there are fewer, those that leave hand over their experts, and have no group
    afterwards.

    Raises:
        EngineStartError: the others cannot be reached.
        InvalidArgumentError: that many engine cores cannot divide the experts; nothing has been exchanged.
        ModelLoadError: experts have to be read, and the files are no longer those of the model.
        NBEngineError: the engine cores of this model do not work in lock step.
    """
    end, after = parallel.dp, config.parallel.data_parallel_size
    if not isinstance(end, DataParallelEnd) or isinstance(model, EncoderModel):
        raise NBEngineError("the number of engine cores concerns only those in lock step")
    check_parallel(hf_config, config.parallel)
    layout = replace(parallel.layout, dp_size=after)
    changed = replace(parallel, layout=layout)

    def meet() -> None:
        stays = layout.dp_rank < after
        end.switch(
            data_parallel_group(config, hf_config, layout, files, model.device, model.hidden_dtype)
            if stays
            else SingleGroup()
        )

    if after > before:
        meet()
    paths = tuple(map(Path, config.model.weights))
    Redivision(before, after, end, changed).run(model, partial(read_weights, model, paths=paths))
    if after < before:
        meet()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return changed
