"""The changes of the prefix cache, as a stream that others can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from nbengine.kv_cache.holder import NO_BLOCK
from nbengine.kv_cache.prefix import group_key

if TYPE_CHECKING:
    from nbengine.kv_cache.block_pool import BlockPool
    from nbengine.kv_cache.holder import BlockHolder


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Consecutive full blocks of one request can be found from now on, in place of others with the same
    hashes."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Hash of the block before the first; None at the start of a prompt."""
    token_ids: list[int]
    """`block_size` ids for each block."""
    block_size: int
    block_ids: list[int]
    group: int = 0
    """The group of the model's layers whose keys and values the blocks hold. In a model with several groups there
    are blocks of each for the same tokens; the hashes of all but group 0 end with the group's number in two bytes,
    here and in other messages, and parents are those of group 0. Checkpoints of recurrent layers are no blocks, and no
    event tells of them: a prefix is found up to one of these, which may be before the end of its blocks."""


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks were evicted: their contents cannot be found any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The prefix cache was reset: nothing can be found any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The events of one step, in order. `seq` grows by 1 from batch to batch of an engine core: a gap is a
    loss. An engine core that was started again (the next `incarnation`) counts from the beginning."""

    ts: float
    """`time.time()` of the batch."""
    engine_index: int
    seq: int
    events: list[KVCacheEvent]
    incarnation: int = 0


class KVCacheSnapshot(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The findable blocks after the batch `seq`; batches with a greater number go on from here."""

    ts: float
    engine_index: int
    seq: int
    num_blocks: int
    block_size: int
    block_hashes: list[bytes]
    block_ids: list[int]
    """The blocks that have the `block_hashes`, in the same order."""
    incarnation: int = 0


KVMessage = KVEventBatch | KVCacheSnapshot


class KVEventStream:
    """A stream that observes a pool while someone wants its events, and numbers their batches."""

    def __init__(
        self, block_pool: BlockPool, block_size: int, engine_index: int, num_tables: int = 1
    ) -> None:
        self._pool = block_pool
        self._num_tables = num_tables
        self._block_size = block_size
        self._engine_index = engine_index
        self._seq = 0
        self._events: list[KVCacheEvent] = []
        self._is_recording = False

    def record(self, wanted: bool) -> None:
        """Begin or end recording; what was recorded and not taken is dropped with the end."""
        if wanted == self._is_recording:
            return
        self._is_recording = wanted
        if wanted:
            self._pool.observers = (*self._pool.observers, self)
        else:
            self._pool.observers = tuple(other for other in self._pool.observers if other is not self)
            self._events = []
            # A subscriber that comes back has missed what happens from now on; the gap in `seq` says so.
            self._seq += 1

    def take_batch(self, now: float) -> KVEventBatch | None:
        """Return the events since the batch before, None if there are none; `now` is `time.time()`."""
        if not self._events:
            return None
        events, self._events = self._events, []
        self._seq += 1
        return KVEventBatch(now, self._engine_index, self._seq, events)

    def snapshot(self, now: float) -> KVCacheSnapshot:
        """Return the present state. Events that have not been taken are part of it and come once more with
        the next batch, where they change nothing: the last event about a block says what the snapshot
        says."""
        cached = self._pool.cached_blocks()
        return KVCacheSnapshot(
            now,
            self._engine_index,
            self._seq,
            self._pool.num_blocks,
            self._block_size,
            list(cached),
            list(cached.values()),
        )

    # The methods of `CacheObserver`.

    def stored(self, request: BlockHolder, start: int, end: int) -> None:
        """Note blocks of a request that can be found from now on."""
        size, hashes = self._block_size, request.block_hashes
        parent = hashes[start - 1] if start else None
        token_ids = request.all_token_ids[start * size : end * size]
        num_tables = self._num_tables
        if num_tables == 1 and NO_BLOCK not in request.block_ids[start:end]:
            block_ids = request.block_ids[start:end]
            self._events.append(BlockStored(hashes[start:end], parent, token_ids, size, block_ids))
            return
        for column in range(start, end):
            parent = hashes[column - 1] if column else None
            token_ids = request.all_token_ids[column * size : (column + 1) * size]
            for group in range(num_tables):
                block_id = request.block_ids[column * num_tables + group]
                if block_id != NO_BLOCK:
                    key = group_key(hashes[column], group)
                    self._events.append(BlockStored([key], parent, token_ids, size, [block_id], group))

    def given_back(self, request: BlockHolder, places: Sequence[int]) -> None:
        """Do nothing: what a request gives back can be found as before."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        """Note that a block cannot be found any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash]))

    def replaced(self, block_id: int) -> None:
        """Do nothing: the hash of the block stays, and the event that follows says where it is found."""

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(AllBlocksCleared())


class KVCacheMirror:
    """A follower's view of one engine core's prefix cache: block ids by hash."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.incarnation = 0
        self.seq: int | None = None
        """Number of the latest message; None before the first snapshot and after a loss."""

    def apply(self, message: KVMessage) -> bool:
        """Take in the next message; return False after a loss, when a snapshot is needed to go on."""
        if isinstance(message, KVCacheSnapshot):
            self.blocks = dict(zip(message.block_hashes, message.block_ids, strict=True))
            self.seq, self.incarnation = message.seq, message.incarnation
            return True
        if self.seq is None or message.seq > self.seq + 1 or message.incarnation != self.incarnation:
            self.seq = None
            return False
        # An earlier batch is part of the snapshot already, and changes nothing.
        if message.seq == self.seq + 1:
            self.seq = message.seq
            self._apply_events(message.events)
        return True

    def _apply_events(self, events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.blocks.update(zip(event.block_hashes, event.block_ids, strict=True))
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        self.blocks.pop(block_hash, None)
                case AllBlocksCleared():
                    self.blocks.clear()
