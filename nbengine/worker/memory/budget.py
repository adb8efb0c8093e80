"""The share of its device that a worker's KV cache may take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.kv_cache.sizing import override_slots
from nbengine.runtime.capacity import available_host_memory
from nbengine.worker.memory.footprint import Footprint, num_cores_here
from nbengine.worker.memory.limits import cpu_kv_budget, gpu_kv_budget
from nbengine.worker.model_runner import ModelRunner


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device, or of its machine, that are free."""
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
    """Return the bytes that a rank's KV cache may take; on a GPU they are found by running the largest step
    there can be.

    On a CPU they are the rank's share of what all ranks of the engine core may take together. By default that
    is its share of what all engine cores of the machine may take; a size given in bytes or blocks is that of
    each engine core.

    Raises:
        EngineStartError: nothing is left.
    """
    asked = asked_kv_cache_bytes(config, footprint)
    if asked is not None:
        return asked
    if device.type == "cuda":
        profile = profile_gpu(config, footprint.place, model_runner, device, max_model_len)
        utilization = config.cache.gpu_memory_utilization
        return footprint.kv_cache_part(
            gpu_kv_budget(profile.total, utilization, profile.peak, profile.others)
        )
    return cpu_kv_cache_bytes(config, footprint, max_model_len, free_memory(device))


def asked_kv_cache_bytes(config: EngineConfig, footprint: Footprint) -> int | None:
    """Return a rank's part of a KV cache whose size is given, in blocks or in bytes; None where it is not."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        spec, num_blocks = footprint.kv_cache_spec, cache.num_gpu_blocks_override
        num_slots = override_slots(spec, num_blocks, config.scheduler.max_num_seqs)
        return num_blocks * spec.page_size_bytes + num_slots * spec.slot_bytes
    if cache.kv_cache_memory_bytes is not None:
        return footprint.own_part(cache.kv_cache_memory_bytes)
    return None


def uncounted_extras(config: EngineConfig, footprint: Footprint, max_model_len: int, num_blocks: int) -> int:
    """Return the bytes that must be free beside a KV cache of `num_blocks` whose size is given; 0 if the size
    was worked out from what these bytes leave."""
    if asked_kv_cache_bytes(config, footprint) is None:
        return 0
    longest = footprint.longest(num_blocks, max_model_len) if num_blocks else max_model_len
    return footprint.extras_bytes(longest)


def cpu_kv_cache_bytes(config: EngineConfig, footprint: Footprint, max_model_len: int, free: int) -> int:
    """Return a rank's default share of the `free` bytes of a CPU's memory, its weights being loaded; it
    leaves what full batches may ask for, however much is free."""
    sequence = footprint.sequence_bytes(max_model_len)
    num_cores = num_cores_here(config)
    budget = cpu_kv_budget(
        free,
        asked_sequence=0 if config.model.max_model_len is None else sequence * num_cores,
        all_sequences=sequence * config.scheduler.max_num_seqs * num_cores,
    )
    left = max(0, free - num_cores * footprint.extras_bytes(max_model_len))
    return footprint.own_part(min(budget, footprint.kv_cache_part(left)) // num_cores)


@dataclass(frozen=True, slots=True)
class GPUProfile:
    """The bytes of a GPU: all of it, the most that torch holds in the largest step, with recorded steps beside it,
    and what others hold."""

    total: int
    peak: int
    others: int


def profile_gpu(
    config: EngineConfig, place: str, model_runner: ModelRunner, device: torch.device, max_model_len: int
) -> GPUProfile:
    """Run the largest step there can be, with requests of up to `max_model_len` tokens, for its use of
    memory; `place` names the GPU in messages.

    Raises:
        EngineStartError: there is too little memory for the step.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        model_runner.profile_run(max_model_len)
    except torch.OutOfMemoryError as error:
        raise EngineStartError(
            f"{place} has too little memory for a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} tokens and max_num_seqs="
            f"{config.scheduler.max_num_seqs} requests of up to max_model_len={max_model_len} tokens; lower them: {error}"
        ) from error
    peak = torch.cuda.max_memory_allocated(device)
    peak += model_runner.graph_bytes(max_model_len, peak - before)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return GPUProfile(total, peak, others)
