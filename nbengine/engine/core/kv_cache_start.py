"""The number of KV blocks that the workers get, and the length that requests may have with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.ipc.control_messages import Progress
from nbengine.kv_cache.sizing import (
    RankCacheSpec,
    cache_size,
    check_max_model_len,
    longest_step,
    spare_slots,
    state_tokens,
)
from nbengine.kv_cache.specs import CacheGroups
from nbengine.units import size

if TYPE_CHECKING:
    from nbengine.executor.base import Executor
    from nbengine.runtime.progress import ProgressCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCacheStart:
    """The sizes that were allocated on every worker."""

    num_blocks: int
    """0 for a model without attention over a KV cache."""
    num_slots: int
    """Slots for recurrent state; 0 for a model without recurrent layers."""
    max_model_len: int
    """The most tokens of a request."""
    groups: CacheGroups
    state_tokens: int
    """The number of tokens whose keys and values weigh as much as a slot; 0 if one of the two weighs nothing."""


def initialize_kv_cache(
    config: EngineConfig,
    executor: Executor,
    model_info: Mapping[str, Any],
    report: ProgressCallback,
) -> KVCacheStart:
    """Have every worker allocate the blocks and slots for which the worker with the least room has room.

    Raises:
        EngineStartError: there is no room for what was asked.
    """
    cache, specs = config.cache, executor.get_kv_cache_specs()
    start = time.monotonic()
    available = executor.determine_available_memory()
    found = f"{size(sum(available))} for the KV cache"
    report(Progress("profile", found, 1.0, time.monotonic() - start))
    start = time.monotonic()
    report(Progress("kv"))
    max_num_seqs = config.scheduler.max_num_seqs
    num_blocks, num_slots = cache_size(specs, cache, available, max_num_seqs)
    num_running = num_slots - spare_slots(num_slots, max_num_seqs, cache)
    if 0 < num_running < max_num_seqs:
        logger.warning(
            "max_num_seqs is %d, but there is room for the recurrent state of %d requests at a time",
            max_num_seqs,
            num_running,
        )
    max_model_len = choose_max_model_len(config, specs, model_info, num_blocks)
    executor.initialize_kv_cache(num_blocks, num_slots)
    parts = [f"{num_blocks} blocks of {cache.block_size} tokens"] if num_blocks else []
    parts += [f"{num_slots} slots for recurrent state"] if num_slots else []
    detail = f"{' and '.join(parts) or 'none needed'}, max_model_len {max_model_len}"
    report(Progress("kv", detail, 1.0, time.monotonic() - start))
    return KVCacheStart(num_blocks, num_slots, max_model_len, specs[0].groups, state_tokens(specs))


def choose_max_model_len(
    config: EngineConfig, specs: Sequence[RankCacheSpec], model_info: Mapping[str, Any], num_blocks: int
) -> int:
    """Return the most tokens of a request with `num_blocks` blocks; `specs` are those of all workers.

    Raises:
        EngineStartError: the configured length is more than the model can take, or than the KV cache has room
            for.
    """
    limit: int = model_info["max_position_embeddings"]
    groups, step_tokens = specs[0].groups, longest_step(config.scheduler)
    wanted = config.model.max_model_len
    if wanted is None:
        limit = model_info.get("advised_max_model_len", limit)
        fitting = limit
        if num_blocks:
            fitting = groups.longest(num_blocks, config.cache.block_size, step_tokens, limit)
        if fitting < limit:
            logger.warning(
                "max_model_len is %d: the model could take %d tokens, the KV cache has room for %d",
                fitting,
                limit,
                fitting,
            )
        return min(limit, fitting)
    if wanted > limit:
        raise EngineStartError(
            f"max_model_len={wanted} exceeds the {limit} positions that the model was made for; lower it, "
            "or raise max_position_embeddings with hf_overrides if you know that the model can take more"
        )
    if num_blocks:
        pages = [spec.page_size_bytes for spec in specs]
        # Workers on a CPU share its memory, workers on GPUs have their own.
        page_size = sum(pages) if model_info["device"] == "cpu" else max(pages)
        check_max_model_len(page_size, config.cache, num_blocks, wanted, groups, step_tokens)
    return wanted
