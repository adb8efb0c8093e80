"""Products of each head's rows with a matrix of its own on the CPU.

An output is one chain of multiply-adds, or one in each lane, whatever the number of rows: it depends on its row alone.
Rows are not rounded, and sums are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir
from torch import Tensor

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import Function, Processor
from nbengine.kernels.cpu.layout import vectors_of
from nbengine.kernels.cpu.trials import compile_tried

_FLOAT, _WORD, _CACHE_LINE = 4, 8, 64
_ACROSS, _ALONG = 32 * MAX_LANES, 4 * MAX_LANES
"""The outputs of an item."""
_ROWS_AHEAD, _BYTES_AHEAD = 4, 4096
"""The distance at which the weight is asked for ahead: rows of it, and bytes of its columns."""


class HeadArguments(ctypes.Structure):
    """The addresses, the strides in bytes, and counts: an item is some of the outputs of one head, for all `rows`.

    `x_stride` and `output_stride` are from row to row, `x_head`, `weight_head` and `output_head` from head to head.
    `weight_stride` is that of the dimension of a head's matrix whose numbers do not lie side by side.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "rows", "x", "x_stride", "x_head"),
            *("weight", "weight_stride", "weight_head", "output", "output_stride", "output_head"),
        )
    ]


@dataclass(frozen=True)
class HeadShape:
    """The kind of product that a function makes: rows of `columns` of `row_element` are multiplied with matrices [columns,
    outputs] of `element`, whose columns lie side by side if they `stand`, and else their rows."""

    columns: int
    outputs: int
    element: Element
    row_element: Element
    stands: bool

    @property
    def items_of_head(self) -> int:
        """Return how many items there are a head."""
        return -(-self.outputs // self.outputs_of_item)

    @property
    def outputs_of_item(self) -> int:
        """Return the most outputs of an item."""
        return _ALONG if self.stands else _ACROSS


def head_operation(x: Tensor, weight: Tensor, output: Tensor) -> tuple[Function, HeadArguments]:
    """Return the function that makes `output` [T, heads, m] of x [T, heads, n] and weight [heads, n, m], and its
    arguments. The last dimension of x and of the output, and one of the last two of the weight, lie side by side."""
    shape = HeadShape(
        x.shape[2], weight.shape[2], ELEMENTS[weight.dtype], ELEMENTS[x.dtype], weight.stride(1) == 1
    )
    return compile_heads(shape), head_arguments(shape, x, weight, output)


def head_arguments(shape: HeadShape, x: Tensor, weight: Tensor, output: Tensor) -> HeadArguments:
    """Return the arguments of the function for a kind of product."""
    size, row_size = weight.element_size(), x.element_size()
    return HeadArguments(
        items=x.shape[1] * shape.items_of_head,
        rows=len(x),
        x=x.data_ptr(),
        x_stride=x.stride(0) * row_size,
        x_head=x.stride(1) * row_size,
        weight=weight.data_ptr(),
        weight_stride=weight.stride(2 if shape.stands else 1) * size,
        weight_head=weight.stride(0) * size,
        output=output.data_ptr(),
        output_stride=output.stride(0) * row_size,
        output_head=output.stride(1) * row_size,
    )


@cache
def compile_heads(shape: HeadShape) -> Function:
    """Compile a function of `HeadArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.dense_trials import try_heads

    def choose(processor: Processor) -> tuple[HeadShape, int]:
        return shape, processor.accumulators

    (function,), _ = compile_tried(_define_heads, ["heads"], choose, try_heads)
    return function


def _define_heads(module: ir.Module, shape: HeadShape, accumulators: int) -> None:
    define(module, "heads", 1, partial(_heads, shape, accumulators), exported=True)


def _heads(shape: HeadShape, accumulators: int, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(HeadArguments, name).offset)

    size, row_size = shape.element.size, shape.row_element.size
    each = shape.items_of_head
    with code.tickets(args + HeadArguments.counter.offset, get("items")) as item:
        head, first = item // each, item % each * shape.outputs_of_item
        step = get("weight_stride") if shape.stands else code.integer(size)
        tile = _Tile(
            code,
            shape,
            x=get("x") + head * get("x_head"),
            x_stride=get("x_stride"),
            weight=get("weight") + head * get("weight_head") + first * step,
            weight_stride=get("weight_stride"),
            output=get("output") + head * get("output_head") + first * row_size,
            output_stride=get("output_stride"),
        )
        multiply = tile.along if shape.stands else tile.across
        whole, rest = divmod(shape.outputs, shape.outputs_of_item)
        for is_there, count in ((whole, shape.outputs_of_item), (rest, rest)):
            if not is_there:
                continue
            is_whole = first.compare("<", whole * shape.outputs_of_item)
            condition = is_whole if count == shape.outputs_of_item else code.builder.not_(is_whole)
            with code.when(condition):
                _over_rows(code, get("rows"), max(1, accumulators), partial(multiply, count))


def _over_rows(code: Code, rows: Int, most: int, multiply: Callable[[Int, int], None]) -> None:
    """Emit `multiply(first, count)` for all rows, `most` at a time, the last ones by themselves."""
    position = code.stack(_WORD)
    code.store_int(code.integer(0), position)
    for count in sorted({most, 1}, reverse=True):

        def fits(count: int = count) -> ir.Value:
            return (rows - code.load_int(position)).compare(">=", count)

        with code.loop_while(fits):
            row = code.load_int(position)
            multiply(row, count)
            code.store_int(row + count, position)


@dataclass(frozen=True)
class _Tile:
    """The code of one item's outputs; `weight` and `output` are the addresses of the first one's."""

    code: Code
    shape: HeadShape
    x: Int
    x_stride: Int
    weight: Int
    weight_stride: Int
    output: Int
    output_stride: Int

    def across(self, outputs: int, first: Int, count: int) -> None:
        """Multiply rows with a matrix whose rows lie side by side: of one row all outputs at a time, with sums in memory,
        so that the weight is read in order; of several rows a vector of outputs at a time."""
        columns = vectors_of(outputs)
        if count > 1:
            for column, lanes in columns:
                self._across(column, lanes, outputs if column == 0 else 0, first, count)
            return
        code, shape = self.code, self.shape
        row, target = self.x + first * self.x_stride, self.output + first * self.output_stride
        sums = code.stack(_ACROSS * _FLOAT)
        for column, lanes in columns:
            code.store(code.constant(0.0, lanes), sums + column * _FLOAT)
        with code.loop(0, code.integer(shape.columns)) as k:
            source = self.weight + k * self.weight_stride
            self._ask_for(source + self.weight_stride * _ROWS_AHEAD, outputs)
            number = code.load(row + k * shape.row_element.size, 1, shape.row_element)
            for column, lanes in columns:
                factor = code.load(source + column * shape.element.size, lanes, shape.element)
                place = sums + column * _FLOAT
                code.store(number.splat(lanes).times_plus(factor, code.load(place, lanes)), place)
        for column, lanes in columns:
            total = code.load(sums + column * _FLOAT, lanes)
            code.store(total, target + column * shape.row_element.size, shape.row_element)

    def _across(self, column: int, lanes: int, asked: int, first: Int, count: int) -> None:
        """Multiply rows with a vector of each row of the matrix, and ask for `asked` numbers of the next ones."""
        code, shape = self.code, self.shape
        rows = [self.x + (first + r) * self.x_stride for r in range(count)]
        sums = [code.accumulator(code.constant(0.0, lanes)) for _ in rows]
        with code.loop(0, code.integer(shape.columns)) as k:
            source = self.weight + k * self.weight_stride
            self._ask_for(source + self.weight_stride * _ROWS_AHEAD, asked)
            factor = code.load(source + column * shape.element.size, lanes, shape.element)
            for row, cell in zip(rows, sums, strict=True):
                number = code.load(row + k * shape.row_element.size, 1, shape.row_element)
                cell.set(number.splat(lanes).times_plus(factor, cell.get()))
        for r, cell in enumerate(sums):
            target = self.output + (first + r) * self.output_stride
            code.store(cell.get(), target + column * shape.row_element.size, shape.row_element)

    def along(self, outputs: int, first: Int, count: int) -> None:
        """Multiply rows with a matrix whose columns lie side by side, one output after the other."""
        code, shape = self.code, self.shape
        rows = [self.x + (first + r) * self.x_stride for r in range(count)]
        whole = shape.columns // MAX_LANES * MAX_LANES
        sums = [code.accumulator(code.constant(0.0, MAX_LANES)) for _ in rows]
        with code.loop(0, code.integer(outputs)) as output:
            source = self.weight + output * self.weight_stride

            def products(k: Int, lanes: int) -> list[tuple[Vector, Vector]]:
                factor = code.load(source + k * shape.element.size, lanes, shape.element)
                size = shape.row_element.size
                return [(code.load(row + k * size, lanes, shape.row_element), factor) for row in rows]

            for cell in sums:
                cell.set(code.constant(0.0, MAX_LANES))
            with code.loop(0, code.integer(whole), MAX_LANES) as k:
                self._ask_for(source + k * shape.element.size + _BYTES_AHEAD, MAX_LANES)
                for cell, (number, factor) in zip(sums, products(k, MAX_LANES), strict=True):
                    cell.set(number.times_plus(factor, cell.get()))
            totals = [cell.get().reduce(Vector.__add__) for cell in sums]
            for column, lanes in vectors_of(shape.columns - whole):
                rest = products(code.integer(whole + column), lanes)
                pairs = zip(totals, rest, strict=True)
                totals = [
                    total + (number * factor).reduce(Vector.__add__) for total, (number, factor) in pairs
                ]
            for r, total in enumerate(totals):
                target = self.output + (first + r) * self.output_stride
                code.store(total, target + output * shape.row_element.size, shape.row_element)

    def _ask_for(self, address: Int, count: int) -> None:
        """Have `count` numbers of the weight brought to the caches."""
        for line in range(0, count * self.shape.element.size, _CACHE_LINE):
            self.code.prefetch(address + line)
