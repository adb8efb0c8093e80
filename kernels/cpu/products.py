"""Products with quantised weights: x @ weight.T with 8-bit activations. x and the result are float32.

A row of x is rounded in spans of 32 columns, each to integers from -127 to 127 and a scale. The product of a
span is a sum of products of small integers, which is exact; it is scaled and added in float32, span after
span. So a row's result depends neither on the rows beside it nor on the number of threads.

The rounded rows lie in records: `nbengine.kernels.cpu.records`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Accumulator, CacheLevel, Code, Element, Int, Vector, define
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
from nbengine.kernels.cpu.jit import Function, compile_module, host_processor
from nbengine.kernels.cpu.records import RECORD_BYTES, SCALE_AT, SCALED_SUM_AT, SUMS_AT, round_span
from nbengine.kernels.cpu.vectors import GATES
from nbengine.kernels.quantized import MICRO_LEVELS, PLANE, QUADS, SPAN, Format

_HALVES = 2
_FLOAT = 4
_LINE = 64
_AHEAD = 8192
"""Bytes from what is read to what is asked for: more than a page, where the processor's own prefetching ends."""
ROWS = (8, 4, 2, 1)
"""The numbers of rows that are computed at a time."""
BLOCK = 64
"""Rows whose records are read again for one tile after the other, so that they stay in the cache."""


