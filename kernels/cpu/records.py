"""Rounded activations: rows of float32 in spans of 32 columns, each as integers and a scale.

A span has a *record*: 32 integers, and as float32 the scale, the scale times the sum of the integers, this sum, and the
sum of the first half of them. Integers of 8 bits are from -127 to 127. Those of 16 are 256 times such a byte plus
another one; the bytes of the first kind lie in a plane of 32, and those of the second kind in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from nbengine.kernels.cpu.codegen import ROUND_MAGIC, Code, Int, Vector
from nbengine.kernels.cpu.integers import LANES, WORDS, words
from nbengine.kernels.quantized import SPAN

_LARGEST_BYTE = 127
_BYTE_BITS = 8
_NUMBERS = 4
_FLOAT = 4
_HALVES = 2
_I32 = ir.IntType(32)
_SIZE_BITS = 0x7FFFFFFF
_MAGIC_BITS = 0x4B400000
"""`ROUND_MAGIC`, whose last bits are those of the integer that has been added to it."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The layout of records whose integers have `bits` bits, 8 or 16."""

    bits: int

    @property
    def planes(self) -> int:
        """Return the bytes of an integer."""
        return self.bits // _BYTE_BITS

    @property
    def largest(self) -> int:
        """Return the largest integer: what the largest number of a span becomes."""
        return _LARGEST_BYTE << (self.bits - _BYTE_BITS)

    @property
    def scale_at(self) -> int:
        """Return the place of the scale in a record, in bytes."""
        return SPAN * self.planes

    @property
    def scaled_sum_at(self) -> int:
        """Return the place of the scale times the sum."""
        return self.scale_at + _FLOAT

    @property
    def sum_at(self) -> int:
        """Return the place of the sum."""
        return self.scale_at + 2 * _FLOAT

    @property
    def first_sum_at(self) -> int:
        """Return the place of the sum of the first half."""
        return self.scale_at + 3 * _FLOAT

    @property
    def bytes(self) -> int:
        """Return the bytes of a record."""
        return self.scale_at + _NUMBERS * _FLOAT


EIGHT_BITS, SIXTEEN_BITS = RecordLayout(8), RecordLayout(16)


def round_span(code: Code, layout: RecordLayout, halves: Sequence[Vector], record: Int) -> None:
    """Write the record of 32 numbers, which are given in two vectors. What is not finite makes the scale, and with it
    all of the row's results, not a number."""
    b = code.builder
    # Bits of numbers without sign are ordered as the numbers are, with infinity and NaN above all.
    sizes = [b.and_(b.bitcast(half.ir, WORDS), words(_SIZE_BITS)) for half in halves]
    bits = _fold(code, _larger(code, *sizes), 1, _larger)
    largest = Vector(b, b.bitcast(bits, code.constant(0.0).ir.type))
    levels = code.constant(float(layout.largest))
    scale = largest / levels + largest * code.constant(0.0)
    is_zero = b.fcmp_ordered("==", largest.ir, code.constant(0.0).ir)
    factor = Vector(b, b.select(is_zero, code.constant(0.0).ir, (levels / largest).ir))
    shifted = [half * factor.splat(LANES) + code.constant(ROUND_MAGIC, LANES) for half in halves]
    whole = [b.bitcast(half.ir, WORDS) for half in shifted]
    for place, integers in enumerate(whole):
        planes = [integers]
        if layout.planes > 1:
            whole[place], *planes = _two_bytes(code, integers)
        for plane, each in enumerate(planes):
            bytes_of_half = b.trunc(each, ir.VectorType(ir.IntType(8), LANES))
            code.store_lanes(bytes_of_half, record + (plane * SPAN + place * LANES))
    first, second = _sums_of_halves(code, whole)
    total = first + second
    for value, place in (
        (scale, layout.scale_at),
        (scale * total, layout.scaled_sum_at),
        (total, layout.sum_at),
        (first, layout.first_sum_at),
    ):
        code.store(value, record + place)


def _two_bytes(code: Code, integers: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return integers, to which `_MAGIC_BITS` have been added, in the same way, and the two bytes of each. A second
    byte of -128, which not every processor multiplies, becomes -127, and the integer one more."""
    b, bits = code.builder, words(_BYTE_BITS)
    own = b.sub(integers, words(_MAGIC_BITS))
    first = b.ashr(b.add(own, words(1 << (_BYTE_BITS - 1))), bits)
    shifted = b.shl(first, bits)
    second = _larger(code, b.sub(own, shifted), words(-_LARGEST_BYTE))
    return b.add(b.add(shifted, second), words(_MAGIC_BITS)), first, second


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
