"""Rounded activations: rows of float32 in spans of 32 columns, each as integers from -127 to 127 and a scale.

A span has a *record* of 48 bytes: 32 integers, and as float32 the scale, the scale times the sum of the integers, this
sum, and the sum of the first half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from nbengine.kernels.cpu.codegen import ROUND_MAGIC, Code, Int, Vector
from nbengine.kernels.cpu.integers import LANES, WORDS, words
from nbengine.kernels.quantized import SPAN

RECORD_BYTES = 48
SCALE_AT, SCALED_SUM_AT, SUM_AT, FIRST_SUM_AT = range(SPAN, RECORD_BYTES, 4)
_LEVELS = 127.0
_HALVES = 2
_I32 = ir.IntType(32)
_SIZE_BITS = 0x7FFFFFFF
_MAGIC_BITS = 0x4B400000
"""`ROUND_MAGIC`, whose last bits are those of the integer that has been added to it."""


def round_span(code: Code, halves: Sequence[Vector], record: Int) -> None:
    """Write the record of 32 numbers, which are given in two vectors. What is not finite makes the scale, and with it
    all of the row's results, not a number."""
    b = code.builder
    # Bits of numbers without sign are ordered as the numbers are, with infinity and NaN above all.
    sizes = [b.and_(b.bitcast(half.ir, WORDS), words(_SIZE_BITS)) for half in halves]
    bits = _fold(code, _larger(code, *sizes), 1, _larger)
    largest = Vector(b, b.bitcast(bits, code.constant(0.0).ir.type))
    scale = largest / code.constant(_LEVELS) + largest * code.constant(0.0)
    is_zero = b.fcmp_ordered("==", largest.ir, code.constant(0.0).ir)
    factor = Vector(b, b.select(is_zero, code.constant(0.0).ir, (code.constant(_LEVELS) / largest).ir))
    shifted = [half * factor.splat(LANES) + code.constant(ROUND_MAGIC, LANES) for half in halves]
    whole = [b.bitcast(half.ir, WORDS) for half in shifted]
    for place, integers in enumerate(whole):
        bytes_of_half = b.trunc(integers, ir.VectorType(ir.IntType(8), LANES))
        code.store_lanes(bytes_of_half, record + place * LANES)
    first, second = _sums_of_halves(code, whole)
    total = first + second
    for value, place in (
        (scale, SCALE_AT),
        (scale * total, SCALED_SUM_AT),
        (total, SUM_AT),
        (first, FIRST_SUM_AT),
    ):
        code.store(value, record + place)


def _sums_of_halves(code: Code, whole: Sequence[ir.Value]) -> tuple[Vector, Vector]:
    """Return the sums of the integers of each of two vectors, to each of which `_MAGIC_BITS` have been added."""
    b, quarter = code.builder, LANES // 2
    first, last = (
        [*range(at, at + quarter), *range(LANES + at, LANES + at + quarter)] for at in (0, quarter)
    )
    sums = _sum(
        code, *(b.shuffle_vector(*whole, ir.VectorType(_I32, LANES)(lanes)) for lanes in (first, last))
    )
    sums = _fold(code, sums, _HALVES, _sum)
    offset = ir.VectorType(_I32, _HALVES)([LANES * _MAGIC_BITS % 2**32] * _HALVES)
    floats = Vector(b, b.sitofp(b.sub(sums, offset), ir.VectorType(ir.FloatType(), _HALVES)))
    return floats.every(_HALVES, 0), floats.every(_HALVES, 1)


def _fold(
    code: Code, vector: ir.Value, groups: int, combine: Callable[[Code, ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Combine the words of each of some groups of neighbours, a power of two of them, pairwise into one."""
    while (width := vector.type.count // groups) > 1:
        starts = range(0, vector.type.count, width)
        parts = []
        for at in (0, width // 2):
            lanes = [start + at + lane for start in starts for lane in range(width // 2)]
            undefined = ir.Constant(vector.type, ir.Undefined)
            parts.append(
                code.builder.shuffle_vector(vector, undefined, ir.VectorType(_I32, len(lanes))(lanes))
            )
        vector = combine(code, *parts)
    return vector


def _sum(code: Code, one: ir.Value, other: ir.Value) -> ir.Value:
    return code.builder.add(one, other)


def _larger(code: Code, one: ir.Value, other: ir.Value) -> ir.Value:
    return code.builder.select(code.builder.icmp_signed(">", one, other), one, other)