class ProductArguments(ctypes.Structure):
    """The arguments of the functions: addresses, strides in bytes, and counts.

    The threads of a call draw parts of the work from `counter`: `items` of `item_size` tiles (of the product)
    or rows (of the rounding).
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "counter",
            "items",
            "rows",
            "item_size",
            "tiles",
            "spans",
            "weight",
            "tile_bytes",
            "x",
            "x_stride",
            "records",
            "record_stride",
            "output",
            "output_stride",
            "out_features",
        )
    ]


@dataclass(frozen=True)
class _Frame:
    """A function's code and its arguments by name."""

    code: Code
    args: Int
    kind: type[ctypes.Structure] = ProductArguments

    def get(self, name: str) -> Int:
        return self.code.load_int(self.args + getattr(self.kind, name).offset)

    def items(self) -> Iterator[tuple[Int, Int]]:
        """Draw parts of the work; yield the first number of each, and the one behind its last."""
        size = self.get("item_size")
        with self.code.tickets(self.args, self.get("items")) as item:
            first = item * size
            yield first, first + size

    def blocks(self) -> Iterator[tuple[Int, Int, Int, Int]]:
        """Draw each item once for each block of rows; yield the first number of the item, the one behind its last,
        and the same of the rows."""
        size, items, rows = self.get("item_size"), self.get("items"), self.get("rows")
        with self.code.tickets(self.args, items * ((rows + (BLOCK - 1)) // BLOCK)) as ticket:
            first, row = ticket % items * size, ticket // items * BLOCK
            yield first, first + size, row, (row + BLOCK).at_most(rows)


@cache
def compile_round_rows() -> Function:
    """Compile the function of `ProductArguments` that makes records of x.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_round_rows, ["round_rows"])
    return function


def _define_round_rows(module: ir.Module) -> None:
    define(module, "round_rows", 1, _round_rows, exported=True)


@cache
def compile_multiply(form: Format) -> Function:
    """Compile the function of `ProductArguments` that makes the output of records and a weight.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    kind = QuadProduct.best(host_processor())
    (function,) = compile_module(_define_multiply, ["multiply"], form, kind)
    return function


def _define_multiply(module: ir.Module, form: Format, kind: QuadProduct) -> None:
    define(module, "multiply", 1, partial(_multiply, form, kind), exported=True)


class GatedArguments(ctypes.Structure):
    """The arguments of a gated product: addresses, strides in bytes, and counts.

    `items` are of `item_size` pairs of tiles, `pairs` in all, of the gate at `gate` and of the other projection at
    `up`; `output` gets the records of activation(gate) * up.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "counter",
            "items",
            "rows",
            "item_size",
            "pairs",
            "spans",
            "gate",
            "up",
            "tile_bytes",
            "records",
            "record_stride",
            "output",
            "output_stride",
        )
    ]


@cache
def compile_gated(form: Format, activation: str = "silu") -> Function:
    """Compile the function of `GatedArguments` that makes records of activation(gate(x)) * up(x) from the records of
    x: what two products, a gate and a rounding make, without the numbers between them.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    kind = QuadProduct.best(host_processor())
    (function,) = compile_module(_define_gated, ["gated"], form, kind, activation)
    return function


def _define_gated(module: ir.Module, form: Format, kind: QuadProduct, activation: str) -> None:
    define(module, "gated", 1, partial(_gated, form, kind, activation), exported=True)


def _gated(form: Format, kind: QuadProduct, activation: str, code: Code, args: Int) -> None:
    gate_with = GATES[activation]
    frame = _Frame(code, args, GatedArguments)
    gate, up, tile_bytes = frame.get("gate"), frame.get("up"), frame.get("tile_bytes")
    output, stride = frame.get("output"), frame.get("output_stride")
    position = code.stack(8)
    for first, behind, *rows in frame.blocks():
        with code.loop(first, behind.at_most(frame.get("pairs"))) as pair:
            for it, row in _groups(frame, form, kind, position, *rows):
                tiles = []
                for half in range(_HALVES):
                    at = (pair * _HALVES + half) * tile_bytes
                    gates = _sums(it, gate + at, row, then=up + at)
                    others = _sums(it, up + at, row, then=gate + at + tile_bytes)
                    both = zip(gates, others, strict=True)
                    tiles.append([gate_with(code, one.get(), other.get()) for one, other in both])
                for number, halves in enumerate(zip(*tiles, strict=True)):
                    record = output + (row + number) * stride + pair * RECORD_BYTES
                    round_span(code, halves, record)


def _round_rows(code: Code, args: Int) -> None:
    frame = _Frame(code, args)
    rows, spans = frame.get("rows"), frame.get("spans")
    x, x_stride = frame.get("x"), frame.get("x_stride")
    records, record_stride = frame.get("records"), frame.get("record_stride")
    for first, behind in frame.items():
        with code.loop(first, behind.at_most(rows)) as row:
            source, target = x + row * x_stride, records + row * record_stride
            with code.loop(0, spans) as span:
                here = source + span * (SPAN * _FLOAT)
                halves = [code.load(here + half * LANES * _FLOAT, LANES) for half in range(_HALVES)]
                round_span(code, halves, target + span * RECORD_BYTES)


def _multiply(form: Format, kind: QuadProduct, code: Code, args: Int) -> None:
    frame = _Frame(code, args)
    tiles, weight, tile_bytes = frame.get("tiles"), frame.get("weight"), frame.get("tile_bytes")
    position = code.stack(8)
    for first, behind, *rows in frame.blocks():
        with code.loop(first, behind.at_most(tiles)) as tile:
            here = weight + tile * tile_bytes
            for it, row in _groups(frame, form, kind, position, *rows):
                _multiply_tile(it, here, row, tile)


def _groups(
    frame: _Frame, form: Format, kind: QuadProduct, position: Int, start: Int, stop: Int
) -> Iterator[tuple[_Tile, Int]]:
    """Go over rows, some at a time; yield how many, and the first one. `position` is a place on the stack."""
    code = frame.code
    code.store_int(start, position)
    for count in ROWS:

        def fits(count: int = count) -> ir.Value:
            return (stop - code.load_int(position)).compare(">=", count)

        with code.loop_while(fits):
            row = code.load_int(position)
            yield _Tile(frame, form, kind, count), row
            code.store_int(row + count, position)


@dataclass(frozen=True)
class _Tile:
    """The product of one tile with `count` rows."""

    frame: _Frame
    form: Format
    kind: QuadProduct
    count: int

    def quads(self, span: Int) -> list[ir.Value]:
        """Load the levels of 32 columns, one vector for each quad."""
        code, bits = self.frame.code, self.form.bits
        b = code.builder
        if bits == 8:
            return [load_words(code, span + quad * PLANE) for quad in range(QUADS)]
        planes = [load_words(code, span + plane * PLANE) for plane in range(4)]
        nibble, four = words(0x0F0F0F0F), words(4)
        low = [b.and_(plane, nibble) for plane in planes]
        quads = low + [b.and_(b.lshr(plane, four), nibble) for plane in planes]
        if self.form.is_micro:
            return [look_up(code, self.kind, MICRO_LEVELS, quad) for quad in quads]
        return (
            [b.or_(quad, self._high(span, number)) for number, quad in enumerate(quads)]
            if bits > 4
            else quads
        )

    def _high(self, span: Int, quad: int) -> ir.Value:
        """Return the bits above the fourth of a quad, in their place."""
        b, width = self.frame.code.builder, self.form.bits - 4
        place = quad * width
        plane = load_words(self.frame.code, span + (4 + place // 8) * PLANE)
        mask = 0x10101010 * (2**width - 1)
        shift = place % 8 - 4
        moved = b.shl(plane, words(-shift)) if shift < 0 else b.lshr(plane, words(shift))
        return b.and_(moved, words(mask))


def _multiply_tile(it: _Tile, weight: Int, row: Int, tile: Int) -> None:
    """Multiply a tile with rows, and store the results."""
    following = weight + it.frame.get("tile_bytes")
    _store(it, _sums(it, weight, row, then=following), row, tile)


def _sums(it: _Tile, weight: Int, row: Int, then: Int) -> list[Accumulator]:
    """Multiply a tile with the rows from `row` on; `then` is the address of the tile that comes after it."""
    code, form = it.frame.code, it.form
    stride = it.frame.get("record_stride")
    records = [it.frame.get("records") + (row + number) * stride for number in range(it.count)]
    sums = [code.accumulator(code.constant(0.0, LANES)) for _ in range(it.count)]
    cells = it.frame.get("spans") // form.spans
    end = weight + it.frame.get("tile_bytes")
    with code.loop(0, cells) as cell:
        here = weight + cell * form.cell_bytes
        ahead = here + _AHEAD
        ahead = ahead.if_else(ahead.compare("<", end), ahead - end + then)
        if form.is_super:
            supers = code.load(here + form.supers_at, LANES, Element.FLOAT16)
            lower = (
                code.load(here + form.supers_at + 2 * LANES, LANES, Element.FLOAT16)
                if form.has_minimum
                else None
            )
            with code.loop(0, code.integer(form.spans)) as span:
                at = (cell * form.spans + span) * RECORD_BYTES
                share = form.cell_bytes // form.spans
                _prefetch(it, ahead + span * share, share)
                scales = _super_scales(it, here, span, supers)
                minima = None
                if lower is not None:
                    minima = load_bytes(code, here + form.minima_at + span * LANES, signed=False) * lower
                    minima = code.constant(0.0, LANES) - minima
                _add_span(it, here + span * form.span_bytes, scales, minima, [r + at for r in records], sums)
        else:
            at = cell * RECORD_BYTES
            _prefetch(it, ahead, form.cell_bytes)
            place = here + form.scales_at
            scale = power_of_two(code, place) if form.is_micro else code.load(place, LANES, Element.FLOAT16)
            _add_span(it, here, [scale], _minima(it, here, scale), [r + at for r in records], sums)
    return sums


def _prefetch(it: _Tile, address: Int, num_bytes: int) -> None:
    """Ask for memory that is read soon: each span fills the window in which a processor looks for loads itself.

    A tile of the most rows takes long enough for the next one to come to the first cache meanwhile; fewer rows would
    wait for it.
    """
    level = CacheLevel.FIRST if it.count == ROWS[0] else CacheLevel.SECOND
    for line in range(0, num_bytes, _LINE):
        it.frame.code.prefetch(address + line, level)


def _minima(it: _Tile, cell: Int, scale: Vector) -> Vector | None:
    code, form = it.frame.code, it.form
    if not form.has_minimum:
        return None
    if form.has_zero:
        zeros = load_bytes(code, cell + form.minima_at, signed=False)
        return code.constant(0.0, LANES) - zeros * scale
    return code.load(cell + form.minima_at, LANES, Element.FLOAT16)


def _super_scales(it: _Tile, cell: Int, span: Int, supers: Vector) -> list[Vector]:
    code, groups = it.frame.code, SPAN // it.form.group
    at = cell + it.form.scales_at + span * (groups * LANES)
    return [load_bytes(code, at + group * LANES, signed=True) * supers for group in range(groups)]


def _add_span(
    it: _Tile,
    bits: Int,
    scales: list[Vector],
    minima: Vector | None,
    records: list[Int],
    sums: list[Accumulator],
) -> None:
    """Add the product of 32 columns to the sums of each row."""
    code = it.frame.code
    quads = it.quads(bits)
    for record, total in zip(records, sums, strict=True):
        scale = code.load(record + SCALE_AT).splat(LANES)
        value = total.get()
        if minima is not None:
            value = minima.times_plus(code.load(record + SCALED_SUM_AT).splat(LANES), value)
        each = QUADS // len(scales)
        for number, group_scale in enumerate(scales):
            products = _offset(it, record, number, len(scales))
            for quad in range(number * each, (number + 1) * each):
                signed = broadcast_word(code, record + 4 * quad)
                products = add_quad_products(code, it.kind, products, quads[quad], signed)
            value = to_float(code, products).times_plus(group_scale * scale, value)
        total.set(value)


def _offset(it: _Tile, record: Int, number: int, count: int) -> ir.Value:
    """Return where the sums of products begin: at -offset times the sum of the activations."""
    code = it.frame.code
    if not it.form.offset:
        return words(0)
    b = code.builder
    halves = [number] if count == _HALVES else range(_HALVES)
    parts = [broadcast_word(code, record + SUMS_AT + half * 4) for half in halves]
    total = parts[0] if len(parts) == 1 else b.add(*parts)
    return b.mul(total, words(-it.form.offset))


def _store(it: _Tile, sums: list[Accumulator], row: Int, tile: Int) -> None:
    """Store a tile's outputs, of the last tile those that there are."""
    code = it.frame.code
    first = tile * LANES
    left = it.frame.get("out_features") - first
    stride = it.frame.get("output_stride")
    for number, total in enumerate(sums):
        target = it.frame.get("output") + (row + number) * stride + first * _FLOAT
        is_whole = left.compare(">=", LANES)
        with code.when(is_whole):
            code.store(total.get(), target)
        with code.when(code.builder.not_(is_whole)):
            kept = code.stack(LANES * _FLOAT)
            code.store(total.get(), kept)
            with code.loop(0, left) as lane:
                code.store(code.load(kept + lane * _FLOAT), target + lane * _FLOAT)
