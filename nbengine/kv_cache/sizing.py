"""The number of KV blocks and of slots for recurrent state, decided once at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import EngineStartError
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.units import size

_CHECKPOINTS_SHARE = 4
"""Of what the slots of the requests leave, checkpoints get one part in this many, and blocks the rest."""
_LEAST_SPARE = 4
"""One slot in this many is for checkpoints, however many requests would run."""
_MOST_CHECKPOINTS = 32
"""The most checkpoints for each request that can run: one with more would be long before it is found again."""


@dataclass(frozen=True)
class RankCacheSpec:
    """The shape of what requests leave in the KV cache of one worker: a key and a value per token, physical
    tensor and KV head, in blocks, and the state of its recurrent layers, in slots.

    `num_layers` counts the physical tensors, each of which has one layer of every group: the layers, if all
    have the same rule.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    scale_bytes: int = 0
    """The bytes that each head of a key or value takes beside its numbers."""
    groups: CacheGroups = ONE_GROUP
    """The groups of all the model's layers."""
    slot_bytes: int = 0
    """The bytes of one slot: the state of a request in this worker's recurrent layers."""
    parts: int = 2
    """The rows that are kept of a token and KV head: key and value, or 1, a latent, which is both."""

    @property
    def page_size_bytes(self) -> int:
        """Return the bytes of one block: `block_size` tokens, keys and values or latents, all physical tensors."""
        head_bytes = self.head_dim * self.dtype_bytes + self.scale_bytes
        return self.parts * self.num_layers * self.num_kv_heads * head_bytes * self.block_size


def longest_step(scheduler: SchedulerConfig) -> int:
    """Return the most tokens of one request that a step computes."""
    if scheduler.enable_chunked_prefill and scheduler.long_prefill_token_threshold:
        return min(scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold)
    return scheduler.max_num_batched_tokens


def cache_size(
    specs: Sequence[RankCacheSpec],
    cache_config: CacheConfig,
    available: Sequence[int],
    max_num_seqs: int,
) -> tuple[int, int]:
    """Return the numbers of blocks and of slots for which all workers have room.

    `specs` and `available` are those of the workers, see `num_slots_for` and `num_blocks_for`.

    Raises:
        EngineStartError: there is not room for a single one.
    """
    slots = [
        num_slots_for(spec, cache_config, num_bytes, max_num_seqs)
        for spec, num_bytes in zip(specs, available, strict=True)
        if spec.slot_bytes
    ]
    num_slots = min(slots, default=0)
    blocks = [
        num_blocks_for(spec, cache_config, num_bytes - num_slots * spec.slot_bytes)
        for spec, num_bytes in zip(specs, available, strict=True)
        if spec.num_layers or not num_slots
    ]
    return min(blocks, default=0), num_slots


