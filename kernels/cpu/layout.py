"""The agreement between the CPU attention kernel and its caller: arguments, work list, sizes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.codegen import MAX_LANES, Element
from nbengine.kernels.cpu.pairs import PAIR
from nbengine.kernels.kv_cache import SCALE_BYTES, int8_head_width

CHUNK = 128
"""The number of cached tokens whose softmax stands by itself."""
DECODE_PART = CHUNK
PREFILL_PART = 16 * CHUNK
"""The most cached tokens that an item covers: fixed, so that a request's result does not depend on other
requests."""
MAX_TILE = 8
"""The most rows that are computed at a time."""
FLOAT = 4
"""The bytes of a float32."""


class AttentionArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and the scale of the scores with log2(e) in it.

    What follows is used by functions that are compiled for it: with a soft cap, `scale` is divided by it, and
    `soft_cap` has log2(e) in it; `span` is the size of the window or of a chunk; `sinks` are float32, one a head.
    """

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
        ("soft_cap", ctypes.c_float),
        ("span", ctypes.c_int64),
        ("sinks", ctypes.c_int64),
    ]


class Span(Enum):
    """The rule that a query sees only some of the tokens before it; see `AttentionOptions`."""

    WINDOW = "window"
    CHUNK = "chunk"


class Features(NamedTuple):
    """The parts that the options of a layer want compiled into its functions."""

    span: Span | None = None
    has_soft_cap: bool = False
    has_sinks: bool = False

    @classmethod
    def of(cls, options: AttentionOptions) -> Features:
        """Return the features that a layer with these options needs."""
        if options.is_plain:
            return PLAIN
        span = None if options.span is None else Span.WINDOW if options.window is not None else Span.CHUNK
        return cls(span, options.soft_cap is not None, options.sinks is not None)


PLAIN = Features()


class Work(IntEnum):
    """The columns (int32) of the work list; a row stands for one item of every KV head."""

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
    """The shape for which a kernel is compiled: `tile` rows are computed at a time, items have at most
    `max_tokens` and cover at most `part` cached tokens. The cache holds `element`, queries and output
    `row_element`. With a `rank` the cache is one of latents: a block has a key a token, [block_size, head_dim], which
    all heads share, and the first `rank` numbers of a key are its value."""

    head_dim: int
    group: int
    block_size: int
    element: Element
    row_element: Element
    tile: int
    max_tokens: int
    part: int
    accumulators: int
    features: Features = PLAIN
    rank: int = 0
    has_pairs: bool = False
    """Scores and sums are products of pairs of bfloat16, to which queries and weights are rounded."""

    @property
    def value_dim(self) -> int:
        """Return the numbers of a value."""
        return self.rank or self.head_dim

    @property
    def fetches_ahead(self) -> bool:
        """Return whether to fetch keys and values before they are needed: where they are read once, in
        decode."""
        return self.part == DECODE_PART

    @property
    def unroll(self) -> int:
        """Return the number of channels of a score that are multiplied in one round of the loop over them."""
        return math.gcd(self.head_dim, 8)

    @property
    def chains(self) -> int:
        """Return the number of sums that make up a score. It hides the latency of a multiply-add and must not depend
        on the tile, since a score has the same bits in tiles of any size."""
        return min(self.unroll // self.step, max(1, self.accumulators // MAX_TILE))

    @property
    def step(self) -> int:
        """Return the channels of a score, or the tokens of a sum, that are multiplied at a time."""
        return PAIR if self.has_pairs else 1

    @property
    def packs(self) -> bool:
        """Return whether an item pairs the keys and values of a chunk before all of its rows are multiplied with
        them."""
        return self.has_pairs and not self.fetches_ahead

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of the keys (or the values) of a chunk in pairs."""
        return CHUNK * self.head_bytes if self.packs else 0

    @property
    def factor(self) -> Element:
        """Return the type in which queries and weights are multiplied with keys and values."""
        return Element.BFLOAT16 if self.has_pairs else Element.FLOAT32

    @property
    def rows(self) -> int:
        """Return the number of rows that an item can have, padded to whole tiles."""
        return -(-self.max_tokens * self.group // self.tile) * self.tile

    @property
    def lanes(self) -> int:
        """Return the number of tokens in a score vector; those of latents come one at a time."""
        return min(MAX_LANES, self.block_size)

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head of one token, as stored."""
        return self.head_dim * self.element.size

    @property
    def row_head_bytes(self) -> int:
        """Return the bytes of one head of a query."""
        return self.head_dim * self.row_element.size

    @property
    def output_head_bytes(self) -> int:
        """Return the bytes of one head of the output."""
        return self.value_dim * self.row_element.size

    @property
    def block_bytes(self) -> int:
        """Return the bytes of the keys (or the values) of one block and KV head, their scales included."""
        return block_bytes(self.element, self.head_dim, self.block_size)

    @property
    def scales_at(self) -> int | None:
        """Return the place of the scales in that memory, one float32 for each token; None: there are none."""
        return scales_at(self.element, self.head_dim, self.block_size)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of queries as they are multiplied."""
        return self.head_dim * self.factor.size

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of one row of sums of values."""
        return self.value_dim * FLOAT

    @property
    def record_bytes(self) -> int:
        """Return the bytes of one row of a partial result: maximum, total, sums."""
        return self.sum_bytes + 2 * FLOAT

    @property
    def partial_bytes(self) -> int:
        """Return the bytes of a partial result."""
        return self.rows * self.record_bytes

    def columns(self) -> list[tuple[int, int]]:
        """Cut a query into vectors, as (offset, lanes)."""
        return vectors_of(self.head_dim)

    def value_columns(self) -> list[tuple[int, int]]:
        """Cut a value into vectors, as (offset, lanes)."""
        return vectors_of(self.value_dim)


def block_bytes(element: Element, head_dim: int, block_size: int) -> int:
    """Return the bytes of the keys (or the values) of one block and KV head, their scales included."""
    head_bytes = int8_head_width(head_dim) if element is Element.INT8 else head_dim * element.size
    return head_bytes * block_size


def scales_at(element: Element, head_dim: int, block_size: int) -> int | None:
    """Return the place of a block's scales in that memory, behind the numbers; None: there are none."""
    if element is not Element.INT8:
        return None
    return block_bytes(element, head_dim, block_size) - SCALE_BYTES * block_size


def vectors_of(count: int) -> list[tuple[int, int]]:
    """Cut a row of `count` numbers into vectors, as (offset, lanes)."""
    vectors, offset = [], 0
    while offset < count:
        lanes = min(MAX_LANES, 1 << ((count - offset).bit_length() - 1))
        vectors.append((offset, lanes))
        offset += lanes
    return vectors
