"""This module chooses a worker's device, and brings the worker together with the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import SINGLE, DataParallelGroup, ParallelState, SingleGroup
from nbengine.distributed.data_parallel import DataParallelEnd, join_data_parallel
from nbengine.distributed.init import init_parallel
from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.loading import resolve_device
from nbengine.models.registry import decoder_config
from nbengine.runtime.executor_files import ExecutorFiles


def choose_device(config: EngineConfig, layout: RankLayout, files: ExecutorFiles | None) -> torch.device:
    """Return the CPU, which all ranks share, or a GPU for each of them.

    Engine cores of one machine take the visible GPUs one after the other. Engine cores and workers that Ray
    starts see only their own GPUs.

    Raises:
        EngineStartError: there are too few GPUs.
        InvalidArgumentError: the device that was asked for is not there.
    """
    device = resolve_device(config.model)
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        return device
    shares_devices = parallel.data_parallel_size > 1 and parallel.data_parallel_backend != "ray"
    if device.type == "cpu" or (_is_alone(config, files) and not shares_devices):
        return device
    index = layout.number if shares_devices else layout.rank
    needed = layout.world_size * (layout.dp_rank + 1 if shares_devices else 1)
    num_devices = torch.cuda.device_count()
    if num_devices < needed:
        cores = f" for engine core {layout.dp_rank} and those before it" if shares_devices else ""
        raise EngineStartError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} needs {needed} GPUs{cores}, and there are {num_devices}; "
            f"lower them, or set device='cpu'"
        )
    device = torch.device("cuda", index)
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
    """Meet the other ranks of the engine core where `distributed_init_method` and `files` say, and, if the
    engine cores work in lock step, the ranks of the others.

    Raises:
        EngineStartError: the others cannot be reached.
        NBEngineError: nothing says where they meet.
    """
    if is_encoder(hf_config):
        return SINGLE
    state = SINGLE
    if not _is_alone(config, files):
        method = config.parallel.distributed_init_method
        if method is None or files is None:
            raise NBEngineError(f"{layout}: a worker among others needs a place to meet them at")
        state = init_parallel(
            layout,
            device,
            init_method=method,
            directory=files.shared_memory,
            max_tensor_bytes=_max_tensor_bytes(config, hf_config, dtype),
            dtype=dtype,
            networked=config.parallel.networked,
        )
    if not config.lock_step:
        return state
    try:
        group = data_parallel_group(config, hf_config, layout, files, device, dtype)
    except BaseException:
        state.close()
        raise
    return replace(state, layout=layout, dp=DataParallelEnd(group))


def data_parallel_group(
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    layout: RankLayout,
    files: ExecutorFiles | None,
    device: torch.device,
    dtype: torch.dtype,
) -> DataParallelGroup:
    """Meet the workers of this one's place in the other engine cores, unless there are none or it joins them
    later.

    Raises:
        EngineStartError: the others cannot be reached.
        NBEngineError: nothing says where they meet.
    """
    parallel = config.parallel
    if parallel.data_parallel_size == 1 or parallel.data_parallel_joins_later:
        return SingleGroup()
    if files is None:
        raise NBEngineError(
            f"engine core {layout.dp_rank}: a worker among others needs a place to meet them at"
        )
    return join_data_parallel(
        layout,
        device,
        init_method=parallel.data_parallel_init_method or f"file://{files.shared_memory}/rendezvous-cores",
        engine=files.engine,
        directory=files.shared_memory,
        max_tensor_bytes=_max_tensor_bytes(config, hf_config, dtype),
        dtype=dtype,
        networked=parallel.networked,
    )


def _max_tensor_bytes(config: EngineConfig, hf_config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Return the bytes of a step's hidden states."""
    # A step of one token may be padded to two.
    num_rows = max(config.scheduler.max_num_batched_tokens, 2)
    return num_rows * decoder_config(hf_config).hidden_size * dtype.itemsize


def _is_alone(config: EngineConfig, files: ExecutorFiles | None) -> bool:
    """Return whether the engine core has no other worker and no place to meet one: in its own process, for
    instance."""
    has_place = config.parallel.distributed_init_method is not None and files is not None
    return config.parallel.world_size == 1 and not has_place