def num_slots_for(
    spec: RankCacheSpec, cache_config: CacheConfig, available_bytes: int, max_num_seqs: int
) -> int:
    """Return the number of slots that a worker has room for, 0 for a model without recurrent layers.

    Each request that can run has one, unless they took more than half of the bytes: then fewer requests run at
    a time. Of the rest a quarter is for checkpoints, or all where there are no blocks. With
    `num_gpu_blocks_override` slots come beside the blocks, and take no more bytes than these.

    Raises:
        EngineStartError: there is not room for a single slot.
    """
    if not spec.slot_bytes:
        return 0
    if cache_config.num_gpu_blocks_override is not None:
        return override_slots(spec, cache_config.num_gpu_blocks_override, max_num_seqs)
    has_blocks = spec.groups.num_tables > 0
    own = available_bytes // 2 if has_blocks else available_bytes
    num_running = min(max_num_seqs, own // spec.slot_bytes)
    if num_running < 1:
        raise EngineStartError(
            f"no room for recurrent state: {size(own)} is available to it, and that of one request takes "
            f"{size(spec.slot_bytes)}; raise {_source(cache_config)}"
        )
    rest = available_bytes - num_running * spec.slot_bytes
    if has_blocks:
        rest //= _CHECKPOINTS_SHARE
    return num_running + min(rest // spec.slot_bytes, _MOST_CHECKPOINTS * max_num_seqs)


def spare_slots(num_slots: int, max_num_seqs: int, cache_config: CacheConfig) -> int:
    """Return how many of the slots are for checkpoints alone: those that `max_num_seqs` requests do not need, but
    at least a quarter, and one of two or three; otherwise no prefix were found while many requests run. There
    are none if no prefix is to be found."""
    if not cache_config.enable_prefix_caching:
        return 0
    return max(num_slots - max_num_seqs, num_slots // _LEAST_SPARE, min(1, num_slots - 1), 0)


def state_tokens(specs: Sequence[RankCacheSpec]) -> int:
    """Return the number of tokens whose keys and values weigh as much as the state of a request, in all workers
    together; 0 if there is no state, or are no keys and values."""
    token_bytes = sum(spec.page_size_bytes * spec.groups.num_tables / spec.block_size for spec in specs)
    return int(sum(spec.slot_bytes for spec in specs) // token_bytes) if token_bytes else 0


def override_slots(spec: RankCacheSpec, num_blocks: int, max_num_seqs: int) -> int:
    """Return the number of slots beside a given number of blocks: those of the running requests and as many
    checkpoints, but no more than the bytes of the blocks would hold, and at least two."""
    if not spec.slot_bytes:
        return 0
    most = 2 * max_num_seqs
    if spec.page_size_bytes:
        most = min(most, num_blocks * spec.page_size_bytes // spec.slot_bytes)
    return max(2, most)


def _source(cache_config: CacheConfig) -> str:
    is_given = cache_config.kv_cache_memory_bytes is not None
    return "kv_cache_memory_bytes" if is_given else "gpu_memory_utilization or kv_cache_memory_bytes"


def num_blocks_for(spec: RankCacheSpec, cache_config: CacheConfig, available_bytes: int) -> int:
    """Return the number of blocks that a worker has room for, 0 for a model without a KV cache.

    `num_gpu_blocks_override` wins over `available_bytes`, the memory that the worker may take: what it found
    free, or its part of `kv_cache_memory_bytes`.

    Raises:
        EngineStartError: there is not room for a single block.
    """
    if not spec.page_size_bytes:
        return 0
    if cache_config.num_gpu_blocks_override is not None:
        return cache_config.num_gpu_blocks_override
    num_blocks = available_bytes // spec.page_size_bytes
    if num_blocks < 1:
        # What is free is what the largest step leaves.
        is_given = cache_config.kv_cache_memory_bytes is not None
        lower = (
            "block_size" if is_given else "block_size, max_num_batched_tokens, max_num_seqs or max_model_len"
        )
        raise EngineStartError(
            f"no room for the KV cache: {size(available_bytes)} is available to it, and one block of "
            f"{spec.block_size} tokens takes {size(spec.page_size_bytes)}; "
            f"raise {_source(cache_config)}, or lower {lower}"
        )
    return num_blocks


def check_max_model_len(
    page_size_bytes: int,
    cache_config: CacheConfig,
    num_blocks: int,
    max_model_len: int,
    groups: CacheGroups = ONE_GROUP,
    step_tokens: int = 0,
) -> None:
    """Check that one request of the greatest length fits in the pool.

    `page_size_bytes` is the size of one block in the memory that `kv_cache_memory_bytes` counts. Of a group
    with a window only what a step of up to `step_tokens` reads or writes must fit.

    Raises:
        EngineStartError: it does not fit; the message says what fits and which argument to change.
    """
    num_needed = groups.most_blocks(max_model_len, cache_config.block_size, step_tokens)
    if num_needed <= num_blocks:
        return
    if cache_config.num_gpu_blocks_override is not None:
        remedy = f"raise num_gpu_blocks_override to at least {num_needed}"
    elif cache_config.kv_cache_memory_bytes is not None:
        remedy = f"raise kv_cache_memory_bytes to at least {num_needed * page_size_bytes}"
    else:
        remedy = "raise gpu_memory_utilization or set kv_cache_memory_bytes"
    if groups.most_blocks(max_model_len, cache_config.block_size, 1) <= num_blocks:
        remedy += ", or lower max_num_batched_tokens: the layers with windows keep a whole step"
    raise EngineStartError(
        f"max_model_len={max_model_len} needs {num_needed} KV blocks of {cache_config.block_size} tokens "
        f"({size(num_needed * page_size_bytes)}), but the KV cache has {num_blocks} "
        f"({size(num_blocks * page_size_bytes)}); lower max_model_len to at most "
        f"{groups.longest(num_blocks, cache_config.block_size, step_tokens, max_model_len)}, or {remedy}"
    )
