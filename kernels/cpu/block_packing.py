"""GGUF blocks go into the packed layout of `nbengine.kernels.quantized` as they are, a tile of 16 rows at a time.

The layout's reference, `pack`, takes levels of a byte each, which have to be made first, and passes over memory
some dozens of times. Here it is one pass: a block's bits are read as words of 32 bits, which hold four columns each,
or a half of eight; the words of 16 rows are transposed in registers, and are vectors of bits then, or nearly so.

Blocks: ggml-common.h in ggml's repository.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor, uint8

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.integers import words
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.quantized import LANES, NO_NUMBER, PLANE, QUADS, SPAN, Format

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_HALVES = ir.VectorType(_I16, LANES)
_BYTES = ir.VectorType(ir.IntType(8), PLANE)
_NIBBLES = 0x0F0F0F0F
_EXPONENT = 0x7C00
"""The bits of a float16 that are all set if it is infinite or not a number."""

Bytes = NDArray[np.uint8]


class PackArguments(ctypes.Structure):
    """The arguments: counts, addresses, and a stride in bytes. `rows` has the address of each row's blocks, 16 a tile.

    `corrupt` is set to something other than 0 if a scale or a minimum is not finite.
    """

    _fields_ = [
        (name, ctypes.c_int64) for name in ("tiles", "cells", "rows", "output", "tile_bytes", "corrupt")
    ]


def available() -> bool:
    """Return whether this machine's memory is laid out as blocks need it."""
    return sys.byteorder == "little" and ctypes.sizeof(ctypes.c_void_p) == 8


class CpuBlockPacker:
    """See `nbengine.kernels.quantized_kernels.BlockPacker`; the calling thread does the work.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """

    def warm_up(self, form: Format) -> None:
        """Compile for a format, once a process; otherwise the first use does."""
        _compile(form)

    def pack(
        self, form: Format, blocks: Bytes, output: Tensor, order: NDArray[np.int64] | None = None
    ) -> bool:
        """See `nbengine.kernels.quantized_kernels.BlockPacker.pack`."""
        num_rows, row_bytes = blocks.shape
        cells, rest = divmod(row_bytes, block_bytes(form))
        shape = form.data_shape(num_rows, cells * form.columns)
        if rest or not num_rows or blocks.dtype != np.uint8 or blocks.strides[1] != 1:
            raise InvalidArgumentError("blocks", blocks.shape, f"rows of {block_bytes(form)} bytes a block")
        if output.shape != shape or output.dtype is not uint8 or output.stride()[1:] != (shape[2], 1):
            raise InvalidArgumentError(
                "output", tuple(output.shape), f"uint8 {shape}, contiguous in each tile"
            )
        rows = np.empty(shape[0] * LANES, np.int64)
        rows[:num_rows] = np.arange(num_rows) if order is None else order
        if not 0 <= rows[:num_rows].min() <= rows[:num_rows].max() < num_rows:
            raise InvalidArgumentError("order", order, f"numbers from 0 to {num_rows - 1}")
        rows *= blocks.strides[0]
        rows += blocks.ctypes.data
        blank = _blank(form, cells) if len(rows) > num_rows else blocks
        rows[num_rows:] = blank.ctypes.data
        arguments = PackArguments(
            tiles=shape[0],
            cells=cells,
            rows=rows.ctypes.data,
            output=output.data_ptr(),
            tile_bytes=output.stride(0),
        )
        _compile(form).call(ctypes.addressof(arguments))
        return not arguments.corrupt


def block_bytes(form: Format) -> int:
    """Return the bytes of a block, which has the columns of one cell."""
    if form.is_micro:
        return 1 + SPAN * form.bits // 8
    if not form.is_super:
        return (4 if form.has_minimum else 2) + SPAN * form.bits // 8
    return 256 * form.bits // 8 + (16 if form.has_minimum else 18)


def _blank(form: Format, cells: int) -> Bytes:
    """Make the blocks of a row whose levels and scales are all 0."""
    block = np.zeros(block_bytes(form), np.uint8)
    if form.bits == 8:
        block[2:] = form.offset
    return np.tile(block, cells)


@cache
def _compile(form: Format) -> Function:
    (function,) = compile_module(_define, ["pack_blocks"], form)
    return function


def _define(module: ir.Module, form: Format) -> None:
    define(module, "pack_blocks", 1, partial(_pack_blocks, form), exported=True)


