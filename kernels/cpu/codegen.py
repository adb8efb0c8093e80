"""A small language over llvmlite for CPU kernels: int64 scalars, float32 vectors, structured control flow.

Kernels are written as Python functions that emit LLVM IR through `Code`. That gives exact control where
LLVM's own vectoriser has little: accumulators stay in registers and nothing is reduced across lanes inside
a loop. Addresses are `Int`s. Vectors longer than the machine's registers are split by LLVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
from llvmlite import ir

MAX_LANES = 16

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ROUND_MAGIC = 1.5 * 2**23
"""The number that rounds a float32 to an integer, held in the low mantissa bits, when it is added."""
_MIN_EXPONENT = -126.0


@cache
def _exp2_coefficients() -> tuple[float, ...]:
    """Return 2**f on [-1/2, 1/2] in powers of f: Chebyshev interpolation, relative error below 1e-8."""
    fit = np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


class CacheLevel(Enum):
    """The cache that memory is brought to, by the degree of locality that LLVM gives it."""

    FIRST = 3
    SECOND = 2


class Element(Enum):
    """The type in which an element is stored. Arithmetic is float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"

    @property
    def size(self) -> int:
        """Return the bytes of an element."""
        return {Element.FLOAT32: 4, Element.INT8: 1}.get(self, 2)


@dataclass(frozen=True, slots=True)
class Int:
    """An int64 known at run time. Division and remainder want operands that are not negative."""

    builder: ir.IRBuilder
    ir: ir.Value

    def _make(self, operation: str, other: Int | int) -> Int:
        value = other.ir if isinstance(other, Int) else _I64(other)
        return Int(self.builder, getattr(self.builder, operation)(self.ir, value))

    def __add__(self, other: Int | int) -> Int:
        return self if other == 0 else self._make("add", other)

    def __sub__(self, other: Int | int) -> Int:
        return self._make("sub", other)

    def __mul__(self, other: Int | int) -> Int:
        return self._make("mul", other)

    def __floordiv__(self, other: Int | int) -> Int:
        return self._make("udiv", other)

    def __mod__(self, other: Int | int) -> Int:
        return self._make("urem", other)

    def compare(self, operator: str, other: Int | int) -> ir.Value:
        """Make a condition for `Code.when`: "<", "<=", "==", ..., signed."""
        value = other.ir if isinstance(other, Int) else _I64(other)
        return self.builder.icmp_signed(operator, self.ir, value)

    def at_most(self, other: Int | int) -> Int:
        """Return the smaller of the two."""
        value = other.ir if isinstance(other, Int) else _I64(other)
        return Int(self.builder, self.builder.select(self.compare("<", other), self.ir, value))

    def if_else(self, condition: ir.Value, other: Int) -> Int:
        """Return this number if `condition` holds, else the other."""
        return Int(self.builder, self.builder.select(condition, self.ir, other.ir))

    def at_least(self, other: Int) -> Int:
        """Return the larger of the two."""
        return Int(self.builder, self.builder.select(self.compare(">", other), self.ir, other.ir))


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector of float32 known at run time; a scalar has one lane."""

    builder: ir.IRBuilder
    ir: ir.Value

    @property
    def lanes(self) -> int:
        """Return the number of elements."""
        return int(self.ir.type.count)

    def __add__(self, other: Vector) -> Vector:
        return Vector(self.builder, self.builder.fadd(self.ir, other.ir))

    def __sub__(self, other: Vector) -> Vector:
        return Vector(self.builder, self.builder.fsub(self.ir, other.ir))

    def __mul__(self, other: Vector) -> Vector:
        return Vector(self.builder, self.builder.fmul(self.ir, other.ir))

    def __truediv__(self, other: Vector) -> Vector:
        return Vector(self.builder, self.builder.fdiv(self.ir, other.ir))

    def times_plus(self, factor: Vector, addend: Vector) -> Vector:
        """Return self * factor + addend, with one rounding where the machine can."""
        kind = self.ir.type
        function = declare(
            self.builder.module, f"llvm.fmuladd.v{self.lanes}f32", ir.FunctionType(kind, (kind,) * 3)
        )
        return Vector(self.builder, self.builder.call(function, (self.ir, factor.ir, addend.ir)))

    def at_least(self, other: Vector) -> Vector:
        """Return the larger of the two, lane by lane."""
        b = self.builder
        return Vector(b, b.select(b.fcmp_ordered(">", self.ir, other.ir), self.ir, other.ir))

    def at_most(self, other: Vector) -> Vector:
        """Return the smaller of the two, lane by lane."""
        b = self.builder
        return Vector(b, b.select(b.fcmp_ordered("<", self.ir, other.ir), self.ir, other.ir))

    def splat(self, lanes: int) -> Vector:
        """Repeat the first lane in every one of `lanes` lanes."""
        return self._pick([0] * lanes)

    def every(self, step: int, first: int) -> Vector:
        """Return the lanes first, first + step, first + 2 * step, …"""
        return self._pick(range(first, self.lanes, step))

    def reduce(self, combine: Callable[[Vector, Vector], Vector]) -> Vector:
        """Fold the lanes (a power of two of them) pairwise into one."""
        vector = self
        while vector.lanes > 1:
            half = vector.lanes // 2
            vector = combine(vector._pick(range(half)), vector._pick(range(half, vector.lanes)))
        return vector

    def _pick(self, lanes: Iterable[int]) -> Vector:
        index = list(lanes)
        undefined = ir.Constant(self.ir.type, ir.Undefined)
        mask = ir.VectorType(_I32, len(index))(index)
        return Vector(self.builder, self.builder.shuffle_vector(self.ir, undefined, mask))


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A vector that a loop updates; LLVM turns it into a register."""

    builder: ir.IRBuilder
    memory: ir.Value

    def get(self) -> Vector:
        """Return the value at this point."""
        return Vector(self.builder, self.builder.load(self.memory))

    def set(self, value: Vector) -> None:
        """Replace the value."""
        self.builder.store(value.ir, self.memory)


