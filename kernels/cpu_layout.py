"""What the CPU attention kernel and its caller agree on: arguments, work list, sizes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

from nbengine.kernels.cpu_ir import MAX_LANES, Element

CHUNK = 128
"""Tokens between two updates of the running maximum."""
FLOAT = 4
"""Bytes of a float32."""


class AttentionArguments(ctypes.Structure):
    """Addresses, strides in bytes, and the scale of the scores with log2(e) in it."""

    _fields_ = [
        ("counter", ctypes.c_int64),
        ("items", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("query", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("key_cache", ctypes.c_int64),
        ("value_cache", ctypes.c_int64),
        ("block_table", ctypes.c_int64),
        ("block_table_stride", ctypes.c_int64),
        ("work", ctypes.c_int64),
        ("partials", ctypes.c_int64),
        ("arrivals", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class Work(IntEnum):
    """Columns (int32) of the work list; a row stands for one item of every KV head."""

    REQUEST = 0
    FIRST_TOKEN = 1  # in the flattened batch
    TOKENS = 2
    VISIBLE = 3  # cached tokens that the first query token sees, itself included
    KV_START = 4
    KV_END = 5
    TASK = 6
    PART = 7
    PARTS = 8
    PARTIAL = 9  # number of the task's first partial result


@dataclass(frozen=True)
class AttentionShape:
    """What a kernel is compiled for: `tile` rows are computed at a time, items have at most `max_tokens`."""

    head_dim: int
    group: int
    block_size: int
    element: Element
    tile: int
    max_tokens: int
    accumulators: int

    @property
    def fetches_ahead(self) -> bool:
        """Whether to fetch keys and values before they are needed: where they are read once, in decode."""
        return self.max_tokens == 1

    @property
    def rows(self) -> int:
        """Rows that an item can have, padded to whole tiles."""
        return -(-self.max_tokens * self.group // self.tile) * self.tile

    @property
    def lanes(self) -> int:
        """Tokens in a score vector."""
        return min(MAX_LANES, self.block_size)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, as stored."""
        return self.head_dim * self.element.size

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys (or the values) of one block and KV head."""
        return self.head_bytes * self.block_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in float32."""
        return self.head_dim * FLOAT

    @property
    def record_bytes(self) -> int:
        """Bytes of one row of a partial result: maximum, total, sums."""
        return self.row_bytes + 2 * FLOAT

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial result."""
        return self.rows * self.record_bytes

    def columns(self) -> list[tuple[int, int]]:
        """A row cut into vectors, as (offset, lanes)."""
        vectors, offset = [], 0
        while offset < self.head_dim:
            lanes = min(MAX_LANES, 1 << ((self.head_dim - offset).bit_length() - 1))
            vectors.append((offset, lanes))
            offset += lanes
        return vectors
