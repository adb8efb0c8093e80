"""Vectors of 16 words of 32 bits, and the products of small integers in them, on every instruction set.

A product of quads multiplies, in each word, four unsigned bytes with four signed ones, and adds the four
products to a sum. The result is exact, so that it is the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, Vector, declare
from nbengine.kernels.cpu.jit import Processor

LANES = 16
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
WORDS = ir.VectorType(_I32, LANES)
_HALF_WORDS = ir.VectorType(_I32, LANES // 2)
_F32S = ir.VectorType(ir.FloatType(), LANES)


class QuadProduct(Enum):
    """The instructions for products of quads."""

    VNNI_512 = "AVX-512 VNNI"
    VNNI_256 = "AVX VNNI"
    AVX2 = "AVX2"
    I8MM = "Arm i8mm"
    PORTABLE = "portable"

    @classmethod
    def best(cls, processor: Processor) -> QuadProduct:
        """Return the fastest ones that a processor has."""
        has = processor.features.get
        if has("avx512vnni") and has("avx512f"):
            return cls.VNNI_512
        if has("avxvnni"):
            return cls.VNNI_256
        if has("avx2"):
            return cls.AVX2
        return cls.I8MM if has("i8mm") else cls.PORTABLE


def words(value: int) -> ir.Constant:
    """Return the vector with `value` in every word."""
    return WORDS([value] * LANES)


def load_words(code: Code, address: Int) -> ir.Value:
    """Load 64 bytes, however aligned."""
    return code.builder.load(_pointer(code, address, WORDS), align=1)


def broadcast_word(code: Code, address: Int) -> ir.Value:
    """Load 4 bytes into every word."""
    b = code.builder
    undefined = ir.Constant(WORDS, ir.Undefined)
    first = b.insert_element(undefined, b.load(_pointer(code, address, _I32), align=4), _I32(0))
    return b.shuffle_vector(first, undefined, words(0))


def load_bytes(code: Code, address: Int, *, signed: bool, lanes: int = LANES) -> Vector:
    """Load bytes, as float32."""
    b = code.builder
    found = b.load(_pointer(code, address, ir.VectorType(_I8, lanes)), align=1)
    wide, floats = ir.VectorType(_I32, lanes), ir.VectorType(ir.FloatType(), lanes)
    return Vector(b, b.sitofp(b.sext(found, wide) if signed else b.zext(found, wide), floats))


def look_up(code: Code, kind: QuadProduct, table: Sequence[int], places: ir.Value) -> ir.Value:
    """Return for each byte of words, a number below 16, the byte of the table that has this place."""
    b = code.builder
    if kind is QuadProduct.PORTABLE:
        return _select(code, table, places)
    # Instructions look up in each part of 16 bytes by itself.
    lanes = {QuadProduct.VNNI_512: 64, QuadProduct.I8MM: 16}.get(kind, 32)
    bytes_ = ir.VectorType(_I8, lanes)
    entries = bytes_([value & 0xFF for value in table] * (lanes // 16))
    name = {
        64: "llvm.x86.avx512.pshuf.b.512",
        32: "llvm.x86.avx2.pshuf.b",
        16: "llvm.aarch64.neon.tbl1.v16i8",
    }[lanes]

    def each(part: ir.Value) -> ir.Value:
        found = _intrinsic(code, name, bytes_, (entries, b.bitcast(part, bytes_)))
        return b.bitcast(found, part.type)

    return _by_parts(code, 64 // lanes, each, places)


def _select(code: Code, table: Sequence[int], places: ir.Value) -> ir.Value:
    """Look up with what every processor has: of two halves of the table, each bit of a place takes one."""
    b, ones = code.builder, words(0x01010101)
    masks = [b.mul(b.and_(b.lshr(places, words(bit)), ones), words(0xFF)) for bit in range(4)]
    found = [words(value * 0x01010101) for value in table]
    for mask in masks:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [b.xor(low, b.and_(mask, b.xor(low, high))) for low, high in pairs]
    return found[0]


def power_of_two(code: Code, address: Int, lanes: int = LANES) -> Vector:
    """Load bytes, as 2**(byte - 128) in float32."""
    b, wide = code.builder, ir.VectorType(_I32, lanes)

    def every(value: int) -> ir.Constant:
        return wide([value] * lanes)

    narrow = b.load(_pointer(code, address, ir.VectorType(_I8, lanes)), align=1)
    byte = b.zext(narrow, wide)
    is_small = b.icmp_unsigned("<", byte, every(2))
    # The two least are no normal numbers.
    small = b.shl(every(1 << 21), b.and_(byte, every(1)))
    bits = b.select(is_small, small, b.shl(b.sub(byte, every(1)), every(23)))
    return Vector(b, b.bitcast(bits, ir.VectorType(ir.FloatType(), lanes)))


def to_float(code: Code, value: ir.Value) -> Vector:
    """Convert words to float32."""
    return Vector(code.builder, code.builder.sitofp(value, _F32S))


def add_quad_products(
    code: Code, kind: QuadProduct, sums: ir.Value, unsigned: ir.Value, signed: ir.Value
) -> ir.Value:
    """Return sums + the four products of bytes, in each word."""
    if kind is QuadProduct.VNNI_512:
        return _intrinsic(code, "llvm.x86.avx512.vpdpbusd.512", WORDS, (sums, unsigned, signed))
    if kind is QuadProduct.VNNI_256:
        name = "llvm.x86.avx512.vpdpbusd.256"
        return _by_parts(
            code, 2, lambda *parts: _intrinsic(code, name, _HALF_WORDS, parts), sums, unsigned, signed
        )
    if kind is QuadProduct.I8MM:
        return _by_parts(code, 4, lambda *parts: _usdot(code, *parts), sums, unsigned, signed)
    if kind is QuadProduct.AVX2:
        return _by_parts(code, 2, lambda *parts: _madd(code, *parts), sums, unsigned, signed)
    return _portable(code, sums, unsigned, signed)


def _madd(code: Code, sums: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Multiply even and odd bytes as 16-bit numbers: `pmaddubsw` would saturate with levels above 127."""
    b = code.builder
    shorts = ir.VectorType(_I16, LANES)
    low, eight = shorts([0xFF] * LANES), shorts([8] * LANES)
    wide, narrow = b.bitcast(unsigned, shorts), b.bitcast(signed, shorts)
    even = (b.and_(wide, low), b.ashr(b.shl(narrow, eight), eight))
    odd = (b.lshr(wide, eight), b.ashr(narrow, eight))
    for pair in (even, odd):
        sums = b.add(sums, _intrinsic(code, "llvm.x86.avx2.pmadd.wd", _HALF_WORDS, pair))
    return sums