def _pack_blocks(form: Format, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(PackArguments, name).offset)

    corrupt = code.stack(8)
    code.store_int(code.integer(0), corrupt)
    with code.loop(0, get("tiles")) as tile:
        places = get("rows") + tile * (8 * LANES)
        rows = [code.load_int(places + row * 8) for row in range(LANES)]
        with code.loop(0, get("cells")) as number:
            first, target = number * block_bytes(form), get("output") + tile * get("tile_bytes")
            cell = _Cell(
                form, code, [row + first for row in rows], target + number * form.cell_bytes, corrupt
            )
            write = _write_micro if form.is_micro else _write_super if form.is_super else _write_plain
            write(cell)
    code.store_int(code.load_int(corrupt), args + PackArguments.corrupt.offset)


def _write_plain(cell: _Cell) -> None:
    """Write a cell of 32 columns. Its blocks have scale, minimum, fifth bits, and levels, which are 8 bits or
    nibbles: the low ones first, as in the layout."""
    form = cell.form
    at = 4 if form.has_minimum else 2
    cell.store_halves(cell.words(0, 1)[0], form.scales_at)
    if form.has_minimum:
        cell.store_halves(cell.shifted(cell.words(0, 1)[0], -16), form.minima_at)
    if form.bits == 8:
        for quad, levels in enumerate(cell.words(at, QUADS)):
            # Levels are not negative: -128 becomes 0.
            cell.store(cell.code.builder.xor(levels, words(0x80808080)), quad * PLANE)
        return
    if form.bits == 5:
        cell.store(cell.by_quads(cell.words(at, 1)[0]), 4 * PLANE)
        at += 4
    for plane, nibbles in enumerate(cell.words(at, 4)):
        cell.store(nibbles, plane * PLANE)


def _write_micro(cell: _Cell) -> None:
    """Write a cell of MXFP4, whose blocks have the scale, and nibbles as in the layout."""
    cell.store_scale_bytes(cell.words(0, 1)[0], cell.form.scales_at)
    for plane, nibbles in enumerate(cell.words(1, 4)):
        cell.store(nibbles, plane * PLANE)


def _write_super(cell: _Cell) -> None:
    """Write a cell of 256 columns. Its blocks begin with scales, those with minima, or end with them."""
    form = cell.form
    if form.has_minimum:
        _write_small_scales(cell)
        high = cell.words(16, QUADS) if form.bits == 5 else []
        first = 16 + 32 * (form.bits - 4)
        for group in range(4):
            found = cell.words(first + 32 * group, QUADS)
            cell.store_nibbles(cell.low(found), 2 * group)
            cell.store_nibbles(cell.high(found), 2 * group + 1)
        if high:
            for span in range(form.spans):
                cell.store(cell.joined(high, 1, span), span * form.span_bytes + 4 * PLANE)
        return
    for half in range(2):
        ends = [cell.words(64 * half + 32 * end, QUADS) for end in range(2)]
        high = cell.words(128 + 32 * half, QUADS)
        for part, nibbles in enumerate([*map(cell.low, ends), *map(cell.high, ends)]):
            span = 4 * half + part
            cell.store_nibbles(nibbles, span)
            for plane in range(2):
                bits = cell.joined(high[4 * plane : 4 * plane + 4], 2, part)
                cell.store(bits, span * form.span_bytes + (4 + plane) * PLANE)
    for number, scales in enumerate(cell.words(192, 4)):
        cell.store_by_group(scales, form.scales_at + number * PLANE)
    # The last two bytes of the block; a whole word from there would be beyond the last row.
    cell.store_halves(cell.shifted(cell.words(206, 1)[0], -16), form.supers_at)


