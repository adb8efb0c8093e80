"""Products with quantised weights: x @ weight.T with rounded activations. x and the result are float32.

A row of x is rounded in spans of 32 columns, each to integers of 8 or 16 bits and a scale. The product of a
span is a sum of products of small integers, which is exact; it is scaled and added in float32, span after
span. So a row's result depends neither on the rows beside it nor on the number of threads.

The rounded rows lie in records: `nbengine.kernels.cpu.records`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import CacheLevel, Code, Int, Vector, define
from nbengine.kernels.cpu.integers import LANES, QuadProduct
from nbengine.kernels.cpu.jit import Function, Processor
from nbengine.kernels.cpu.product_tiles import ProductTile
from nbengine.kernels.cpu.records import RecordLayout, round_span
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.cpu.vectors import UNGATED, Activation, gate_of
from nbengine.kernels.quantized import SPAN, Format

_HALVES = 2
_FLOAT = 4
ROWS = (8, 4, 2, 1)
"""The numbers of rows that are computed at a time."""
BLOCK = 64
"""Rows whose records are read again for one tile after the other, so that they stay in the cache."""


class ProductArguments(ctypes.Structure):
    """The arguments of the functions: addresses, strides in bytes, and counts.

    The threads of a call draw parts of the work from `counter`: `items` of `item_size` tiles (of the product)
    or rows (of the rounding). Functions that are compiled for it add `bias`, float32.
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
            "bias",
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
def compile_round_rows(layout: RecordLayout) -> Function:
    """Compile the function of `ProductArguments` that makes records of x.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.product_trials import try_round_rows

    (function,), _ = compile_tried(_define_round_rows, ["round_rows"], lambda _: (layout,), try_round_rows)
    return function


def _define_round_rows(module: ir.Module, layout: RecordLayout) -> None:
    define(module, "round_rows", 1, partial(_round_rows, layout), exported=True)


def compile_multiply(form: Format, layout: RecordLayout, *, has_bias: bool = False) -> Function:
    """Compile the function of `ProductArguments` that makes the output of records and a weight. With a bias, the output
    must have whole vectors of 16 features.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    return _compile_multiply(form, layout, has_bias)[0]


def multiplies_with(form: Format, layout: RecordLayout) -> QuadProduct:
    """Return the instructions of the products with weights of a format."""
    return _compile_multiply(form, layout, False)[1]


@cache
def _compile_multiply(form: Format, layout: RecordLayout, has_bias: bool) -> tuple[Function, QuadProduct]:
    from nbengine.kernels.cpu.product_trials import try_multiply

    def choose(processor: Processor) -> tuple[Format, RecordLayout, QuadProduct, bool]:
        return form, layout, QuadProduct.best(processor), has_bias

    (function,), (_, _, kind, _) = compile_tried(_define_multiply, ["multiply"], choose, try_multiply)
    return function, kind


def _define_multiply(
    module: ir.Module, form: Format, layout: RecordLayout, kind: QuadProduct, has_bias: bool
) -> None:
    define(module, "multiply", 1, partial(_multiply, form, layout, kind, has_bias), exported=True)


class GatedArguments(ctypes.Structure):
    """The arguments of a gated product: addresses, strides in bytes, and counts.

    `items` are of `item_size` pairs of tiles, `pairs` in all, of the gate at `gate` and of the other projection at
    `up`; `output` gets the records of activation(gate) * up. Functions that are compiled for it add the biases first,
    float32. Without another projection `pairs` are of the one that there is.
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
            "gate_bias",
            "up_bias",
        )
    ]


@cache
def compile_gated(
    form: Format, layout: RecordLayout, activation: Activation = "silu", *, has_bias: bool = False
) -> Function:
    """Compile the function of `GatedArguments` that makes records of activation(gate(x)) * up(x) from the records of
    x: what two products, a gate and a rounding make, without the numbers between them. Of an activation of `UNGATED`
    they are those of activation(gate(x)).

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.product_trials import try_gated

    def choose(processor: Processor) -> tuple[Format, RecordLayout, QuadProduct, Activation, bool]:
        return form, layout, QuadProduct.best(processor), activation, has_bias

    (function,), _ = compile_tried(_define_gated, ["gated"], choose, try_gated)
    return function


def _define_gated(
    module: ir.Module,
    form: Format,
    layout: RecordLayout,
    kind: QuadProduct,
    activation: Activation,
    has_bias: bool,
) -> None:
    define(module, "gated", 1, partial(_gated, form, layout, kind, activation, has_bias), exported=True)


