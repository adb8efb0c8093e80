"""Lanes of vectors that change places: a square that is transposed, and vectors whose lanes are summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Vector


def transpose(code: Code, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the columns of a square: n vectors of n lanes, n a power of two."""
    size = len(rows)
    half, columns = size // 2, list(rows)
    low = [lane for pair in range(half) for lane in (pair, size + pair)]
    high = [lane + half for lane in low]
    # Each round interleaves the first half of the vectors with the second: lane j of row i goes to where the bits
    # of both numbers, written one after the other, are turned by one.
    for _ in range(size.bit_length() - 1):
        columns = [
            _shuffle(code, columns[number], columns[half + number], lanes)
            for number in range(half)
            for lanes in (low, high)
        ]
    return columns


def fold(code: Code, vectors: Sequence[Vector]) -> Vector:
    """Return the sum of the lanes of each vector, in as many lanes as there are vectors, a power of two of both.

    A vector's lanes are added in one order, as `Vector.reduce` does it, however many vectors there are: lane i and
    lane i + n / 2 of n, and so on with the sums.
    """
    b, found, width = code.builder, list(vectors), vectors[0].lanes
    while width > 1:
        half = width // 2
        is_one = len(found) == 1
        pairs = [(found[0], found[0])] if is_one else list(zip(found[::2], found[1::2], strict=True))
        lanes = found[0].lanes * min(2, len(found))
        first = [start + lane for start in range(0, lanes, width) for lane in range(half)]
        second = [lane + half for lane in first]
        found = [
            Vector(b, _shuffle(code, one.ir, other.ir, first))
            + Vector(b, _shuffle(code, one.ir, other.ir, second))
            for one, other in pairs
        ]
        width = half
    return found[0]


def _shuffle(code: Code, one: ir.Value, other: ir.Value, lanes: Iterable[int]) -> ir.Value:
    index = list(lanes)
    mask = ir.VectorType(ir.IntType(32), len(index))(index)
    return code.builder.shuffle_vector(one, other, mask)
