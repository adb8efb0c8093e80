"""Rows of a weight in float32, as an embedding looks them up."""

from __future__ import annotations

import ctypes
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Element, Int, Vector, define
from nbengine.kernels.cpu.integers import LANES, load_bytes, power_of_two
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.quantized import MICRO_LEVELS, PLANE, QUADS, SPAN, Format

_FLOAT = 4
_WIDTH = 4
"""Columns of a quad, which are computed together."""


class TakeArguments(ctypes.Structure):
    """The arguments: addresses, strides in bytes, and counts. The `items` are rows; `ids` are int64, and name rows
    that exist. Of a part of a weight, the rows have the ids from `first` on, and there are `count`. A dense weight's
    `cells` are 16 columns each, and `tile_bytes` those of a row."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("counter", "items", "ids", "cells", "weight", "tile_bytes", "output", "output_stride"),
            *("first", "count"),
        )
    ]


@cache
def compile_take_rows(form: Format | Element, *, is_part: bool = False) -> Function:
    """Compile the function that writes rows of a weight in float32, one that is quantised or dense with numbers of a
    type; with `is_part`, zeros for those that are not in this part of it.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.product_trials import try_take_rows

    (function,), _ = compile_tried(_define, ["take_rows"], lambda _: (form, is_part), try_take_rows)
    return function


def _define(module: ir.Module, form: Format | Element, is_part: bool) -> None:
    define(module, "take_rows", 1, partial(_take_rows, form, is_part), exported=True)


def _take_rows(form: Format | Element, is_part: bool, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(TakeArguments, name).offset)

    cells, columns = get("cells"), LANES if isinstance(form, Element) else form.columns
    with code.tickets(args + TakeArguments.counter.offset, get("items")) as number:
        row = code.load_int(get("ids") + number * 8)
        if is_part:
            row = row - get("first")
        target = get("output") + number * get("output_stride")

        def write(row: Int = row, target: Int = target) -> None:
            if isinstance(form, Element):
                _write_dense(form, code, get("weight") + row * get("tile_bytes"), cells, target)
            else:
                tile = get("weight") + row // LANES * get("tile_bytes")
                _write_packed(form, code, tile, cells, row % LANES, target)

        if is_part:
            is_here = code.builder.icmp_unsigned("<", row.ir, get("count").ir)
            with code.when(is_here):
                write()
            with code.when(code.builder.not_(is_here)), code.loop(0, cells * (columns // LANES)) as part:
                code.store(code.constant(0.0, LANES), target + part * (LANES * _FLOAT))
        else:
            write()


def _write_dense(element: Element, code: Code, source: Int, cells: Int, target: Int) -> None:
    with code.loop(0, cells) as cell:
        numbers = code.load(source + cell * (LANES * element.size), LANES, element)
        code.store(numbers, target + cell * (LANES * _FLOAT))


def _write_packed(form: Format, code: Code, tile: Int, cells: Int, lane: Int, target: Int) -> None:
    with code.loop(0, cells) as cell, code.loop(0, code.integer(form.spans)) as span:
        place = target + (cell * form.columns + span * SPAN) * _FLOAT
        _write_span(form, code, tile + cell * form.cell_bytes, span, lane, place)


def _write_span(form: Format, code: Code, cell: Int, span: Int, lane: Int, target: Int) -> None:
    minimum = _minimum(form, code, cell, span, lane)
    bits = cell + span * form.span_bytes + lane * _WIDTH
    for quad in range(QUADS):
        values = _levels(form, code, bits, quad) - code.constant(form.offset, _WIDTH)
        group = quad * 4 // form.group
        values = values * _scale(form, code, cell, span * (SPAN // form.group) + group, lane).splat(_WIDTH)
        if minimum is not None:
            values = values + minimum.splat(_WIDTH)
        code.store(values, target + quad * _WIDTH * _FLOAT)


def _levels(form: Format, code: Code, bits: Int, quad: int) -> Vector:
    """Load the levels of a lane's four columns of a quad."""
    b, kind = code.builder, ir.VectorType(ir.IntType(8), _WIDTH)

    def load(plane: int) -> ir.Value:
        return b.load(b.inttoptr((bits + plane * PLANE).ir, kind.as_pointer()), align=1)

    def fill(value: int) -> ir.Constant:
        return kind([value] * _WIDTH)

    if form.bits == 8:
        level = load(quad)
    else:
        nibbles = load(quad % 4)
        level = b.lshr(nibbles, fill(4)) if quad >= 4 else b.and_(nibbles, fill(15))
        if (width := form.bits - 4) > 0:
            high = b.lshr(load(4 + quad * width // 8), fill(quad * width % 8))
            level = b.or_(level, b.shl(b.and_(high, fill(2**width - 1)), fill(4)))
    if form.is_micro:
        level = _micro(b, level)
    return Vector(b, b.uitofp(level, ir.VectorType(ir.FloatType(), _WIDTH)))


def _micro(b: ir.IRBuilder, places: ir.Value) -> ir.Value:
    """Return the levels at these places of the table."""
    kind = places.type
    found = kind([MICRO_LEVELS[0]] * kind.count)
    for place, level in enumerate(MICRO_LEVELS):
        is_here = b.icmp_unsigned("==", places, kind([place] * kind.count))
        found = b.select(is_here, kind([level] * kind.count), found)
    return found


def _scale(form: Format, code: Code, cell: Int, group: Int, lane: Int) -> Vector:
    if form.is_micro:
        return power_of_two(code, cell + form.scales_at + lane, 1)
    if not form.is_super:
        return code.load(cell + form.scales_at + lane * 2, 1, Element.FLOAT16)
    small = load_bytes(code, cell + form.scales_at + group * LANES + lane, signed=True, lanes=1)
    return small * code.load(cell + form.supers_at + lane * 2, 1, Element.FLOAT16)


def _minimum(form: Format, code: Code, cell: Int, span: Int, lane: Int) -> Vector | None:
    if not form.has_minimum:
        return None
    if form.has_zero:
        zero = load_bytes(code, cell + form.minima_at + lane, signed=False, lanes=1)
        return code.constant(0.0) - zero * _scale(form, code, cell, span, lane)
    if not form.is_super:
        return code.load(cell + form.minima_at + lane * 2, 1, Element.FLOAT16)
    small = load_bytes(code, cell + form.minima_at + span * LANES + lane, signed=False, lanes=1)
    lowest = code.load(cell + form.supers_at + (lane + LANES) * 2, 1, Element.FLOAT16)
    return code.constant(0.0) - small * lowest
