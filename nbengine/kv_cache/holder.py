"""A request as the KV cache sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nbengine.kv_cache.prefix import ExtraKeys

NO_BLOCK = -1
"""The entry of a block table where there is no block."""


class BlockHolder(Protocol):
    """A request that holds blocks, and knows the tokens whose keys and values are in them.

    `KVCacheManager` owns the fields from `block_ids` on; the others it only reads.
    """

    all_token_ids: list[int]
    num_tokens: int
    """Length of `all_token_ids`."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are computed or planned."""
    extra_keys: ExtraKeys
    content_digests: Sequence[bytes]
    """One digest per block whose tokens stand for something else: see `BlockHasher.digests`."""
    prompt_embeds: Any
    """The prompt as vectors, None for one of token ids."""
    skip_reading_prefix_cache: bool

    number: int
    """Its number among all requests of the scheduler."""

    block_ids: list[int]
    """The block tables: see `CacheGroups`. `NO_BLOCK` takes the place of a block that was given back, or not
    needed from the start."""
    block_hashes: list[bytes]
    """Hashes of the first full blocks."""
    num_cached_blocks: int
    """Number of blocks at the start of each table that have been offered to other requests."""
    num_slots: int
    """Tokens up to which the request need not ask for room."""
    next_cache_point: int
    """The number of computed tokens at which the next block becomes findable."""
    num_passed: list[int]
    """For each group with a window or chunks, the number of blocks at the start of its table that are
    `NO_BLOCK`; empty while it holds nothing."""
    state_slot: int
    """The slot of its recurrent state, `NO_SLOT` if it has none."""
    state_source: int
    """The slot from which its state starts when it is admitted, `NO_SLOT` for zeros."""
    made_states: list[tuple[int, int, int]]
    """Checkpoints that it has made and nobody can find yet: (number of tokens, slot, worth)."""
    fork: int
    """The number of tokens after which its prompt parts from earlier ones, if these left keys and values up to
    there and no state; else 0."""
