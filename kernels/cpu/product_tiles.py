"""The product of one tile of a quantised weight with the records of some rows: 16 sums a row.

The 16 lanes are computed in parts of `QuadProduct.lanes`, one after the other in each cell: a processor with few
registers would otherwise keep the levels in memory while the rows are multiplied with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from nbengine.kernels.cpu.codegen import CacheLevel, Code, Element, Int, Vector
from nbengine.kernels.cpu.integers import (
    LANES,
    QuadProduct,
    add_quad_products,
    broadcast_word,
    load_bytes,
    load_words,
    look_up,
    power_of_two,
    to_float,
    words,
)
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.quantized import MICRO_LEVELS, PLANE, QUADS, SPAN, Format

_FLOAT = 4
_LINE = 64
_FEW_ROWS = 2
"""Rows up to which all lanes are computed together: there are registers enough, and the weight is read in order."""
_SIGNED_QUADS = 2
"""Signed quads that are multiplied with all rows before the next ones: each takes two registers."""
_AHEAD = 8192
"""Bytes from what is read to what is asked for: more than a page, where the processor's own prefetching ends."""
_AHEAD_OF_FEW = 3072
"""The same with AVX2 and few rows, which was the fastest of 1 to 16 KiB on an EPYC: a thread's piece of a small weight
is hardly longer than 8 KiB, and what is asked for beyond its end is another thread's."""


class _Total(Protocol):
    """The sums of a row: an `Accumulator`, or what lies in memory."""

    def get(self) -> Vector: ...

    def set(self, value: Vector) -> None: ...


@dataclass(frozen=True)
class ProductTile:
    """The code of the product of tiles with some rows at a time; `level` is the cache that the weight is fetched to
    before it is needed."""

    code: Code
    form: Format
    layout: RecordLayout
    kind: QuadProduct
    level: CacheLevel

    def sums(self, weight: Int, end: Int, then: Int, cells: Int, records: Sequence[Int]) -> list[Vector]:
        """Multiply the tile from `weight` to `end`, of some cells, with the rows whose records are given; `then` is the
        address of the tile that comes after it."""
        code, form, lanes, zero = self.code, self.form, self.kind.lanes, self.code.constant(0.0, LANES)
        sums = [code.accumulator(zero) if lanes == LANES else _Memory.of(code, zero) for _ in records]
        together = LANES if len(records) <= _FEW_ROWS else lanes
        passes = LANES // together
        share = form.cell_bytes // (form.spans * passes)
        with code.loop(0, cells) as cell:
            here = weight + cell * form.cell_bytes
            ahead = here + self._ahead(len(records))
            ahead = ahead.if_else(ahead.compare("<", end), ahead - end + then)
            with code.loop(0, code.integer(passes)) as number:
                parts = [_Part(self, here, number * together + first) for first in range(0, together, lanes)]
                supers = [part.supers() for part in parts]
                with code.loop(0, code.integer(form.spans)) as span:
                    self._prefetch(ahead + (number * form.spans + span) * share, share)
                    at = (cell * form.spans + span) * self.layout.bytes
                    rows = [record + at for record in records]
                    for part, its_supers in zip(parts, supers, strict=True):
                        part.add_span(span, its_supers, rows, [part.of(total) for total in sums])
        return [each.get() for each in sums]

    def _ahead(self, rows: int) -> int:
        """Return the bytes from what is read to what is asked for."""
        return _AHEAD_OF_FEW if self.kind is QuadProduct.AVX2 and rows <= _FEW_ROWS else _AHEAD

    def _prefetch(self, address: Int, num_bytes: int) -> None:
        """Ask for memory that is read soon: each span fills the window in which a processor looks for loads itself."""
        for line in range(0, num_bytes, _LINE):
            self.code.prefetch(address + line, self.level)


