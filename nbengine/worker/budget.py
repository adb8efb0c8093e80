"""How much of its device a worker's KV cache may take."""

from __future__ import annotations

import torch

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.worker.footprint import Footprint, num_cores_here
from nbengine.worker.memory import available_host_memory, cpu_kv_budget, gpu_kv_budget
from nbengine.worker.model_runner import ModelRunner


def free_memory(device: torch.device) -> int:
    """Bytes of the device, or of its machine, that are free."""
    if device.type == "cpu":
        return available_host_memory()
    return torch.cuda.mem_get_info(device)[0]


def kv_cache_budget(
    config: EngineConfig,
    footprint: Footprint,
    model_runner: ModelRunner,
    device: torch.device,
    max_model_len: int,
) -> int:
    """Bytes that a rank's KV cache may take; on a GPU found by running the largest step there can be.

    On a CPU it is the rank's share of what all ranks of the engine core may take together. By default that is its share of
    what all engine cores of the machine may take; what is asked for in bytes or blocks is each engine core's own.

    Raises:
        EngineStartError: nothing is left.
    """
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override * footprint.kv_cache_spec.page_size_bytes
    if cache.kv_cache_memory_bytes is not None:
        return footprint.own_part(cache.kv_cache_memory_bytes)
    if device.type == "cuda":
        return _profile_gpu(config, footprint, model_runner, device)
    sequence = -(-max_model_len // cache.block_size) * footprint.shared_page_size_bytes
    num_cores = num_cores_here(config)
    budget = cpu_kv_budget(
        free_memory(device),
        asked_sequence=0 if config.model.max_model_len is None else sequence * num_cores,
        all_sequences=sequence * config.scheduler.max_num_seqs * num_cores,
    )
    return footprint.own_part(budget // num_cores)


def _profile_gpu(
    config: EngineConfig, footprint: Footprint, model_runner: ModelRunner, device: torch.device
) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        model_runner.profile_run()
    except torch.OutOfMemoryError as error:
        raise EngineStartError(
            f"{footprint.place} has too little memory for a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} tokens and max_num_seqs="
            f"{config.scheduler.max_num_seqs} requests; lower them: {error}"
        ) from error
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return gpu_kv_budget(total, config.cache.gpu_memory_utilization, peak, others)
