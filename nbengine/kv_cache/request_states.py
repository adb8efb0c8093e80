"""The recurrent states of requests: their slots, what they start from, and the checkpoints that they leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

from nbengine.errors import NBEngineError
from nbengine.kv_cache.checkpoints import CheckpointRule
from nbengine.kv_cache.holder import BlockHolder
from nbengine.kv_cache.prefix import BlockHasher
from nbengine.kv_cache.state_pool import NO_SLOT, StatePool

Holder = TypeVar("Holder", bound=BlockHolder)
_worth = itemgetter(0)
_place = itemgetter(1)


class RequestStates:
    """The states of the requests that run, each in a slot of its own, and the checkpoints in the same pool.

    A checkpoint is made inside a step, in a slot that nothing else uses. Nobody can find it before the next
    step is planned, because a step reads what it starts from before it writes anything; nor before its tokens
    are known. No checkpoint takes a slot from a running request.
    """

    def __init__(
        self,
        pool: StatePool,
        num_spare_slots: int = 0,
        rule: CheckpointRule | None = None,
        hasher: BlockHasher | None = None,
    ) -> None:
        """Give out the slots of `pool`, `num_spare_slots` of them to checkpoints alone; without a `rule` and a
        `hasher` of blocks there are no checkpoints."""
        self.pool = pool
        self._rule = rule
        self._hasher = hasher
        self._most_running = pool.num_slots - num_spare_slots
        self._num_running = 0
        self._makers: dict[BlockHolder, None] = {}
        """The requests with checkpoints that nobody can find yet, in the order in which they made them."""

    @property
    def num_admissible(self) -> int:
        """Count the requests for which there are slots."""
        return min(self.pool.num_free_slots, self._most_running - self._num_running)

    def begin_step(self) -> None:
        """Make findable what earlier steps make, as far as its tokens are known."""
        self.pool.begin_step()
        for request in list(self._makers):
            self._settle(request)

    def begin(self, request: BlockHolder, num_found_blocks: int) -> bool:
        """Give a request a slot, to start from the checkpoint at the end of that many blocks, or from zeros.

        Returns True if it has a slot, from now on or already; else nothing has changed.
        """
        if request.state_slot != NO_SLOT:
            return True
        source = request.block_hashes[num_found_blocks - 1] if num_found_blocks else None
        if self._num_running == self._most_running or not self.pool.can_take(source):
            return False
        request.state_source = NO_SLOT if source is None else self._start_from(source, num_found_blocks)
        slot = self.pool.take()
        if slot is None:
            raise NBEngineError("a slot for recurrent state was there and is not")
        request.state_slot = slot
        self._num_running += 1
        return True

    def _start_from(self, source: bytes, num_found_blocks: int) -> int:
        rule = self._rule
        return self.pool.pin(
            source, 0 if rule is None else rule.likely_worth(num_found_blocks * rule.block_size)
        )

    def plan(self, scheduled: Iterable[tuple[Holder, int]]) -> list[tuple[Holder, int, int]]:
        """Choose the checkpoints that a step makes, given its requests, up to whose `num_computed_tokens` it
        computes, and the number of tokens that it computes of each.

        Where there are too few slots, those that are worth the most are made. Those that can be found already, or
        that another request makes in this step, are not made again.

        Returns:
            (request, number of tokens, slot), those of a request in ascending order.
        """
        if self._rule is None or self._hasher is None:
            return []
        size = self._rule.block_size
        wanted: list[tuple[int, int, Holder]] = []
        for request, count in scheduled:
            end = request.num_computed_tokens
            # Most steps compute one token, and end no block.
            if end // size != (end - count) // size:
                places = self._rule.places(request.num_prompt_tokens, end - count, end, request.fork)
                wanted += [(worth, place, request) for place, worth in sorted(places.items())]
        if not wanted:
            return []
        # Those of one worth stay in the order of the requests and their tokens, since the sort is stable.
        wanted.sort(key=_worth, reverse=True)
        made: list[tuple[Holder, int, int]] = []
        met: set[bytes] = set()
        for worth, place, request in wanted:
            slot = self._make(request, place, place // size, worth, met)
            if slot is not None:
                made.append((request, place, slot))
        made.sort(key=_place)
        return made

    def _make(
        self, request: BlockHolder, place: int, num_blocks: int, worth: int, met: set[bytes]
    ) -> int | None:
        """Return a slot for a checkpoint after `place` tokens, which fill `num_blocks`, None if it is not made.

        `met` has the hashes of those that the step makes; the checkpoint's is added if it is known.
        """
        block_hash = request.block_hashes[num_blocks - 1] if num_blocks <= len(request.block_hashes) else None
        if block_hash in met:
            return None
        if block_hash is not None and self.pool.find(block_hash) is not None:
            self.pool.touch(block_hash, worth)
            return None
        slot = self.pool.take(worth)
        if slot is not None:
            if block_hash is not None:
                met.add(block_hash)
            request.made_states = [*request.made_states, (place, slot, worth)]
            self._makers[request] = None
        return slot

    def end(self, request: BlockHolder) -> None:
        """Take a request's slot; what it has made and is known stays findable."""
        if request.made_states:
            self._settle(request)
            self._drop(request)
        if request.state_slot != NO_SLOT:
            self.pool.free(request.state_slot)
            request.state_slot = request.state_source = NO_SLOT
            self._num_running -= 1

    def forget(self, request: BlockHolder) -> None:
        """Make the states of a request unfindable, with those of the prefixes that it shares."""
        self._drop(request)
        self.pool.forget(request.block_hashes)

    # The methods of `CacheObserver`.

    def stored(self, request: BlockHolder, start: int, end: int) -> None:
        """Do nothing: checkpoints are made apart from blocks."""

    def given_back(self, request: BlockHolder, places: Sequence[int]) -> None:
        """Do nothing: what a request gives back can be found as before."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        """Give up the checkpoint at the end of a block of the first group: nobody can go on from it without the
        block, and its slot is of use to others."""
        self.pool.discard(block_hash)

    def replaced(self, block_id: int) -> None:
        """Do nothing: the hash of the block stays."""

    def cleared(self) -> None:
        """Do nothing: `KVCacheManager.reset_prefix_cache` forgets the states, too."""

    def check_integrity(self, requests: Sequence[BlockHolder]) -> None:
        """Check the pool against `requests`, which must be all requests that have slots.

        Raises:
            NBEngineError: a request that holds blocks has no slot, or there are more than may run; checkpoints of
                a request that does not run are waited for; or see `StatePool.check_integrity`.
        """
        if any(request.state_slot == NO_SLOT for request in requests):
            raise NBEngineError("a running request has no slot for its recurrent state")
        if len(requests) != self._num_running or self._num_running > self._most_running:
            raise NBEngineError(
                f"{len(requests)} requests have slots for their recurrent state, {self._num_running} were counted, "
                f"and {self._most_running} may have one"
            )
        if {request for request in requests if request.made_states} != self._makers.keys():
            raise NBEngineError("checkpoints that nobody can find yet are not those of the running requests")
        held = [request.state_slot for request in requests]
        held += [slot for request in requests for _, slot, _ in request.made_states]
        self.pool.check_integrity(held)

    def _settle(self, request: BlockHolder) -> None:
        hasher, unknown = self._hasher, request.made_states
        if hasher is not None:
            hasher.extend(
                request.block_hashes, request.all_token_ids, request.extra_keys, request.content_digests
            )
            unknown = []
            for place, slot, worth in request.made_states:
                if place <= request.num_tokens:
                    self.pool.keep(slot, request.block_hashes[place // hasher.block_size - 1], worth)
                else:
                    unknown.append((place, slot, worth))
        request.made_states = unknown
        if not unknown:
            self._makers.pop(request, None)

    def _drop(self, request: BlockHolder) -> None:
        for _, slot, _ in request.made_states:
            self.pool.free(slot)
        request.made_states = []
        self._makers.pop(request, None)
