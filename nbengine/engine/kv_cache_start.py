"""How many KV blocks the workers get, and how long requests may be with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.ipc.control_messages import Progress
from nbengine.kv_cache.sizing import KVCacheSpec, check_max_model_len, num_blocks_for
from nbengine.units import size

if TYPE_CHECKING:
    from nbengine.executor.base import Executor
    from nbengine.models.progress import ProgressCallback

logger = logging.getLogger(__name__)


def initialize_kv_cache(
    config: EngineConfig,
    executor: Executor,
    model_info: Mapping[str, Any],
    report: ProgressCallback,
) -> tuple[int, int]:
    """Have every worker allocate as many blocks as the one with the least room for them can.

    Returns:
        The number of blocks, 0 for a model without a KV cache, and the most tokens of a request.

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
    num_blocks = min(
        num_blocks_for(spec, cache, num_bytes) for spec, num_bytes in zip(specs, available, strict=True)
    )
    max_model_len = choose_max_model_len(config, specs, model_info, num_blocks)
    executor.initialize_kv_cache(num_blocks)
    blocks = f"{num_blocks} blocks of {cache.block_size} tokens" if num_blocks else "none needed"
    detail = f"{blocks}, max_model_len {max_model_len}"
    report(Progress("kv", detail, 1.0, time.monotonic() - start))
    return num_blocks, max_model_len


def choose_max_model_len(
    config: EngineConfig, specs: Sequence[KVCacheSpec], model_info: Mapping[str, Any], num_blocks: int
) -> int:
    """The most tokens of a request with so many blocks; `specs` are those of all workers.

    Raises:
        EngineStartError: what was asked for is longer than the model can take, or than the KV cache.
    """
    limit: int = model_info["max_position_embeddings"]
    wanted = config.model.max_model_len
    if wanted is None:
        limit = model_info.get("advised_max_model_len", limit)
        fitting = num_blocks * config.cache.block_size if num_blocks else limit
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
        # Workers on a CPU share its memory, those on GPUs have one each.
        page_size = sum(pages) if model_info["device"] == "cpu" else max(pages)
        check_max_model_len(page_size, config.cache, num_blocks, wanted)
    return wanted
