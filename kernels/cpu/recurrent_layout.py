"""The agreement between the CPU kernels for recurrent layers and their caller: arguments, work list, sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int
from nbengine.kernels.cpu.layout import FLOAT, vectors_of
from nbengine.kernels.recurrent_metadata import NO_SOURCE

Panel = list[tuple[int, int]]
"""Neighbouring columns of a state, as vectors (offset, lanes)."""

WORD = 4
"""The bytes of a number of the work list."""


class Work(IntEnum):
    """The columns (int32) of the work list; a row stands for one request."""

    FIRST_TOKEN = 0
    TOKENS = 1
    SLOT = 2
    SOURCE = 3
    FIRST_CHECKPOINT = 4
    CHECKPOINTS_END = 5


class RecurrentArguments(ctypes.Structure):
    """The arguments of all kernels: addresses, strides in bytes, and counts; threads draw items from `counter`.

    An item is one of `parts` of one of `heads` of one request: of a matrix a range of its columns, of the convolution
    (with one head) a range of channels. `checkpoints` are pairs of int32, end and slot. The state space has its c, b
    and x as query, key and value.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "heads", "parts", "work", "checkpoints"),
            *("states", "output"),
            *("x", "x_stride", "weight", "bias"),
            *("query", "query_stride", "key", "key_stride", "value", "value_stride"),
            *("group", "decay", "beta"),
            *("dt", "rate", "skip"),
        )
    ]


@dataclass(frozen=True)
class Item:
    """One request's place in the work list, as code sees it."""

    code: Code
    args: Int
    row: Int

    def get(self, name: str) -> Int:
        """Return an argument."""
        return self.code.load_int(self.args + getattr(RecurrentArguments, name).offset)

    def work(self, column: Work) -> Int:
        """Return a number of the work list."""
        return self.code.load_int(self.row + column * WORD, WORD)

    @property
    def begins(self) -> ir.Value:
        """Return whether the request starts from zeros."""
        return self.work(Work.SOURCE).compare("==", NO_SOURCE)

    @property
    def goes_on(self) -> ir.Value:
        """Return whether the request starts from a state."""
        return self.work(Work.SOURCE).compare("!=", NO_SOURCE)

    @contextmanager
    def checkpoints(self) -> Iterator[tuple[Int, Int]]:
        """Run the body for each of the request's checkpoints, with its end and its slot."""
        code = self.code
        with code.loop(self.work(Work.FIRST_CHECKPOINT), self.work(Work.CHECKPOINTS_END)) as number:
            entry = self.get("checkpoints") + number * (2 * WORD)
            yield code.load_int(entry, WORD), code.load_int(entry + WORD, WORD)

    @contextmanager
    def segments(self) -> Iterator[tuple[Int, Int, Int]]:
        """Run the body for each run of tokens behind which the state is kept; it gets the number of its first
        token in the request, the one behind its last, and the slot."""
        code, last = self.code, self.work(Work.CHECKPOINTS_END)
        first = code.stack(8)
        code.store_int(code.integer(0), first)
        with code.loop(self.work(Work.FIRST_CHECKPOINT), last + 1) as number:
            end, slot = code.stack(8), code.stack(8)
            code.store_int(self.work(Work.TOKENS), end)
            code.store_int(self.work(Work.SLOT), slot)
            with code.when(number.compare("<", last)):
                entry = self.get("checkpoints") + number * (2 * WORD)
                code.store_int(code.load_int(entry, WORD), end)
                code.store_int(code.load_int(entry + WORD, WORD), slot)
            yield code.load_int(first), code.load_int(end), code.load_int(slot)
            code.store_int(code.load_int(end), first)


@dataclass(frozen=True)
class MatrixShape:
    """The shape for which a kernel whose states are matrices is compiled: the sizes of keys and values, their type, and
    how many vectors of sums a loop can keep in registers."""

    key_dim: int
    value_dim: int
    element: Element
    accumulators: int

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one head's state."""
        return self.key_dim * self.value_dim * FLOAT

    @property
    def panels(self) -> list[Panel]:
        """Cut the columns of a state into panels such that a panel fits into the first cache, and what a
        token does to it into registers."""
        return _groups(vectors_of(self.value_dim), max(1, self.accumulators // 12))

    @property
    def wide_panels(self) -> list[Panel]:
        """Cut the columns into panels as wide as registers allow, for a state that is passed over once."""
        return _groups(vectors_of(self.value_dim), max(1, self.accumulators // 3))


@dataclass(frozen=True)
class ConvolutionShape:
    """The shape for which the convolution is compiled."""

    channels: int
    kernel: int
    element: Element
    has_bias: bool
    silu: bool
    accumulators: int

    @property
    def tile(self) -> int:
        """Return the channels that are computed at a time."""
        return MAX_LANES * max(1, self.accumulators // (3 * self.kernel))

    @property
    def span(self) -> int:
        """Return the channels of an item, whole tiles."""
        return self.tile * max(1, 512 // self.tile)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot."""
        return self.channels * (self.kernel - 1) * self.element.size


def _groups(vectors: Panel, most: int) -> list[Panel]:
    return [vectors[i : i + most] for i in range(0, len(vectors), most)]