def _gated(
    form: Format,
    layout: RecordLayout,
    kind: QuadProduct,
    activation: Activation,
    has_bias: bool,
    code: Code,
    args: Int,
) -> None:
    gate_with, is_gated = gate_of(activation), activation not in UNGATED
    frame = _Frame(code, args, GatedArguments)

    def with_bias(sums: list[Vector], name: str, tile: Int) -> list[Vector]:
        if not has_bias:
            return sums
        bias = code.load(frame.get(name) + tile * (LANES * _FLOAT), LANES)
        return [total + bias for total in sums]

    gate, up, tile_bytes = frame.get("gate"), frame.get("up"), frame.get("tile_bytes")
    output, stride = frame.get("output"), frame.get("output_stride")
    position = code.stack(8)
    for first, behind, *rows in frame.blocks():
        with code.loop(first, behind.at_most(frame.get("pairs"))) as pair:
            for group in _groups(frame, form, layout, kind, position, *rows):
                tiles = []
                for half in range(_HALVES):
                    tile = pair * _HALVES + half
                    at = tile * tile_bytes
                    if is_gated:
                        gates = with_bias(group.sums(gate + at, then=up + at), "gate_bias", tile)
                        sums = group.sums(up + at, then=gate + at + tile_bytes)
                        others = with_bias(sums, "up_bias", tile)
                    else:
                        sums = group.sums(gate + at, then=gate + at + tile_bytes)
                        gates = others = with_bias(sums, "gate_bias", tile)
                    both = zip(gates, others, strict=True)
                    tiles.append([gate_with(code, one, other) for one, other in both])
                for number, halves in enumerate(zip(*tiles, strict=True)):
                    record = output + (group.first + number) * stride + pair * layout.bytes
                    round_span(code, layout, halves, record)


def _round_rows(layout: RecordLayout, code: Code, args: Int) -> None:
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
                round_span(code, layout, halves, target + span * layout.bytes)


def _multiply(
    form: Format, layout: RecordLayout, kind: QuadProduct, has_bias: bool, code: Code, args: Int
) -> None:
    frame = _Frame(code, args)
    tiles, weight, tile_bytes = frame.get("tiles"), frame.get("weight"), frame.get("tile_bytes")
    position = code.stack(8)
    for first, behind, *rows in frame.blocks():
        with code.loop(first, behind.at_most(tiles)) as tile:
            here = weight + tile * tile_bytes
            for group in _groups(frame, form, layout, kind, position, *rows):
                sums = group.sums(here, then=here + tile_bytes)
                if has_bias:
                    bias = code.load(frame.get("bias") + tile * (LANES * _FLOAT), LANES)
                    sums = [total + bias for total in sums]
                _store(group, sums, tile)


def _groups(
    frame: _Frame,
    form: Format,
    layout: RecordLayout,
    kind: QuadProduct,
    position: Int,
    start: Int,
    stop: Int,
) -> Iterator[_Rows]:
    """Go over rows, some at a time. `position` is a place on the stack."""
    code = frame.code
    code.store_int(start, position)
    for count in ROWS:

        def fits(count: int = count) -> ir.Value:
            return (stop - code.load_int(position)).compare(">=", count)

        with code.loop_while(fits):
            row = code.load_int(position)
            yield _Rows(frame, form, layout, kind, count, row)
            code.store_int(row + count, position)


@dataclass(frozen=True)
class _Rows:
    """Some neighbouring rows that are multiplied at a time, `count` from `first` on."""

    frame: _Frame
    form: Format
    layout: RecordLayout
    kind: QuadProduct
    count: int
    first: Int

    def sums(self, weight: Int, then: Int) -> list[Vector]:
        """Multiply a tile with the rows; `then` is the address of the tile that comes after it.

        A tile of the most rows takes long enough for the next one to come to the first cache meanwhile; fewer rows
        would wait for it.
        """
        frame = self.frame
        level = CacheLevel.FIRST if self.count == ROWS[0] else CacheLevel.SECOND
        records, stride = frame.get("records"), frame.get("record_stride")
        return ProductTile(frame.code, self.form, self.layout, self.kind, level).sums(
            weight,
            weight + frame.get("tile_bytes"),
            then,
            frame.get("spans") // self.form.spans,
            [records + (self.first + number) * stride for number in range(self.count)],
        )


def _store(rows: _Rows, sums: Sequence[Vector], tile: Int) -> None:
    """Store a tile's outputs, of the last tile those that there are."""
    frame = rows.frame
    code, first = frame.code, tile * LANES
    left = frame.get("out_features") - first
    stride = frame.get("output_stride")
    for number, total in enumerate(sums):
        target = frame.get("output") + (rows.first + number) * stride + first * _FLOAT
        is_whole = left.compare(">=", LANES)
        with code.when(is_whole):
            code.store(total, target)
        with code.when(code.builder.not_(is_whole)):
            kept = code.stack(LANES * _FLOAT)
            code.store(total, kept)
            with code.loop(0, left) as lane:
                code.store(code.load(kept + lane * _FLOAT), target + lane * _FLOAT)
