"""Who holds which KV blocks: lookup of cached prefixes, allocation, caching and release."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from nbengine.kv_cache.block_pool import BlockPool
from nbengine.kv_cache.prefix import BlockHasher
from nbengine.scheduler.request import Request


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up and found since the start.

    A request counts once, when it is first admitted: neither the lookups of a request that waits for blocks
    nor those of a preempted request that resumes count, and requests that must not read the cache never do.
    """

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    """Gives blocks of `block_size` tokens to requests, and shares those that hold the same prefix.

    A request's block table is `request.block_ids`; only this class changes it. A full block becomes findable
    when its tokens are known and their computation is planned. A request admitted in that same step may share it, which is sound
    because each layer writes the keys and values of the whole batch before any attention reads them, and
    because a plan, once made, is executed.

    A model without a KV cache has a pool of no blocks, and its requests need none.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.block_pool = BlockPool(num_blocks)
        self.block_hasher = BlockHasher(block_size) if enable_caching else None
        self.prefix_cache_stats = PrefixCacheStats()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the keys and values of `num_tokens` tokens."""
        if not self.block_pool.num_blocks:
            return 0
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Return the cached blocks that start the request's tokens, and how many tokens they hold.

        Never all tokens: the last one is always computed, so that there are logits to sample from. The
        blocks are not held until `allocate_slots` is given them.
        """
        if self.block_hasher is None or request.skip_reading_prefix_cache:
            return [], 0
        self.block_hasher.extend(
            request.block_hashes, request.all_token_ids, request.extra_keys, request.content_digests
        )
        num_findable = (request.num_tokens - 1) // self.block_size
        block_ids = self.block_pool.find_prefix(request.block_hashes[:num_findable])
        return block_ids, len(block_ids) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: list[int] | None = None,
        num_lookahead_tokens: int = 0,
        *,
        whole_sequence_must_fit: bool = False,
    ) -> list[int] | None:
        """Give the request room for its next `num_new_tokens` tokens, and `num_lookahead_tokens` after them.

        `new_computed_blocks`, from `get_computed_blocks`, come first in the table of a request that holds
        nothing yet. With `whole_sequence_must_fit` the free blocks must suffice for all of the request's
        known tokens, though only those for the new ones are taken.

        Returns:
            The blocks appended after the computed ones, possibly none; None when there are too few free
            blocks, and then nothing has changed.
        """
        computed_blocks = new_computed_blocks or []
        table = request.block_ids
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_held = len(table) + len(computed_blocks)
        num_needed = max(self.num_blocks_for(num_slots) - num_held, 0)
        must_fit = num_needed
        if whole_sequence_must_fit:
            must_fit = max(must_fit, self.num_blocks_for(request.num_tokens) - num_held)
        pool = self.block_pool
        if must_fit > pool.num_free_blocks - pool.count_free(computed_blocks):
            return None
        if computed_blocks:
            pool.take(computed_blocks)
            table.extend(computed_blocks)
            request.num_cached_blocks = len(computed_blocks)
        new_blocks = pool.allocate(num_needed) if num_needed else []
        table.extend(new_blocks)
        request.num_slots = len(table) * self.block_size
        return new_blocks

    def cache_blocks(self, request: Request) -> None:
        """Make the request's full blocks findable, up to its `num_computed_tokens` as far as they are known.

        Sets `request.next_cache_point`, the number of computed tokens at which there is a next one.
        """
        if self.block_hasher is None:
            request.next_cache_point = sys.maxsize
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        self.block_hasher.extend(
            request.block_hashes, request.all_token_ids, request.extra_keys, request.content_digests
        )
        start, pool = request.num_cached_blocks, self.block_pool
        for index in range(start, num_full):
            pool.register(request.block_ids[index], request.block_hashes[index])
        if pool.observers and start < num_full:
            for observer in pool.observers:
                observer.stored(request, start, num_full)
        request.num_cached_blocks = num_full
        request.next_cache_point = (num_full + 1) * self.block_size

    def record_lookup(self, request: Request, num_found_tokens: int) -> None:
        """Count a first admission in the prefix cache's statistics."""
        if self.block_hasher is not None and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.queries += request.num_prompt_tokens
            self.prefix_cache_stats.hits += num_found_tokens

    def free(self, request: Request) -> None:
        """Take all blocks from the request, the last one first, so that a prefix outlives what follows it."""
        self.block_pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_slots = 0
        request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while any request holds blocks."""
        return self.block_pool.forget_all()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Check the pool against the block tables of `requests`, which are all that hold blocks.

        Raises:
            NBEngineError: they disagree; see `BlockPool.check_integrity`.
        """
        self.block_pool.check_integrity([request.block_ids for request in requests])
