"""Vectors of words of 32 bits, and the products of small integers in them, on every instruction set.

A product of quads multiplies, in each word, four unsigned bytes with four signed ones, and adds the four
products to a sum. The result is exact, so that it is the same on every processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, Vector, declare
from nbengine.kernels.cpu.jit import Processor

LANES = 16
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
WORDS = ir.VectorType(_I32, LANES)
_LARGEST_SIGNED, _LARGEST_SHORT = 127, 2**15 - 1


class QuadProduct(Enum):
    """The instructions for products of quads."""

    VNNI_512 = "AVX-512 VNNI"
    VNNI_256 = "AVX VNNI"
    AVX2 = "AVX2"
    I8MM = "Arm i8mm"
    DOTPROD = "Arm dotprod"
    PORTABLE = "portable"

    @property
    def lanes(self) -> int:
        """Return the words of the vectors in which products are computed: those of a register."""
        return _REGISTERS.get(self, LANES)

    def centre(self, largest: int) -> int:
        """Return what is to be taken from unsigned bytes up to `largest` before they are multiplied: more than seven
        bits need a sign with AVX2, whose sums of two products have 16 bits, and with Arm's `sdot`, which multiplies
        signed bytes alone."""
        is_signed = self in (QuadProduct.AVX2, QuadProduct.DOTPROD)
        return 128 if is_signed and largest > _LARGEST_SIGNED else 0

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
        if has("i8mm"):
            return cls.I8MM
        return cls.DOTPROD if has("dotprod") else cls.PORTABLE


_REGISTERS = {QuadProduct.VNNI_256: 8, QuadProduct.AVX2: 8, QuadProduct.I8MM: 4, QuadProduct.DOTPROD: 4}
"""The words of a register, where they are not `LANES`."""


def words(value: int, lanes: int = LANES) -> ir.Constant:
    """Return the vector with `value` in every word."""
    return ir.VectorType(_I32, lanes)([value] * lanes)


def load_words(code: Code, address: Int, lanes: int = LANES) -> ir.Value:
    """Load 4 bytes a word, however aligned."""
    return code.builder.load(_pointer(code, address, ir.VectorType(_I32, lanes)), align=1)


def broadcast_word(code: Code, address: Int, lanes: int = LANES) -> ir.Value:
    """Load 4 bytes into every word."""
    b = code.builder
    undefined = ir.Constant(ir.VectorType(_I32, lanes), ir.Undefined)
    first = b.insert_element(undefined, b.load(_pointer(code, address, _I32), align=4), _I32(0))
    return b.shuffle_vector(first, undefined, words(0, lanes))


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
    bytes_ = ir.VectorType(_I8, 4 * kind.lanes)
    entries = bytes_([value & 0xFF for value in table] * (bytes_.count // 16))
    name = {
        64: "llvm.x86.avx512.pshuf.b.512",
        32: "llvm.x86.avx2.pshuf.b",
        16: "llvm.aarch64.neon.tbl1.v16i8",
    }[bytes_.count]
    found = _intrinsic(code, name, bytes_, (entries, b.bitcast(places, bytes_)))
    return b.bitcast(found, places.type)


def _select(code: Code, table: Sequence[int], places: ir.Value) -> ir.Value:
    """Look up with what every processor has: of two halves of the table, each bit of a place takes one."""
    b, lanes = code.builder, places.type.count
    ones = words(0x01010101, lanes)
    masks = [b.mul(b.and_(b.lshr(places, words(bit, lanes)), ones), words(0xFF, lanes)) for bit in range(4)]
    found = [words(value * 0x01010101, lanes) for value in table]
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
    b = code.builder
    return Vector(b, b.sitofp(value, ir.VectorType(ir.FloatType(), value.type.count)))


def add_quad_products(
    code: Code,
    kind: QuadProduct,
    sums: ir.Value,
    quads: Sequence[tuple[ir.Value, ir.Value]],
    largest: int,
) -> ir.Value:
    """Return sums + the products of bytes, four in each word, of all pairs of vectors of `kind.lanes` words.

    The first ones of the pairs are bytes from 0 to `largest`, less `kind.centre(largest)`; the second ones are signed
    bytes from -127 to 127.
    """
    if kind is QuadProduct.AVX2:
        return _add_short_products(code, sums, quads, largest)
    for unsigned, signed in quads:
        sums = _add_quad_product(code, kind, sums, unsigned, signed)
    return sums


def _add_quad_product(
    code: Code, kind: QuadProduct, sums: ir.Value, unsigned: ir.Value, signed: ir.Value
) -> ir.Value:
    if kind is QuadProduct.VNNI_512:
        return _intrinsic(code, "llvm.x86.avx512.vpdpbusd.512", sums.type, (sums, unsigned, signed))
    if kind is QuadProduct.VNNI_256:
        return _intrinsic(code, "llvm.x86.avx512.vpdpbusd.256", sums.type, (sums, unsigned, signed))
    if kind in (QuadProduct.I8MM, QuadProduct.DOTPROD):
        bytes_ = [code.builder.bitcast(each, ir.VectorType(_I8, 16)) for each in (unsigned, signed)]
        name = "usdot" if kind is QuadProduct.I8MM else "sdot"
        return _intrinsic(code, f"llvm.aarch64.neon.{name}.v4i32.v16i8", sums.type, (sums, *bytes_))
    return _portable(code, sums, unsigned, signed)


def _add_short_products(
    code: Code, sums: ir.Value, quads: Sequence[tuple[ir.Value, ir.Value]], largest: int
) -> ir.Value:
    """Add products: `pmaddubsw` adds two of them in 16 bits, where some more of such sums have room, too, before
    `pmaddwd` widens them. Of signed bytes, the first one's sign is given to the second."""
    b, lanes = code.builder, sums.type.count
    bytes_, shorts = ir.VectorType(_I8, 4 * lanes), ir.VectorType(_I16, 2 * lanes)
    centre = QuadProduct.AVX2.centre(largest)

    def multiply(one: ir.Value, other: ir.Value) -> ir.Value:
        one, other = b.bitcast(one, bytes_), b.bitcast(other, bytes_)
        if centre:
            other = _intrinsic(code, "llvm.x86.avx2.psign.b", bytes_, (other, one))
            one = _intrinsic(code, f"llvm.abs.v{bytes_.count}i8", bytes_, (one, ir.IntType(1)(0)))
        return _intrinsic(code, "llvm.x86.avx2.pmadd.ub.sw", shorts, (one, other))

    together = _LARGEST_SHORT // (2 * _LARGEST_SIGNED * (largest - centre))
    for at in range(0, len(quads), together):
        products = reduce(b.add, [multiply(*pair) for pair in quads[at : at + together]])
        ones = shorts([1] * shorts.count)
        sums = b.add(sums, _intrinsic(code, "llvm.x86.avx2.pmadd.wd", sums.type, (products, ones)))
    return sums


def _portable(code: Code, sums: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    b, lanes = code.builder, sums.type.count
    for place in range(0, 32, 8):
        level = b.and_(b.lshr(unsigned, words(place, lanes)), words(0xFF, lanes))
        factor = b.ashr(b.shl(signed, words(24 - place, lanes)), words(24, lanes))
        sums = b.add(sums, b.mul(level, factor))
    return sums


def _intrinsic(code: Code, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return code.builder.call(declare(code.builder.module, name, kind), tuple(arguments))


def _pointer(code: Code, address: Int, kind: ir.Type) -> ir.Value:
    return code.builder.inttoptr(address.ir, kind.as_pointer())