def _write_small_scales(cell: _Cell) -> None:
    """Write the scales and minima of eight spans, 6 bits each in 12 bytes, and those of 256 columns."""
    form, b = cell.form, cell.code.builder
    supers, low, high, rest = cell.words(0, 4)
    cell.store_halves(supers, form.supers_at)
    cell.store_halves(cell.shifted(supers, -16), form.supers_at + 2 * LANES)
    for at, first, nibbles in ((form.scales_at, low, rest), (form.minima_at, high, cell.shifted(rest, -4))):
        cell.store_by_group(b.and_(first, words(0x3F3F3F3F)), at)
        top = b.and_(cell.shifted(first, -2), words(0x30303030))
        cell.store_by_group(b.or_(b.and_(nibbles, words(_NIBBLES)), top), at + PLANE)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell at `target`, and the addresses of the blocks of its 16 rows. Vectors are 16 words, one a row."""

    form: Format
    code: Code
    rows: Sequence[Int]
    target: Int
    corrupt: Int

    def words(self, at: int, count: int) -> list[ir.Value]:
        """Load words, a power of two of them and 16 at most, that lie one after the other in each row's block."""
        b, kind = self.code.builder, ir.VectorType(_I32, count)
        found = [b.load(b.inttoptr((row + at).ir, kind.as_pointer()), align=1) for row in self.rows]
        while found[0].type.count < LANES:
            found = [_picked(b, pair, range(2 * pair[0].type.count)) for pair in _pairs(found)]
        # A word's place in all vectors together is 16 row + number, in bits: the number's go to the top, one by one.
        for _ in range(count.bit_length() - 1):
            pairs = _pairs(found)
            found = [_picked(b, pair, range(first, 2 * LANES, 2)) for first in range(2) for pair in pairs]
        return found

    def store(self, value: ir.Value, at: int) -> None:
        """Store a vector in the cell."""
        self.code.store_lanes(value, self.target + at)

    def store_halves(self, value: ir.Value, at: int) -> None:
        """Store the low halves of words, which are float16, and note if one is not finite."""
        b = self.code.builder
        halves = b.trunc(value, _HALVES)
        exponent = _HALVES([_EXPONENT] * LANES)
        self._note(b.icmp_unsigned("==", b.and_(halves, exponent), exponent))
        self.code.store_lanes(halves, self.target + at)

    def store_scale_bytes(self, value: ir.Value, at: int) -> None:
        """Store the low bytes of words, which are exponents, and note if one stands for what is no number."""
        b, kind = self.code.builder, ir.VectorType(ir.IntType(8), LANES)
        found = b.trunc(value, kind)
        self._note(b.icmp_unsigned("==", found, kind([NO_NUMBER] * LANES)))
        self.code.store_lanes(found, self.target + at)

    def _note(self, wrong: ir.Value) -> None:
        """Note if any of 16 flags is set."""
        b = self.code.builder
        flags = Int(b, b.zext(b.bitcast(wrong, _I16), ir.IntType(64)))
        found = self.code.load_int(self.corrupt)
        self.code.store_int(Int(b, b.or_(found.ir, flags.ir)), self.corrupt)

    def store_by_group(self, value: ir.Value, at: int) -> None:
        """Store the bytes of words, those of four groups, so that all rows of a group lie together."""
        b = self.code.builder
        found = b.bitcast(value, _BYTES)
        order = [4 * row + group for group in range(4) for row in range(LANES)]
        self.code.store_lanes(_picked(b, (found, found), order), self.target + at)

    def store_nibbles(self, quads: Sequence[ir.Value], span: int) -> None:
        """Store the nibbles of a span's quads: those of two quads in a byte."""
        b = self.code.builder
        for plane in range(4):
            both = b.or_(quads[plane], self.shifted(quads[plane + 4], 4))
            self.store(both, span * self.form.span_bytes + plane * PLANE)

    def low(self, found: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the low nibbles of bytes."""
        return [self.code.builder.and_(each, words(_NIBBLES)) for each in found]

    def high(self, found: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the high nibbles of bytes."""
        return self.low([self.shifted(each, -4) for each in found])

    def joined(self, quads: Sequence[ir.Value], width: int, number: int) -> ir.Value:
        """Join the field with a number, of `width` bits, of the bytes of each quad, the first quad's lowest."""
        b, mask = self.code.builder, (2**width - 1) * 0x01010101 << number * width
        result = words(0)
        for place, quad in enumerate(quads):
            field = self.shifted(b.and_(quad, words(mask)), (place - number) * width)
            result = b.or_(result, field)
        return result

    def by_quads(self, value: ir.Value) -> ir.Value:
        """Bring bit 4 q + k of each word to the place 8 k + q: its five index bits are rotated, by exchanges."""
        for one, other in ((1, 4), (0, 3), (1, 2), (0, 1)):
            value = self._exchanged(value, one, other)
        return value

    def _exchanged(self, value: ir.Value, one: int, other: int) -> ir.Value:
        """Exchange the bits of each word whose place has the index bit `one`, but not `other`, with those that have
        it the other way round."""
        b, distance = self.code.builder, 2**other - 2**one
        mask = sum(1 << place for place in range(32) if place >> one & 1 and not place >> other & 1)
        moved = b.and_(b.xor(self.shifted(value, -distance), value), words(mask))
        return b.xor(value, b.or_(moved, self.shifted(moved, distance)))

    def shifted(self, value: ir.Value, left: int) -> ir.Value:
        """Shift the bits of words to the left, or to the right if `left` is negative."""
        b = self.code.builder
        return b.shl(value, words(left)) if left > 0 else b.lshr(value, words(-left)) if left else value


def _pairs(vectors: Sequence[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def _picked(builder: ir.IRBuilder, pair: tuple[ir.Value, ir.Value], order: Iterable[int]) -> ir.Value:
    """Return the elements of two vectors, one behind the other, that have these numbers."""
    numbers = list(order)
    return builder.shuffle_vector(*pair, ir.VectorType(_I32, len(numbers))(numbers))
