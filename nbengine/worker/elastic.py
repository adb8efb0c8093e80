"""How a worker goes along when the number of engine cores in lock step changes, between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import ParallelState, SingleGroup
from nbengine.distributed.data_parallel import DataParallelEnd
from nbengine.errors import NBEngineError
from nbengine.executor.files import ExecutorFiles
from nbengine.models.bert import BertModel
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.redivision import Redivision
from nbengine.models.sharding import check_parallel
from nbengine.worker.joining import data_parallel_group


def resized(config: EngineConfig, size: int, init_method: str) -> EngineConfig:
    """The configuration of one of `size` engine cores, which meet at a new place."""
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
    model: DecoderForCausalLM | BertModel,
    parallel: ParallelState,
    files: ExecutorFiles | None,
    before: int,
) -> ParallelState:
    """Go from `before` engine cores to as many as `config` has now, and bring the model's weights in order.

    If there are more than before, all of them meet first, and the new ones get their weights from the others. If there are
    fewer, those that leave hand over their experts, and have no group afterwards.

    Raises:
        EngineStartError: the others cannot be reached.
        InvalidArgumentError: so many cannot divide the experts; nothing has been exchanged.
        NBEngineError: the engine cores of this model do not work in lock step.
    """
    end, after = parallel.dp, config.parallel.data_parallel_size
    if not isinstance(end, DataParallelEnd) or not isinstance(model, DecoderForCausalLM):
        raise NBEngineError("the number of engine cores concerns only those in lock step")
    check_parallel(hf_config, config.parallel)
    layout = replace(parallel.layout, dp_size=after)
    changed = replace(parallel, layout=layout)

    def meet() -> None:
        stays = layout.dp_rank < after
        end.switch(
            data_parallel_group(config, hf_config, layout, files, model.device, model.dtype)
            if stays
            else SingleGroup()
        )

    if after > before:
        meet()
    Redivision(before, after, end, changed).run(model)
    if after < before:
        meet()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return changed
