"""A guess of the engine cores that have the start of a prompt in their prefix caches."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable

from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.kv_cache.prefix import BlockHasher

MAX_BLOCKS = 64
"""Blocks of a prompt that are looked at: they tell conversations apart,
and are hashed in some 50 microseconds."""


class PrefixAffinity:
    """A memory of the ranks that prompts were sent to, by the chained hashes of their first full blocks.

    The hashes are the engine cores' own (`BlockHasher`, cache salt included). A rank's entries are bounded by
    the number of its KV blocks; the least recently sent go first, and of one prompt the last blocks, as in
    the cache itself. The result is a guess, since other clients' requests and the cores' evictions are not
    seen here. A wrong guess costs a prefill.
    """

    def __init__(self, block_size: int) -> None:
        self._hasher = BlockHasher(block_size)
        self._holders: dict[bytes, int] = {}
        """The bit set of ranks that were sent a block, by hash."""
        self._recent: dict[int, OrderedDict[bytes, None]] = {}
        """The hashes that were sent to each rank, the least recently sent first."""
        self._bounds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def set_bound(self, rank: int, num_blocks: int) -> None:
        """Take in a rank that has come, or has started again:
        it has `num_blocks` blocks, all of them empty."""
        self.forget(rank)
        self._bounds[rank] = num_blocks
        self._recent[rank] = OrderedDict()

    def forget(self, rank: int) -> None:
        """Forget a rank that has gone, and its cache with it."""
        self._bounds.pop(rank, None)
        for block in self._recent.pop(rank, ()):
            self._drop(block, rank)

    def hashes(self, request: EngineCoreRequest) -> list[bytes]:
        """Return the hashes of a request's first full blocks; none for a prompt without token ids."""
        hashes: list[bytes] = []
        if request.prompt_token_ids and request.prompt_embeds is None:
            salt = request.cache_salt
            extra_keys = () if salt is None else (("cache_salt", salt),)
            first = request.prompt_token_ids[: MAX_BLOCKS * self._hasher.block_size]
            # A malformed prompt has no blocks; the engine core refuses it.
            with contextlib.suppress(RequestError):
                self._hasher.extend(hashes, first, extra_keys)
        return hashes

    def best(self, hashes: Iterable[bytes], ranks: Iterable[int]) -> int | None:
        """Choose of `ranks` the one that was sent the longest start of these blocks;
        None if none was sent the first."""
        left = 0
        for rank in ranks:
            left |= 1 << rank
        found = 0
        for block in hashes:
            left &= self._holders.get(block, 0)
            if not left:
                break
            found = left
        # Of several ranks the lowest is taken: they are equally good.
        return (found & -found).bit_length() - 1 if found else None

    def sent(self, hashes: list[bytes], rank: int) -> None:
        """Note that a rank will have these blocks."""
        recent = self._recent.get(rank)
        if recent is None:
            return
        bit = 1 << rank
        # The first blocks are entered last, so that they stay longest.
        for block in reversed(hashes):
            recent[block] = None
            recent.move_to_end(block)
            self._holders[block] = self._holders.get(block, 0) | bit
        while len(recent) > self._bounds[rank]:
            block, _ = recent.popitem(last=False)
            self._drop(block, rank)

    def _drop(self, block: bytes, rank: int) -> None:
        left = self._holders[block] & ~(1 << rank)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