@dataclass(frozen=True)
class _Memory:
    """The sums of a row on the stack."""

    code: Code
    address: Int
    lanes: int

    @classmethod
    def of(cls, code: Code, initial: Vector) -> _Memory:
        made = cls(code, code.stack(initial.lanes * _FLOAT), initial.lanes)
        made.set(initial)
        return made

    def part(self, first: Int, lanes: int) -> _Memory:
        """Return the sums of some lanes."""
        return _Memory(self.code, self.address + first * _FLOAT, lanes)

    def get(self) -> Vector:
        """Return the value at this point."""
        return self.code.load(self.address, self.lanes)

    def set(self, value: Vector) -> None:
        """Replace the value."""
        self.code.store(value, self.address)


@dataclass(frozen=True)
class _Part:
    """The lanes of the cell at `cell` from `first` on, as many as are computed together."""

    tile: ProductTile
    cell: Int
    first: Int

    def of(self, total: _Total) -> _Total:
        """Return the part's lanes of a row's sums."""
        return total.part(self.first, self.tile.kind.lanes) if isinstance(total, _Memory) else total

    def supers(self) -> list[Vector]:
        """Load what the scales of the cell are multiplied with, and what its minima are, where they are small
        integers."""
        form = self.tile.form
        count = 0 if not form.is_super else 2 if form.has_minimum else 1
        return [self._halves(form.supers_at + 2 * LANES * number) for number in range(count)]

    def add_span(
        self, span: Int, supers: Sequence[Vector], records: Sequence[Int], sums: Sequence[_Total]
    ) -> None:
        """Add the product of 32 columns to the sums of each row."""
        form, scales = self.tile.form, self._scales(span, supers)
        minima = self._minima(span, supers[1] if form.is_super and form.has_minimum else scales[0])
        size = _SIGNED_QUADS if self.tile.kind.centre(form.largest) else QUADS
        chunks = [range(first, first + size) for first in range(0, QUADS, size)]
        planes = range(self.tile.layout.planes)
        products = [[[self._words(0) for _ in planes] for _ in scales] for _ in records]
        for chunk in chunks:
            quads = {number: self._quad(self.cell + span * form.span_bytes, number) for number in chunk}
            for record, found, total in zip(records, products, sums, strict=True):
                self._multiply(quads, record, found)
                if chunk is chunks[-1]:
                    total.set(self._scaled(found, scales, minima, record, total.get()))

    def _multiply(
        self, quads: Mapping[int, ir.Value], record: Int, products: Sequence[list[ir.Value]]
    ) -> None:
        """Add the products of some quads, by their numbers, to those of each group of columns with one scale and of
        each plane of the record."""
        code, kind = self.tile.code, self.tile.kind
        each = QUADS // len(products)
        for group, planes in enumerate(products):
            for plane, product in enumerate(planes):
                pairs = [
                    (quad, broadcast_word(code, record + (plane * SPAN + 4 * number), kind.lanes))
                    for number, quad in quads.items()
                    if number // each == group
                ]
                planes[plane] = add_quad_products(code, kind, product, pairs, self.tile.form.largest)

    def _scaled(
        self,
        products: Sequence[Sequence[ir.Value]],
        scales: Sequence[Vector],
        minima: Vector | None,
        record: Int,
        value: Vector,
    ) -> Vector:
        """Return the sums of a row with the products of all groups added."""
        layout = self.tile.layout
        if minima is not None:
            value = minima.times_plus(self._number(record + layout.scaled_sum_at), value)
        for group, scale in enumerate(scales):
            moved = self._moved(self._joined(products[group]), record, group, len(scales))
            value = moved.times_plus(scale * self._number(record + layout.scale_at), value)
        return value

    def _joined(self, planes: Sequence[ir.Value]) -> ir.Value:
        """Return the products of whole integers from those of their bytes."""
        b, (found, *others) = self.tile.code.builder, planes
        for other in others:
            found = b.add(b.shl(found, self._words(8)), other)
        return found

    def _moved(self, products: ir.Value, record: Int, group: int, groups: int) -> Vector:
        """Return the sum of products with what the levels lack, as float32, in which all of this is exact for integers
        of 8 bits."""
        code, kind, form, layout = self.tile.code, self.tile.kind, self.tile.form, self.tile.layout
        found, lacking = to_float(code, products), kind.centre(form.largest) - form.offset
        if not lacking:
            return found

        def more(factor: int, place: int, addend: Vector) -> Vector:
            return self._number(record + place).times_plus(code.constant(factor, kind.lanes), addend)

        if groups == 1:
            return more(lacking, layout.sum_at, found)
        if not group:
            return more(lacking, layout.first_sum_at, found)
        return more(lacking, layout.sum_at, more(-lacking, layout.first_sum_at, found))

    def _quad(self, bits: Int, number: int) -> ir.Value:
        """Load the levels of a quad, less `QuadProduct.centre`."""
        b, form, kind = self.tile.code.builder, self.tile.form, self.tile.kind
        if form.bits == 8:
            levels = self._plane(bits, number)
            centre = kind.centre(form.largest)
            return b.xor(levels, self._words(centre * 0x01010101)) if centre else levels
        plane = self._plane(bits, number % 4)
        if number >= 4:
            plane = b.lshr(plane, self._words(4))
        levels = b.and_(plane, self._words(0x0F0F0F0F))
        if form.is_micro:
            return look_up(self.tile.code, kind, MICRO_LEVELS, levels)
        return levels if form.bits == 4 else b.or_(levels, self._high(bits, number))

    def _high(self, bits: Int, quad: int) -> ir.Value:
        """Return the bits above the fourth of a quad, in their place."""
        b, width = self.tile.code.builder, self.tile.form.bits - 4
        place = quad * width
        plane = self._plane(bits, 4 + place // 8)
        mask = 0x10101010 * (2**width - 1)
        shift = place % 8 - 4
        moved = b.shl(plane, self._words(-shift)) if shift < 0 else b.lshr(plane, self._words(shift))
        return b.and_(moved, self._words(mask))

    def _scales(self, span: Int, supers: Sequence[Vector]) -> list[Vector]:
        """Load the scales of 32 columns: one, or one for each half."""
        code, form = self.tile.code, self.tile.form
        if form.is_micro:
            return [power_of_two(code, self.cell + self.first + form.scales_at, self.tile.kind.lanes)]
        if not form.is_super:
            return [self._halves(form.scales_at)]
        groups = SPAN // form.group
        at = span * (groups * LANES) + form.scales_at
        return [self._bytes(at + group * LANES, signed=True) * supers[0] for group in range(groups)]

    def _minima(self, span: Int, factor: Vector) -> Vector | None:
        """Load the minima of 32 columns; those that are small integers are multiplied with `factor`."""
        code, form = self.tile.code, self.tile.form
        if not form.has_minimum:
            return None
        if not (form.is_super or form.has_zero):
            return self._halves(form.minima_at)
        zero = code.constant(0.0, self.tile.kind.lanes)
        return zero - self._bytes(span * LANES + form.minima_at, signed=False) * factor

    def _plane(self, bits: Int, number: int) -> ir.Value:
        return load_words(self.tile.code, bits + self.first * 4 + number * PLANE, self.tile.kind.lanes)

    def _number(self, address: Int) -> Vector:
        """Load a float32 into every lane."""
        return self.tile.code.load(address).splat(self.tile.kind.lanes)

    def _halves(self, at: int) -> Vector:
        """Load numbers of 16 bits."""
        return self.tile.code.load(self.cell + self.first * 2 + at, self.tile.kind.lanes, Element.FLOAT16)

    def _bytes(self, at: Int, *, signed: bool) -> Vector:
        lanes = self.tile.kind.lanes
        return load_bytes(self.tile.code, self.cell + self.first + at, signed=signed, lanes=lanes)

    def _words(self, value: int) -> ir.Constant:
        return words(value, self.tile.kind.lanes)
