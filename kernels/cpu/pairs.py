"""Vectors of pairs of bfloat16, and the sums of their products: `vdpbf16ps` of AVX-512.

A pair lies in a word, its first number in the lower half. In each lane the products of two pairs are added to a
float32, the second numbers' product first; a product with 0 changes no bit of a sum.
"""

from __future__ import annotations

from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, declare
from nbengine.kernels.cpu.integers import broadcast_word, words
from nbengine.kernels.cpu.jit import Processor

PAIR = 2
"""The numbers of a pair."""
_BITS = 16


def multiplies_pairs(processor: Processor) -> bool:
    """Return whether the processor multiplies pairs."""
    return all(processor.features.get(name) for name in ("avx512f", "avx512bf16"))


def interleave(code: Code, first: Int, second: Int) -> ir.Value:
    """Load 16 numbers from each of two places as 16 pairs."""
    b, wide = code.builder, words(0).type
    low, high = (
        b.zext(code.load_bits(place, MAX_LANES, Element.BFLOAT16), wide) for place in (first, second)
    )
    return b.or_(low, b.shl(high, words(_BITS)))


def narrowed(value: Vector) -> ir.Value:
    """Return 16 numbers rounded to nearest even; those below the normal ones become 0."""
    b, shorts = value.builder, ir.VectorType(ir.IntType(_BITS), MAX_LANES)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return b.call(declare(b.module, name, ir.FunctionType(shorts, (value.ir.type,))), (value.ir,))


def every_pair(code: Code, address: Int) -> ir.Value:
    """Load one pair into every lane."""
    return broadcast_word(code, address)


def add_products(total: Vector, one: ir.Value, other: ir.Value) -> Vector:
    """Add the products of pairs to 16 sums."""
    b, kind = total.builder, total.ir.type
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = declare(b.module, name, ir.FunctionType(kind, (kind, one.type, other.type)))
    return Vector(b, b.call(function, (total.ir, one, other)))
