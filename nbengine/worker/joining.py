"""Where a worker computes, and how it comes together with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.init import init_parallel
from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.executor.files import ExecutorFiles
from nbengine.models.decoder_config import decoder_config
from nbengine.models.encoder_config import is_encoder
from nbengine.models.registry import resolve_device


def choose_device(config: EngineConfig, layout: RankLayout, files: ExecutorFiles | None) -> torch.device:
    """The CPU, which all ranks share, or a GPU for each of them.

    Raises:
        EngineStartError: there are too few GPUs.
        InvalidArgumentError: the device that was asked for is not there.
    """
    device = resolve_device(config.model)
    if device.type == "cpu" or _is_alone(config, files):
        return device
    num_ranks, num_devices = layout.world_size, torch.cuda.device_count()
    if num_devices < num_ranks:
        parallel = config.parallel
        raise EngineStartError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} needs {num_ranks} GPUs, and there are {num_devices}; "
            f"lower them, or set device='cpu'"
        )
    device = torch.device("cuda", layout.rank)
    torch.cuda.set_device(device)
    return device


def join(
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    layout: RankLayout,
    files: ExecutorFiles | None,
    device: torch.device,
    dtype: torch.dtype,
) -> ParallelState:
    """Meet the other ranks where `distributed_init_method` and `files` say.

    Raises:
        EngineStartError: they cannot be reached.
        NBEngineError: nothing says where they meet.
    """
    method = config.parallel.distributed_init_method
    if is_encoder(hf_config) or _is_alone(config, files):
        return SINGLE
    if method is None or files is None:
        raise NBEngineError(f"{layout}: a worker among others needs a place to meet them at")
    # A step of one token may be padded to two.
    num_rows = max(config.scheduler.max_num_batched_tokens, 2)
    return init_parallel(
        layout,
        device,
        init_method=method,
        directory=files.shared_memory,
        max_tensor_bytes=num_rows * decoder_config(hf_config).hidden_size * dtype.itemsize,
        dtype=dtype,
    )


def _is_alone(config: EngineConfig, files: ExecutorFiles | None) -> bool:
    """Whether there is nobody to meet and no place to do it: in the process of its engine core, for instance."""
    has_place = config.parallel.distributed_init_method is not None and files is not None
    return config.parallel.world_size == 1 and not has_place
