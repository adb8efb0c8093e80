"""The KV blocks that requests hold: lookup of cached prefixes, allocation, caching and release."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from nbengine.errors import NBEngineError
from nbengine.kv_cache.block_pool import BlockPool
from nbengine.kv_cache.checkpoints import CheckpointRule
from nbengine.kv_cache.holder import NO_BLOCK, BlockHolder
from nbengine.kv_cache.prefix import BlockHasher, group_key
from nbengine.kv_cache.request_states import RequestStates
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups, KVCacheSpec, spec_blocks
from nbengine.kv_cache.state_pool import StatePool


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up and found since the start.

    A request counts once, when it is first admitted: neither the lookups of a request that waits for blocks
    nor those of a preempted request that resumes count, and requests that must not read the cache never do.
    """

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    """The manager that gives blocks of `block_size` tokens to requests, and shares those of equal prefixes.

    A request's block tables are `request.block_ids`, see `CacheGroups`; only this class changes them. A full
    block becomes findable when its tokens are known and their computation is planned. A request admitted in
    that same step may share it, which is sound because each layer writes the keys and values of the whole
    batch before any attention reads them, and because a plan, once made, is executed.

    Of a group with a window, blocks that no later query reads are given back when the request asks for room,
    and `NO_BLOCK` takes their place. The step before still read them, this one does not, and no earlier step
    runs beside it: so another request may write in them at once.

    A model without a KV cache has a pool of no blocks, and its requests need none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool,
        groups: CacheGroups = ONE_GROUP,
        *,
        longest_step: int = 0,
        num_slots: int = 0,
        num_spare_slots: int = 0,
        state_tokens: int = 0,
    ) -> None:
        """Make the pools, all of whose blocks and slots are free.

        Args:
            num_blocks: blocks of all groups together.
            block_size: tokens of one group that a block holds.
            max_model_len: most tokens of a request.
            enable_caching: find and share blocks and states of equal prefixes.
            groups: the groups of the model's layers.
            longest_step: most tokens of a request that a step computes; 0: all.
            num_slots: slots for the states of recurrent layers.
            num_spare_slots: those of them that are for checkpoints alone.
            state_tokens: number of tokens whose keys and values weigh as much as a state; 0: there are none.
        """
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.groups = groups
        self.block_pool = BlockPool(num_blocks)
        self.block_hasher = BlockHasher(block_size) if enable_caching else None
        self.prefix_cache_stats = PrefixCacheStats()
        self._num_tables = groups.num_tables
        self._longest_step = longest_step or max_model_len
        self._is_uniform = groups.is_uniform
        self._full = [g for g, spec in enumerate(groups.attention) if not spec.is_bounded]
        self._bounded = [(g, spec) for g, spec in enumerate(groups.attention) if spec.is_bounded]
        self.states: RequestStates | None = None
        """The states of recurrent layers; None if the model has none."""
        if groups.recurrent is not None:
            spare = num_spare_slots if enable_caching else 0
            rule = CheckpointRule.of(block_size, spare, state_tokens) if enable_caching else None
            self.states = RequestStates(StatePool(num_slots), spare, rule, self.block_hasher)
            self.block_pool.observers = (self.states,)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at a time."""
        if not self.block_pool.num_blocks:
            return 0
        if self._is_uniform:
            return -(-num_tokens // self.block_size)
        return self.groups.most_blocks(num_tokens, self.block_size, self._longest_step)

    def get_computed_blocks(self, request: BlockHolder) -> tuple[list[int], int]:
        """Return the cached blocks that start the request's tables, and how many tokens they hold.

        They never hold all tokens: the last one is always computed, so that there are logits to sample from.
        With several groups they hold the most tokens from which every group can go on; a group with a window
        has only the blocks that later queries read. The request holds the blocks only after `allocate_slots`
        was given them.
        """
        if self.block_hasher is None or request.skip_reading_prefix_cache:
            return [], 0
        self.block_hasher.extend(
            request.block_hashes, request.all_token_ids, request.extra_keys, request.content_digests
        )
        num_findable = (request.num_tokens - 1) // self.block_size
        hashes = request.block_hashes[:num_findable]
        if self._is_uniform:
            block_ids = self.block_pool.find_prefix(hashes)
            return block_ids, len(block_ids) * self.block_size
        return self._find_in_groups(request, hashes)

    def _find_in_groups(self, request: BlockHolder, hashes: list[bytes]) -> tuple[list[int], int]:
        pool, size, num_tables = self.block_pool, self.block_size, self._num_tables
        length = len(hashes)
        for group in self._full:
            keys = (group_key(each, group) for each in hashes[:length])
            length = min(length, len(pool.find_prefix(keys)))
        length = attended = self._longest_attended(hashes, length)
        if self.states is not None:
            find = self.states.pool.find
            while length and find(hashes[length - 1]) is None:
                length -= 1
                if length and self._bounded and find(hashes[length - 1]) is not None:
                    length = self._longest_attended(hashes, length)
        # Without attention nothing says where the prompt parts from others.
        request.fork = attended * size if num_tables and length < attended else 0
        block_ids = [NO_BLOCK] * (length * num_tables)
        for group, spec in enumerate(self.groups.attention):
            for column in range(spec.first_needed(length * size) // size, length):
                block_id = pool.find(group_key(hashes[column], group))
                if block_id is not None:
                    block_ids[column * num_tables + group] = block_id
        return block_ids, length * size

    def _longest_attended(self, hashes: list[bytes], length: int) -> int:
        """Return the most columns, up to `length`, after which all groups with a window have what they need."""
        before = -1
        # Each group says how far it can go on at most, until all agree.
        while length != before:
            before = length
            for group, spec in self._bounded:
                length = self._longest_bounded(hashes, group, spec, length)
        return length

    def _longest_bounded(self, hashes: list[bytes], group: int, spec: KVCacheSpec, length: int) -> int:
        """Return the most columns, up to `length`, after which a group has all that later queries read."""
        find, size = self.block_pool.find, self.block_size
        column = length
        while column > spec.first_needed(length * size) // size:
            column -= 1
            if find(group_key(hashes[column], group)) is None:
                # Nothing that needs this column will do.
                length = column
        return length

    def allocate_slots(
        self,
        request: BlockHolder,
        num_new_tokens: int,
        new_computed_blocks: list[int] | None = None,
        num_lookahead_tokens: int = 0,
        *,
        num_found_tokens: int | None = None,
        whole_sequence_must_fit: bool = False,
    ) -> list[int] | None:
        """Give the request room for its next `num_new_tokens` tokens, and `num_lookahead_tokens` after them.

        `new_computed_blocks`, from `get_computed_blocks`, come first in the tables of a request that holds
        nothing yet; `num_found_tokens` is the number of tokens found with them, and only needed where there
        are no tables. With `whole_sequence_must_fit` the free blocks must suffice for all of the request's
        known tokens, though only those for the new ones are taken.

        Returns:
            The blocks appended after the computed ones, possibly none; None when there are too few free
            blocks, or no slot for the state of a request that has none, and then nothing was taken.
        """
        computed_blocks = new_computed_blocks or []
        table, num_tables, size = request.block_ids, self._num_tables, self.block_size
        pool = self.block_pool
        if num_found_tokens is None:
            num_found_tokens = len(computed_blocks) // num_tables * size if num_tables else 0
        num_computed = request.num_computed_tokens + num_found_tokens
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_held = len(table) + len(computed_blocks)
        num_needed = max(-(-num_slots // size) * num_tables - num_held, 0) if pool.num_blocks else 0
        must_fit, held = num_needed, computed_blocks
        if self._bounded:
            self._give_back(request)
            held = [block_id for block_id in computed_blocks if block_id != NO_BLOCK]
        if whole_sequence_must_fit:
            must_fit = max(must_fit, self._num_missing(request, num_held, num_found_tokens))
        # Computed blocks that nobody holds count as free, but are about to be taken.
        if must_fit > pool.num_free_blocks - pool.count_free(held):
            return None
        if self.states is not None and not self.states.begin(request, num_found_tokens // size):
            return None
        if computed_blocks:
            # They are taken first, so that `allocate` cannot evict them.
            pool.take(held)
            table.extend(computed_blocks)
            request.num_cached_blocks = len(computed_blocks) // num_tables
        new_blocks = pool.allocate(num_needed) if num_needed else []
        table.extend(new_blocks)
        request.num_slots = len(table) // num_tables * size if num_tables else self.max_model_len
        if self._bounded:
            if not request.num_passed:
                firsts = [spec.first_needed(num_computed) // size for _, spec in self._bounded]
                request.num_passed = firsts
            if num_new_tokens > 1:
                # What a long step leaves behind is given back in the next one.
                request.num_slots = num_slots
        return new_blocks

    def extend(self, request: BlockHolder, num_tokens: int) -> list[int] | None:
        """Give a request room for `num_tokens` tokens, the next step's and more; what windows have passed stays.

        Returns:
            The blocks appended; None when there are too few free blocks, and then nothing was taken.
        """
        table, num_tables, size = request.block_ids, self._num_tables, self.block_size
        num_needed = -(-num_tokens // size) * num_tables - len(table)
        if num_needed > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(num_needed) if num_needed > 0 else []
        table.extend(new_blocks)
        request.num_slots = len(table) // num_tables * size if num_tables else self.max_model_len
        return new_blocks

    def _num_missing(self, request: BlockHolder, num_held: int, num_found_tokens: int) -> int:
        """Return the blocks that all known tokens of a request take at a time, besides those that it holds or
        has found."""
        if self._is_uniform or not self.block_pool.num_blocks:
            return self.num_blocks_for(request.num_tokens) - num_held
        size, num_tokens = self.block_size, request.num_tokens
        whole, found = -(-num_tokens // size), num_found_tokens // size
        missing = 0
        for spec in self.groups.attention:
            most = spec_blocks(spec, whole, num_tokens, size, self._longest_step)
            passed = spec.first_needed(num_found_tokens) // size
            missing += max(0, min(whole - passed, most) - (found - passed))
        return missing

    def _give_back(self, request: BlockHolder) -> None:
        """Give back the blocks that no query of the next step, or of a later one, reads."""
        table, num_tables = request.block_ids, self._num_tables
        if not table:
            return
        places: list[int] = []
        for number, (group, spec) in enumerate(self._bounded):
            first = spec.first_needed(request.num_computed_tokens) // self.block_size
            passed = request.num_passed[number]
            if first > passed:
                places += range(passed * num_tables + group, first * num_tables + group, num_tables)
                request.num_passed[number] = first
        if not places:
            return
        places.sort()
        self.block_pool.free([table[place] for place in places])
        for observer in self.block_pool.observers:
            observer.given_back(request, places)
        for place in places:
            table[place] = NO_BLOCK

    def cache_blocks(self, request: BlockHolder) -> None:
        """Make the request's full blocks findable, up to `num_computed_tokens` or to its last known token.

        Set `request.next_cache_point` to the number of computed tokens at which the next blocks become
        findable.
        """
        if self.block_hasher is None:
            request.next_cache_point = sys.maxsize
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        self.block_hasher.extend(
            request.block_hashes, request.all_token_ids, request.extra_keys, request.content_digests
        )
        start, pool = request.num_cached_blocks, self.block_pool
        if self._is_uniform:
            for index in range(start, num_full):
                pool.register(request.block_ids[index], request.block_hashes[index])
        elif start < num_full:
            self._cache_columns(request, start, num_full)
        # Observers hear of it behind `replaced`, which relies on this event to say the new place.
        if pool.observers and start < num_full and pool.num_blocks:
            for observer in pool.observers:
                observer.stored(request, start, num_full)
        request.num_cached_blocks = num_full
        request.next_cache_point = (num_full + 1) * self.block_size

    def _cache_columns(self, request: BlockHolder, start: int, end: int) -> None:
        num_tables, register = self._num_tables, self.block_pool.register
        for column in range(start, end):
            block_hash = request.block_hashes[column]
            for group in range(num_tables):
                block_id = request.block_ids[column * num_tables + group]
                # A window may have passed tokens that were in flight until now.
                if block_id != NO_BLOCK:
                    register(block_id, group_key(block_hash, group))

    def record_lookup(self, request: BlockHolder, num_found_tokens: int) -> None:
        """Count a first admission in the prefix cache's statistics."""
        if self.block_hasher is not None and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.queries += request.num_prompt_tokens
            self.prefix_cache_stats.hits += num_found_tokens

    def free(self, request: BlockHolder) -> None:
        """Take all blocks and the slot from the request, the last block first, so that a prefix outlives what
        follows it."""
        held = reversed(request.block_ids)
        self.block_pool.free(held if not self._bounded else (each for each in held if each != NO_BLOCK))
        if self._bounded:
            request.num_passed = []
        if self.states is not None:
            self.states.end(request)
        # The hashes stay, so that the request finds its blocks again when it resumes.
        request.block_ids = []
        request.num_slots = 0
        request.num_cached_blocks = 0

    def forget(self, request: BlockHolder) -> None:
        """Make all that the request holds, or has made, unfindable: it may be damaged."""
        self.block_pool.forget(each for each in request.block_ids if each != NO_BLOCK)
        if self.states is not None:
            self.states.forget(request)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and states and return True, or return False while any request holds one."""
        states = None if self.states is None else self.states.pool
        if states is not None and states.num_free_slots < states.num_slots:
            return False
        return self.block_pool.forget_all() and (states is None or states.forget_all())

    def check_integrity(self, requests: Iterable[BlockHolder]) -> None:
        """Check the pools against `requests`, which must be all requests that hold blocks or slots.

        Raises:
            NBEngineError: they disagree; see `BlockPool.check_integrity` and `StatePool.check_integrity`, or a
                block that a later query reads was given back.
        """
        holders = list(requests)
        self.block_pool.check_integrity(
            [[each for each in request.block_ids if each != NO_BLOCK] for request in holders]
        )
        for request in holders:
            self._check_tables(request)
        if self.states is not None:
            self.states.check_integrity(holders)

    def _check_tables(self, request: BlockHolder) -> None:
        passed = {group: request.num_passed[number] for number, (group, _) in enumerate(self._bounded)}
        for place, block_id in enumerate(request.block_ids):
            column, group = divmod(place, self._num_tables)
            if (block_id == NO_BLOCK) is not (column < passed.get(group, 0)):
                raise NBEngineError(f"group {group}, block {column} of a request is {block_id}")
