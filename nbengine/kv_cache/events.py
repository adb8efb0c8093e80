"""What happens to the prefix cache, as a stream that others can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from nbengine.kv_cache.block_pool import BlockPool
    from nbengine.scheduler.request import Request


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Consecutive full blocks of one request can be found from now on, in place of others with the same hashes."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first; None at the start of a prompt."""
    token_ids: list[int]
    """`block_size` for each block."""
    block_size: int
    block_ids: list[int]


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks that were evicted: their contents cannot be found any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The prefix cache was reset: nothing can be found any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The events of one step, in order. `seq` grows by 1 from batch to batch of an engine: a gap is a loss. An engine that
    was started again (the next `incarnation`) counts anew."""

    ts: float
    """`time.time()`."""
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
    """Of `block_hashes`, in their order."""
    incarnation: int = 0


KVMessage = KVEventBatch | KVCacheSnapshot


class KVEventStream:
    """Observes a pool while someone wants its events, and numbers them."""

    def __init__(self, block_pool: BlockPool, block_size: int, engine_index: int) -> None:
        self._pool = block_pool
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
            # Whoever comes back has lost what happens from now on.
            self._seq += 1

    def take_batch(self, now: float) -> KVEventBatch | None:
        """The events since the batch before, if there are any; `now` is `time.time()`."""
        if not self._events:
            return None
        events, self._events = self._events, []
        self._seq += 1
        return KVEventBatch(now, self._engine_index, self._seq, events)

    def snapshot(self, now: float) -> KVCacheSnapshot:
        """The present state. Events that have not been taken are in it, and follow with the next batch, which is
        then of no effect: the last event about a block says what the snapshot says."""
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

    # What it observes: see `CacheObserver`.

    def stored(self, request: Request, start: int, end: int) -> None:
        """Note blocks of a request that can be found from now on."""
        size, hashes = self._block_size, request.block_hashes
        parent = hashes[start - 1] if start else None
        token_ids = request.all_token_ids[start * size : end * size]
        block_ids = request.block_ids[start:end]
        self._events.append(BlockStored(hashes[start:end], parent, token_ids, size, block_ids))

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        """Note that a block cannot be found any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash]))

    def replaced(self, block_id: int) -> None:
        """Nothing: the hash stays, and the event that follows says where it is found."""

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(AllBlocksCleared())


class KVCacheMirror:
    """What a follower knows of one engine's prefix cache: block ids by hash."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.incarnation = 0
        self.seq: int | None = None
        """Of the latest message; None before the first snapshot and after a loss."""

    def apply(self, message: KVMessage) -> bool:
        """Take in the next message; False if some before it were lost, and a snapshot is needed to go on."""
        if isinstance(message, KVCacheSnapshot):
            self.blocks = dict(zip(message.block_hashes, message.block_ids, strict=True))
            self.seq, self.incarnation = message.seq, message.incarnation
            return True
        if self.seq is None or message.seq > self.seq + 1 or message.incarnation != self.incarnation:
            self.seq = None
            return False
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