@dataclass(frozen=True, slots=True)
class Code:
    """A builder that emits code at the current point of a function."""

    builder: ir.IRBuilder

    def integer(self, value: int) -> Int:
        """Return a constant."""
        return Int(self.builder, _I64(value))

    def constant(self, value: float, lanes: int = 1) -> Vector:
        """Return a vector with the same float32 constant in every lane."""
        return Vector(self.builder, ir.VectorType(_F32, lanes)([float(np.float32(value))] * lanes))

    def stack(self, nbytes: int) -> Int:
        """Reserve `nbytes` of this call's stack, aligned to 64, and return the address."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
        memory.align = 64
        return Int(self.builder, self.builder.ptrtoint(memory, _I64))

    def accumulator(self, initial: Vector) -> Accumulator:
        """Make a new accumulator."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(initial.ir.type)
        self.builder.store(initial.ir, memory)
        return Accumulator(self.builder, memory)

    @contextmanager
    def loop(self, start: Int | int, stop: Int, step: int = 1) -> Iterator[Int]:
        """Run the body for start, start + step, ... below stop."""
        b = self.builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(_I64)
        index.add_incoming(start.ir if isinstance(start, Int) else _I64(start), before)
        b.cbranch(b.icmp_signed("<", index, stop.ir), body, after)
        b.position_at_end(body)
        yield Int(b, index)
        index.add_incoming(b.add(index, _I64(step)), b.block)
        b.branch(head)
        b.position_at_end(after)

    @contextmanager
    def loop_while(self, condition: Callable[[], ir.Value]) -> Iterator[None]:
        """Run the body as long as the condition that `condition()` emits holds; it is evaluated before each
        round."""
        b = self.builder
        head, body, after = (b.append_basic_block(name) for name in ("while", "round", "done"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(condition(), body, after)
        b.position_at_end(body)
        yield
        b.branch(head)
        b.position_at_end(after)

    @contextmanager
    def tickets(self, counter: Int, stop: Int) -> Iterator[Int]:
        """Run the body for each number below `stop` drawn from the int64 at `counter`, which threads
        share."""
        b = self.builder
        head, body, after = (b.append_basic_block(name) for name in ("draw", "ticket", "drained"))
        b.branch(head)
        b.position_at_end(head)
        ticket = self.fetch_add(counter, 1)
        b.cbranch(ticket.compare("<", stop), body, after)
        b.position_at_end(body)
        yield ticket
        b.branch(head)
        b.position_at_end(after)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        """Run the body if `condition` holds."""
        with self.builder.if_then(condition):
            yield

    def fetch_add(self, address: Int, amount: int) -> Int:
        """Add to an int64 atomically (acquire and release) and return its value before."""
        cell = self._pointer(address, _I64)
        return Int(self.builder, self.builder.atomic_rmw("add", cell, _I64(amount), "acq_rel"))

    def load_acquire(self, address: Int) -> Int:
        """Load an int64 that others store; code after this sees what they did before they stored it."""
        cell = self._pointer(address, _I64)
        return Int(self.builder, self.builder.load_atomic(cell, "acquire", align=8))

    def store_release(self, value: Int, address: Int) -> None:
        """Store an int64 that others load, after everything before it."""
        cell = self._pointer(address, _I64)
        self.builder.store_atomic(value.ir, cell, "release", align=8)

    def fence(self) -> None:
        """Emit a full fence: no load or store moves across."""
        self.builder.fence("seq_cst")

    def load_int(self, address: Int, nbytes: int = 8) -> Int:
        """Load a signed integer of 4 or 8 bytes."""
        value = self.builder.load(self._pointer(address, ir.IntType(8 * nbytes)))
        return Int(self.builder, value if nbytes == 8 else self.builder.sext(value, _I64))

    def store_int(self, value: Int, address: Int, nbytes: int = 8) -> None:
        """Store an integer in 4 or 8 bytes."""
        kind = ir.IntType(8 * nbytes)
        stored = value.ir if nbytes == 8 else self.builder.trunc(value.ir, kind)
        self.builder.store(stored, self._pointer(address, kind))

    def load_bits(self, address: Int, lanes: int, element: Element) -> ir.Value:
        """Load the bits of consecutive elements as a vector of integers."""
        kind = ir.VectorType(ir.IntType(8 * element.size), lanes)
        return self.builder.load(self._pointer(address, kind), align=element.size)

    def load(self, address: Int, lanes: int = 1, element: Element = Element.FLOAT32) -> Vector:
        """Load consecutive elements, widened to float32."""
        b, wide = self.builder, ir.VectorType(_F32, lanes)
        if element is Element.FLOAT32:
            return Vector(b, b.load(self._pointer(address, wide), align=4))
        bits = self.load_bits(address, lanes, element)
        if element is Element.FLOAT16:
            return Vector(b, b.fpext(b.bitcast(bits, ir.VectorType(_F16, lanes)), wide))
        words = ir.VectorType(_I32, lanes)
        if element is Element.INT8:
            return Vector(b, b.sitofp(b.sext(bits, words), wide))
        return Vector(b, b.bitcast(b.shl(b.zext(bits, words), words([16] * lanes)), wide))

    def store(self, value: Vector, address: Int, element: Element = Element.FLOAT32) -> None:
        """Store a vector, rounded to nearest even where the element is narrower."""
        self.store_lanes(self.narrowed(value, element), address)

    def narrowed(self, value: Vector, element: Element) -> ir.Value:
        """Return a vector of integers with the bits of the elements, rounded to nearest even; int8 wants numbers
        within its range."""
        b, lanes = self.builder, value.lanes
        words, shorts = ir.VectorType(_I32, lanes), ir.VectorType(_I16, lanes)
        if element is Element.FLOAT32:
            return b.bitcast(value.ir, words)
        if element is Element.FLOAT16:
            return b.bitcast(b.fptrunc(value.ir, ir.VectorType(_F16, lanes)), shorts)
        if element is Element.INT8:
            shifted = value + self.constant(ROUND_MAGIC, lanes)
            return b.trunc(b.bitcast(shifted.ir, words), ir.VectorType(_I8, lanes))
        bits = b.bitcast(value.ir, words)
        odd = b.and_(b.lshr(bits, words([16] * lanes)), words([1] * lanes))
        rounded = b.add(bits, b.add(odd, words([0x7FFF] * lanes)))
        not_a_number = b.fcmp_unordered("uno", value.ir, value.ir)
        bits = b.select(not_a_number, words([0x7FC00000] * lanes), rounded)
        return b.trunc(b.lshr(bits, words([16] * lanes)), shorts)

    def store_lanes(self, bits: ir.Value, address: Int, step: int = 0) -> None:
        """Store a vector of integers; with `step`, its lanes at places that many bytes apart."""
        b, kind = self.builder, bits.type.element
        if not step:
            b.store(bits, self._pointer(address, bits.type), align=kind.width // 8)
            return
        for lane in range(bits.type.count):
            b.store(b.extract_element(bits, _I32(lane)), self._pointer(address + lane * step, kind))

    def copy_bytes(self, source: Int, target: Int, nbytes: Int) -> None:
        """Copy memory; the two ranges must not overlap."""
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (pointer, pointer, _I64, ir.IntType(1)))
        function = declare(self.builder.module, "llvm.memcpy.p0.p0.i64", kind)
        ends = (self._pointer(address, ir.IntType(8)) for address in (target, source))
        self.builder.call(function, (*ends, nbytes.ir, ir.IntType(1)(0)))

    def call_address(self, address: Int | int, *arguments: Int) -> None:
        """Call a C function of int64 parameters that lies at `address` in this process."""
        kind = ir.FunctionType(_I64, [_I64] * len(arguments))
        function = self._pointer(address if isinstance(address, Int) else self.integer(address), kind)
        self.builder.call(function, [argument.ir for argument in arguments])

    def call_for_number(self, address: Int) -> Int:
        """Call a C function without parameters that lies at `address`, and return its `int`."""
        function = self._pointer(address, ir.FunctionType(_I32, []))
        return Int(self.builder, self.builder.sext(self.builder.call(function, []), _I64))

    def prefetch(self, address: Int, level: CacheLevel = CacheLevel.FIRST) -> None:
        """Ask for the cache line at `address`, to be read soon."""
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (pointer, _I32, _I32, _I32))
        function = declare(self.builder.module, "llvm.prefetch.p0", kind)
        self.builder.call(
            function, (self._pointer(address, ir.IntType(8)), _I32(0), _I32(level.value), _I32(1))
        )

    def mask_from(self, vector: Vector, position: Int, limit: Int, fill: float) -> Vector:
        """Replace the lanes from `limit` on by `fill`; the first lane is number `position`."""
        inside = self._lanes_before(limit, position, vector.lanes)
        return Vector(self.builder, self.builder.select(inside, vector.ir, self._filled(fill, vector)))

    def mask_before(self, vector: Vector, position: Int, limit: Int, fill: float) -> Vector:
        """Replace the lanes before `limit` by `fill`; the first lane is number `position`."""
        outside = self._lanes_before(limit, position, vector.lanes)
        return Vector(self.builder, self.builder.select(outside, self._filled(fill, vector), vector.ir))

    def _lanes_before(self, limit: Int, position: Int, lanes: int) -> ir.Value:
        b, words = self.builder, ir.VectorType(_I32, lanes)
        left = b.trunc((limit - position).ir, _I32)
        first = b.insert_element(ir.Constant(words, ir.Undefined), left, _I32(0))
        return b.icmp_signed("<", words(list(range(lanes))), Vector(b, first).splat(lanes).ir)

    def _filled(self, value: float, like: Vector) -> ir.Value:
        return self.constant(value, like.lanes).ir

    def at_most_in_size(self, x: Vector, limit: float) -> Vector:
        """Return x, but the limit, with its sign, for what is beyond it; NaN stays NaN."""
        b, most, least = self.builder, self.constant(limit, x.lanes), self.constant(-limit, x.lanes)
        low = b.select(b.fcmp_ordered("<", x.ir, least.ir), least.ir, x.ir)
        return Vector(b, b.select(b.fcmp_ordered(">", x.ir, most.ir), most.ir, low))

    def exp2(self, x: Vector) -> Vector:
        """Return 2**x for x <= 0, to 2 units in the last place; 0 below -126; NaN stays NaN."""
        b, lanes = self.builder, x.lanes
        words = ir.VectorType(_I32, lanes)
        shifted = x + self.constant(ROUND_MAGIC, lanes)
        fraction = x - (shifted - self.constant(ROUND_MAGIC, lanes))
        *rest, last = _exp2_coefficients()
        power = self.constant(last, lanes)
        for coefficient in reversed(rest):
            power = power.times_plus(fraction, self.constant(coefficient, lanes))
        exponent = b.shl(b.bitcast(shifted.ir, words), words([23] * lanes))
        scaled = b.bitcast(b.add(b.bitcast(power.ir, words), exponent), x.ir.type)
        tiny = b.fcmp_ordered("<", x.ir, self.constant(_MIN_EXPONENT, lanes).ir)
        return Vector(b, b.select(tiny, self.constant(0.0, lanes).ir, scaled))

    def call(self, function: ir.Function, *arguments: Int) -> None:
        """Call a function made by `define`."""
        self.builder.call(function, [argument.ir for argument in arguments])

    def _pointer(self, address: Int, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address.ir, kind.as_pointer())


def declare(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    """Return the module's declaration of an intrinsic, made when it is first asked for."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def define(
    module: ir.Module, name: str, parameters: int, body: Callable[..., None], *, exported: bool = False
) -> ir.Function:
    """Define a function of int64 parameters without result; `body(code, *parameters)` emits it.

    A function that is not exported is never inlined: its body is optimised once, by itself.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * parameters), name)
    if not exported:
        function.linkage = "internal"
        function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    body(Code(builder), *(Int(builder, argument) for argument in function.args))
    builder.ret_void()
    return function
