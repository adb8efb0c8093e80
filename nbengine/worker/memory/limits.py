"""The memory that there is, and the part of it that the KV cache may take."""

from __future__ import annotations

import gc

from nbengine.errors import EngineStartError
from nbengine.runtime.heap import trim_heap
from nbengine.units import size

GIB = 1 << 30
CPU_SHARE = 4
"""By default the KV cache takes at most one part in this many of the free memory of a CPU's machine."""
CPU_CAP_BYTES = 2 * GIB


def return_freed_memory() -> None:
    """Give back to the system what is free inside this process."""
    gc.collect()
    trim_heap()


def cpu_kv_budget(available: int, asked_sequence: int, all_sequences: int) -> int:
    """Return the bytes of KV cache on a CPU, where the memory is shared with everything else that the user
    runs.

    They are a quarter of what is free, up to 2 GiB (some 90,000 tokens of SmolLM2-135M in bfloat16), so that
    a laptop keeps working; more when the requested sequence length needs it, up to half of what is free; and
    never more than `max_num_seqs` sequences of the greatest length could fill.

    Args:
        available: bytes free after the weights are loaded.
        asked_sequence: bytes of one sequence of the requested length, 0 if none was requested.
        all_sequences: bytes of `max_num_seqs` sequences of the greatest length.
    """
    modest = min(available // CPU_SHARE, CPU_CAP_BYTES)
    return min(max(modest, min(asked_sequence, available // 2)), all_sequences)


def gpu_kv_budget(total: int, utilization: float, peak: int, others: int) -> int:
    """Return the bytes of KV cache on a GPU: our share of it, less what else is in it at the worst moment.

    Args:
        total: bytes of the device.
        utilization: share of the device that this engine may bring to use, everything included.
        peak: greatest number of bytes that torch held during the profile run: weights and activations.
        others: bytes held outside torch: the driver, libraries, other processes.

    Raises:
        EngineStartError: nothing is left.
    """
    budget = int(total * utilization) - peak - others
    if budget <= 0:
        raise EngineStartError(
            f"no GPU memory is left for the KV cache: gpu_memory_utilization={utilization} of "
            f"{size(total)} is {size(total * utilization)}, weights and activations take "
            f"{size(peak)} and other uses of the GPU {size(others)}; raise "
            f"gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or free the GPU"
        )
    return budget


def check_weights_fit(model: str, needed: int, available: int, device: str) -> None:
    """Check, before anything is loaded, that a model's weights fit.

    Raises:
        EngineStartError: the weights do not fit; the message has the numbers.
    """
    if needed > available:
        raise EngineStartError(
            f"model {model!r} does not fit on {device}: its weights take about {size(needed)} and "
            f"{size(available)} are free; free memory, or choose a smaller model or dtype"
        )


def check_kv_cache_fits(
    num_blocks: int,
    page_size_bytes: int,
    available: int,
    device: str,
    extras: int = 0,
    state_bytes: int = 0,
) -> None:
    """Check that the KV cache can be allocated, with `state_bytes` of slots for recurrent state, and leaves `extras`
    bytes: Linux would grant too large a
    cache and kill the process at its first use.

    Raises:
        EngineStartError: it does not fit; the message has the numbers and names the arguments to change.
    """
    needed = num_blocks * page_size_bytes + state_bytes
    states = f" and slots of {size(state_bytes)} for recurrent state" if state_bytes else ""
    if needed > available:
        raise EngineStartError(
            f"the KV cache does not fit on {device}: {num_blocks} blocks of {size(page_size_bytes)}{states} take "
            f"{size(needed)} and {size(available)} are free; lower kv_cache_memory_bytes, "
            f"num_gpu_blocks_override or gpu_memory_utilization, the one that was given"
        )
    if needed + extras > available:
        raise EngineStartError(
            f"the KV cache leaves too little memory on {device}: {num_blocks} blocks of {size(page_size_bytes)}{states} take "
            f"{size(needed)} of {size(available)}, and a full batch may ask for {size(extras)} beside it (logits, log "
            f"probabilities, penalties, pooling); lower kv_cache_memory_bytes or num_gpu_blocks_override, the one that was "
            f"given, or max_num_seqs or max_model_len"
        )
