"""The matrix registers of x86 (AMX): eight tiles of 16 rows of 64 bytes, and the product of two of them.

Their instructions name tiles by number, so that the kernel says which tile holds what.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from nbengine.kernels.cpu.codegen import Code, Int, declare
from nbengine.kernels.cpu.jit import Processor

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES

_NUM_TILES = 8
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_PALETTE = 1
_I8, _I64 = ir.IntType(8), ir.IntType(64)


def has_bfloat16_tiles(processor: Processor) -> bool:
    """Return whether this process may use tiles of bfloat16: the processor has them, and Linux, which is asked,
    allows it."""
    needed = ("amx-tile", "amx-bf16", "avx512f")
    return all(processor.features.get(name) for name in needed) and _may_use_tiles()


@cache
def _may_use_tiles() -> bool:
    if sys.platform != "linux":
        return False
    try:
        system_call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    system_call.restype = ctypes.c_long
    numbers = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return int(system_call(*numbers)) == 0


@cache
def tile_shapes(rows: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the memory for `Tiles.configure` in which tile i has rows[i] rows of 64 bytes."""
    counts = [*rows, *[0] * (16 - len(rows))]
    widths = [TILE_ROW_BYTES if count else 0 for count in counts]
    return np.frombuffer(struct.pack("<BB14x16H16B", _PALETTE, 0, *widths, *counts), np.uint8)


class Tiles:
    """The instructions, emitted at the current point of a function."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def configure(self, shapes: Int) -> None:
        """Take the shapes of the tiles from memory (`tile_shapes`)."""
        self._call("ldtilecfg", self._pointer(shapes))

    def release(self) -> None:
        """Give the tiles back: a thread that has none is cheaper to suspend."""
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""
        self._call("tilezero", _I8(tile))

    def load(self, tile: int, address: Int, stride: Int) -> None:
        """Load a tile, whose rows are `stride` bytes apart."""
        self._call("tileloadd64", _I8(tile), self._pointer(address), stride.ir)

    def store(self, tile: int, address: Int, stride: Int) -> None:
        """Store a tile, with rows `stride` bytes apart."""
        self._call("tilestored64", _I8(tile), self._pointer(address), stride.ir)

    def add_product(self, sums: int, left: int, right: int) -> None:
        """Add left @ right to a tile of float32: `left` has rows of bfloat16, and in `right` the two numbers of
        rows 2 i and 2 i + 1 lie together, row i having those of 16 columns."""
        self._call("tdpbf16ps", *(_I8(tile) for tile in (sums, left, right)))

    def _pointer(self, address: Int) -> ir.Value:
        return self._code.builder.inttoptr(address.ir, _I8.as_pointer())

    def _call(self, name: str, *arguments: ir.Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = declare(self._code.builder.module, f"llvm.x86.{name}", kind)
        self._code.builder.call(function, arguments)
