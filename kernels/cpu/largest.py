"""The largest number of each row and its place, in two operations: of the parts of rows, then of the rows."""

from __future__ import annotations

import ctypes
from functools import cache

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, Vector, define
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.trials import compile_tried

PARTS = 8
"""Parts of a row, which threads share."""
_FLOAT, _WORD = 4, 8
_LOWEST = -3.4028234663852886e38


class LargestArguments(ctypes.Structure):
    """The addresses, the stride in bytes, and counts: `rows` of `width` float32 numbers at `x`.

    `peaks`, [rows, 8] float32, lies between the two operations. `ids` int64 and `values` float32 get the place of
    each row's largest number, the first of equals, and the number; the place is -1 where some number of the
    row is not finite. The `items` are rows; `parts` is the number of parts of each that the first operation gives
    out one by one, 1 for the second.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("counter", "items", "rows", "parts", "width", "x", "x_stride", "peaks", "ids", "values")
    ]


@cache
def compile_largest() -> tuple[Function, Function]:
    """Compile the two functions of `LargestArguments`.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.step_trials import try_largest

    (peaks, places), _ = compile_tried(_define, ["peaks", "places"], lambda _: (), try_largest)
    return peaks, places


def _define(module: ir.Module) -> None:
    define(module, "peaks", 1, _peaks, exported=True)
    define(module, "places", 1, _places, exported=True)


class _Rows:
    """The rows' arguments, and the parts into which they are cut."""

    def __init__(self, code: Code, args: Int) -> None:
        self.code, self._args = code, args
        steps = (self.get("width") + (PARTS * MAX_LANES - 1)) // (PARTS * MAX_LANES)
        self._part = steps * MAX_LANES

    def get(self, name: str) -> Int:
        return self.code.load_int(self._args + getattr(LargestArguments, name).offset)

    def begin(self, part: Int) -> Int:
        return (part * self._part).at_most(self.get("width"))

    def end(self, part: Int) -> Int:
        return self.begin(part + 1)

    def peak(self, row: Int, part: Int) -> Int:
        return self.get("peaks") + (row * PARTS + part) * _FLOAT


def _peaks(code: Code, args: Int) -> None:
    rows = _Rows(code, args)
    with code.tickets(args + LargestArguments.counter.offset, rows.get("items") * rows.get("parts")) as item:
        row, part = item // PARTS, item % PARTS
        x, begin, end = rows.get("x") + row * rows.get("x_stride"), rows.begin(part), rows.end(part)
        whole = begin + (end - begin) // MAX_LANES * MAX_LANES
        peak = _peak_of(code, x, begin, whole, MAX_LANES).reduce(Vector.at_least)
        rest = _peak_of(code, x, whole, end, 1)
        # NaN in either makes the sum NaN, and so does infinity.
        both = peak.at_least(rest)
        zero = code.constant(0.0)
        code.store(both + (peak * zero + rest * zero), rows.peak(row, part))


def _peak_of(code: Code, x: Int, begin: Int, end: Int, lanes: int) -> Vector:
    """Return the largest numbers of a range, lane by lane: NaN where one of a lane is not finite."""
    peak = code.accumulator(code.constant(_LOWEST, lanes))
    poison = code.accumulator(code.constant(0.0, lanes))
    with code.loop(begin, end, lanes) as place:
        value = code.load(x + place * _FLOAT, lanes)
        peak.set(value.at_least(peak.get()))
        poison.set(value.times_plus(code.constant(0.0, lanes), poison.get()))
    total = poison.get().reduce(Vector.__add__)
    return peak.get() + total.splat(lanes)


def _places(code: Code, args: Int) -> None:
    rows = _Rows(code, args)
    b = code.builder
    with code.tickets(args + LargestArguments.counter.offset, rows.get("items")) as row:
        peak, sum_ = code.accumulator(code.constant(_LOWEST)), code.accumulator(code.constant(0.0))
        with code.loop(0, code.integer(PARTS)) as part:
            value = code.load(rows.peak(row, part))
            peak.set(value.at_least(peak.get()))
            sum_.set(value * code.constant(0.0) + sum_.get())
        largest = peak.get()
        code.store(largest, rows.get("values") + row * _FLOAT)
        place = rows.get("ids") + row * _WORD
        code.store_int(code.integer(-1), place)
        is_finite = b.extract_element(
            b.fcmp_ordered("==", sum_.get().ir, code.constant(0.0).ir), ir.IntType(32)(0)
        )
        with code.when(is_finite):
            _find(code, rows, row, largest, place)


def _find(code: Code, rows: _Rows, row: Int, largest: Vector, place: Int) -> None:
    """Store the first place of a number that the row has."""
    x, at = rows.get("x") + row * rows.get("x_stride"), code.stack(_WORD)
    part, found = code.stack(_WORD), code.stack(_WORD)
    code.store_int(code.integer(0), part)
    code.store_int(code.integer(0), found)

    def is_elsewhere() -> ir.Value:
        return _differ(code, code.load(rows.peak(row, code.load_int(part))), largest)

    with code.loop_while(is_elsewhere):
        code.store_int(code.load_int(part) + 1, part)
    code.store_int(rows.begin(code.load_int(part)), at)

    def goes_on() -> ir.Value:
        inside = (code.load_int(at) + (MAX_LANES - 1)).compare("<", rows.get("width"))
        return code.builder.and_(inside, code.load_int(found).compare("==", 0))

    def number_differs() -> ir.Value:
        return _differ(code, code.load(x + code.load_int(at) * _FLOAT), largest)

    with code.loop_while(goes_on):
        here = code.load_int(at)
        differs = _differ(code, code.load(x + here * _FLOAT, MAX_LANES), largest.splat(MAX_LANES))
        code.store_int((here + MAX_LANES).if_else(differs, here), at)
        code.store_int(code.integer(0).if_else(differs, code.integer(1)), found)
    with code.loop_while(number_differs):
        code.store_int(code.load_int(at) + 1, at)
    code.store_int(code.load_int(at), place)


def _differ(code: Code, one: Vector, other: Vector) -> ir.Value:
    """Return whether all lanes differ."""
    b = code.builder
    mask = b.bitcast(b.fcmp_ordered("==", one.ir, other.ir), ir.IntType(one.lanes))
    return b.icmp_unsigned("==", mask, ir.IntType(one.lanes)(0))