def _usdot(code: Code, sums: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    b, kind, sixteen = code.builder, sums.type, ir.VectorType(_I8, 16)
    name = "llvm.aarch64.neon.usdot.v4i32.v16i8"
    function = declare(b.module, name, ir.FunctionType(kind, (kind, sixteen, sixteen)))
    return b.call(function, (sums, b.bitcast(unsigned, sixteen), b.bitcast(signed, sixteen)))


def _portable(code: Code, sums: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    b = code.builder
    for place in range(0, 32, 8):
        level = b.and_(b.lshr(unsigned, words(place)), words(0xFF))
        factor = b.ashr(b.shl(signed, words(24 - place)), words(24))
        sums = b.add(sums, b.mul(level, factor))
    return sums


def _intrinsic(code: Code, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return code.builder.call(declare(code.builder.module, name, kind), tuple(arguments))


def _by_parts(code: Code, count: int, function: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
    """Apply a function to `count` equal parts of the vectors, and join the results."""
    b, size = code.builder, LANES // count
    results = []
    for part in range(count):
        mask = ir.VectorType(_I32, size)(list(range(part * size, part * size + size)))
        results.append(
            function(*(b.shuffle_vector(v, ir.Constant(WORDS, ir.Undefined), mask) for v in vectors))
        )
    while len(results) > 1:
        width = results[0].type.count
        both = ir.VectorType(_I32, 2 * width)(list(range(2 * width)))
        results = [
            b.shuffle_vector(one, other, both) for one, other in zip(results[::2], results[1::2], strict=True)
        ]
    return results[0]


def _pointer(code: Code, address: Int, kind: ir.Type) -> ir.Value:
    return code.builder.inttoptr(address.ir, kind.as_pointer())
