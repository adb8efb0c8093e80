"""How much of its device a worker's KV cache may take."""

from __future__ import annotations

from dataclasses import dataclass

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
    asked = asked_kv_cache_bytes(config, footprint)
    if asked is not None:
        return asked
    if device.type == "cuda":
        profile = profile_gpu(config, footprint.place, model_runner, device)
        return gpu_kv_budget(profile.total, config.cache.gpu_memory_utilization, profile.peak, profile.others)
    return cpu_kv_cache_bytes(config, footprint, max_model_len, free_memory(device))


def asked_kv_cache_bytes(config: EngineConfig, footprint: Footprint) -> int | None:
    """A rank's part of a KV cache whose size is given, in blocks or in bytes; None where it is not."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override * footprint.kv_cache_spec.page_size_bytes
    if cache.kv_cache_memory_bytes is not None:
        return footprint.own_part(cache.kv_cache_memory_bytes)
    return None


def cpu_kv_cache_bytes(config: EngineConfig, footprint: Footprint, max_model_len: int, free: int) -> int:
    """A rank's default share of the `free` bytes of a CPU's memory, its weights being loaded."""
    cache = config.cache
    sequence = -(-max_model_len // cache.block_size) * footprint.shared_page_size_bytes
    num_cores = num_cores_here(config)
    budget = cpu_kv_budget(
        free,
        asked_sequence=0 if config.model.max_model_len is None else sequence * num_cores,
        all_sequences=sequence * config.scheduler.max_num_seqs * num_cores,
    )
    return footprint.own_part(budget // num_cores)


@dataclass(frozen=True, slots=True)
class GPUProfile:
    """Bytes of a GPU: all of it, the most that torch held during the largest step, and what others hold."""

    total: int
    peak: int
    others: int


def profile_gpu(
    config: EngineConfig, place: str, model_runner: ModelRunner, device: torch.device
) -> GPUProfile:
    """Run the largest step there can be, for its use of memory; `place` names the GPU in messages.

    Raises:
        EngineStartError: there is too little memory for it.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        model_runner.profile_run()
    except torch.OutOfMemoryError as error:
        raise EngineStartError(
            f"{place} has too little memory for a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} tokens and max_num_seqs="
            f"{config.scheduler.max_num_seqs} requests; lower them: {error}"
        ) from error
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return GPUProfile(total, peak, others)
