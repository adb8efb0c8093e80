"""Scalars of float64 in the language of CPU kernels, for sums that float32 is too coarse for."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, Vector

_F64 = ir.DoubleType()
_FIRST = ir.IntType(32)(0)


@dataclass(frozen=True, slots=True)
class Double:
    """A float64 known at run time."""

    builder: ir.IRBuilder
    ir: ir.Value

    @classmethod
    def constant(cls, code: Code, value: float) -> Double:
        """Return a constant."""
        return cls(code.builder, _F64(value))

    @classmethod
    def of(cls, number: Vector) -> Double:
        """Widen the first lane of a vector."""
        b = number.builder
        return cls(b, b.fpext(b.extract_element(number.ir, _FIRST), _F64))

    @classmethod
    def load(cls, code: Code, address: Int) -> Double:
        """Load a number."""
        pointer = code.builder.inttoptr(address.ir, _F64.as_pointer())
        return cls(code.builder, code.builder.load(pointer))

    def store(self, address: Int) -> None:
        """Store the number."""
        self.builder.store(self.ir, self.builder.inttoptr(address.ir, _F64.as_pointer()))

    def __add__(self, other: Double) -> Double:
        return Double(self.builder, self.builder.fadd(self.ir, other.ir))

    def __sub__(self, other: Double) -> Double:
        return Double(self.builder, self.builder.fsub(self.ir, other.ir))

    def __mul__(self, other: Double) -> Double:
        return Double(self.builder, self.builder.fmul(self.ir, other.ir))

    def __truediv__(self, other: Double) -> Double:
        return Double(self.builder, self.builder.fdiv(self.ir, other.ir))

    def compare(self, operator: str, other: Double) -> ir.Value:
        """Make a condition for `Code.when`, which does not hold where one of the two is NaN."""
        return self.builder.fcmp_ordered(operator, self.ir, other.ir)

    def at_least(self, other: Double) -> Double:
        """Return the larger of the two, the other one where this is NaN."""
        return Double(self.builder, self.builder.select(self.compare(">", other), self.ir, other.ir))

    def at_most(self, other: Double) -> Double:
        """Return the smaller of the two, the other one where this is NaN."""
        return Double(self.builder, self.builder.select(self.compare("<", other), self.ir, other.ir))
