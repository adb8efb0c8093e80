"""The way from the residual stream to a product's records in one pass: the block's output is added, and the sum
normalised and rounded."""

from __future__ import annotations

import ctypes
from functools import cache, partial

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, Vector, define
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.records import RecordLayout, round_span
from nbengine.kernels.cpu.row_functions import ROWS_AT_A_TIME
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.cpu.vectors import rms_factor
from nbengine.kernels.quantized import SPAN

_FLOAT = 4
_STEP = MAX_LANES * _FLOAT


class NormRoundArguments(ctypes.Structure):
    """The arguments: addresses, strides in bytes, and counts; threads draw `items` of rows from `counter`.

    `x` are the rows of the residual stream, to which those at `added` are added; `weight` is the norm's, and
    `records` gets the rounded rows.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("counter", "items", "rows", "x", "x_stride"),
                *("added", "added_stride", "weight", "records", "record_stride"),
            )
        ),
        ("eps", ctypes.c_float),
    ]


@cache
def compile_norm_round(size: int, layout: RecordLayout, *, adds: bool) -> Function:
    """Compile the function of `NormRoundArguments` for rows of `size` numbers; without `adds` nothing is added.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.step_trials import try_norm_round

    (function,), _ = compile_tried(_define, ["norm_round"], lambda _: (size, layout, adds), try_norm_round)
    return function


def _define(module: ir.Module, size: int, layout: RecordLayout, adds: bool) -> None:
    define(module, "norm_round", 1, partial(_over_rows, size, layout, adds), exported=True)


def _over_rows(size: int, layout: RecordLayout, adds: bool, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(NormRoundArguments, name).offset)

    eps = code.load(args + NormRoundArguments.eps.offset)
    with code.tickets(args, get("items")) as item:
        first = item * ROWS_AT_A_TIME
        with code.loop(first, (first + ROWS_AT_A_TIME).at_most(get("rows"))) as row:
            x = get("x") + row * get("x_stride")
            added = get("added") + row * get("added_stride") if adds else None
            squares = _add(code, size, x, added)
            factor = rms_factor(code, squares, size, eps)
            weight, record = get("weight"), get("records") + row * get("record_stride")
            with code.loop(0, code.integer(size // SPAN)) as span:
                places = [span * (SPAN * _FLOAT) + half * _STEP for half in range(SPAN // MAX_LANES)]
                halves = [
                    code.load(x + place, MAX_LANES) * factor * code.load(weight + place, MAX_LANES)
                    for place in places
                ]
                round_span(code, layout, halves, record + span * layout.bytes)


def _add(code: Code, size: int, x: Int, added: Int | None) -> Vector:
    """Add to a row in place; return the sums of its squares."""
    total = code.accumulator(code.constant(0.0, MAX_LANES))
    with code.loop(0, code.integer(size * _FLOAT), _STEP) as place:
        values = code.load(x + place, MAX_LANES)
        if added is not None:
            values = values + code.load(added + place, MAX_LANES)
            code.store(values, x + place)
        total.set(values.times_plus(values, total.get()))
    return total.get()
