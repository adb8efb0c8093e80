"""The arithmetic of a layer's functions in vectors of float32, for those that compute it by itself and those that
compute it together with something else: so both have the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from nbengine.kernels.cpu.codegen import MAX_LANES, ROUND_MAGIC, Code, Vector, declare

_LEAST_POWER = -126.0
_ONE_IN_BITS = 0x3F800000
_GELU_CUBED = 0.044715


@cache
def _power_minus_one_coefficients() -> tuple[float, ...]:
    """Return (2**f - 1) / f on [-1/2, 1/2] in powers of f: Chebyshev interpolation, relative error below 2e-8."""
    fit = np.polynomial.Chebyshev.interpolate(lambda f: np.expm1(f * math.log(2)) / f, 5, domain=[-0.5, 0.5])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


def tanh(code: Code, x: Vector) -> Vector:
    """Return the hyperbolic tangent, to 3 units in the last place; NaN stays NaN.

    It is -e / (2 + e) with e = exp(-2 |x|) - 1 and the sign of x. With exp(-2 |x|) = 2**k * 2**f, e is
    2**k * (2**f - 1) + (2**k - 1), which loses no digits where |x| is small.
    """
    b, lanes = code.builder, x.lanes
    words = ir.VectorType(ir.IntType(32), lanes)

    def splat(value: float) -> Vector:
        return code.constant(value, lanes)

    power = x.at_least(splat(0.0) - x) * splat(-2 * math.log2(math.e))
    power = splat(_LEAST_POWER).at_least(power)
    shifted = power + splat(ROUND_MAGIC)
    fraction = power - (shifted - splat(ROUND_MAGIC))
    *rest, last = _power_minus_one_coefficients()
    slope = splat(last)
    for coefficient in reversed(rest):
        slope = slope.times_plus(fraction, splat(coefficient))
    exponent = b.shl(b.bitcast(shifted.ir, words), words([23] * lanes))
    whole = Vector(b, b.bitcast(b.add(exponent, words([_ONE_IN_BITS] * lanes)), x.ir.type))
    less_one = (whole * fraction).times_plus(slope, whole - splat(1.0))
    size = (splat(0.0) - less_one) / (splat(2.0) + less_one)
    is_negative = b.fcmp_ordered("<", x.ir, splat(0.0).ir)
    return Vector(b, b.select(is_negative, (splat(0.0) - size).ir, size.ir))


def sigmoid(code: Code, x: Vector) -> Vector:
    """Return 1 / (1 + exp(-x))."""
    b, one, power = code.builder, code.constant(1.0, x.lanes), _falling(code, x)
    above = Vector(b, b.select(_is_negative(code, x), power.ir, one.ir))
    return above / (one + power)


def gated(code: Code, gate: Vector, other: Vector) -> Vector:
    """Return silu(gate) * other."""
    return gate * sigmoid(code, gate) * other


def sigmoid_gated(code: Code, gate: Vector, other: Vector) -> Vector:
    """Return sigmoid(gate) * other."""
    return sigmoid(code, gate) * other


def exp(code: Code, x: Vector) -> Vector:
    """Return e**x for numbers that are no larger than 87; the relative error is about (4 + |x|) * 2**-24."""
    b, power = code.builder, _falling(code, x)
    grown = code.constant(1.0, x.lanes) / power
    return Vector(b, b.select(_is_negative(code, x), power.ir, grown.ir))


def softplus(code: Code, x: Vector) -> Vector:
    """Return log(1 + exp(x)), with a relative error of about (4 + |x|) * 2**-24; NaN stays NaN.

    It is the larger of x and 0, and log(1 + y) with y = exp(-|x|), which is 2 * artanh(y / (2 + y)).
    """

    def splat(value: float) -> Vector:
        return code.constant(value, x.lanes)

    power = _falling(code, x)
    ratio = power / (splat(2.0) + power)
    square = ratio * ratio
    *rest, last = _artanh_coefficients()
    series = splat(last)
    for coefficient in reversed(rest):
        series = series.times_plus(square, splat(coefficient))
    return series.times_plus(ratio, splat(0.0).at_least(x))


@cache
def _artanh_coefficients() -> tuple[float, ...]:
    """Return 2 * artanh(r) / r on [0, 1/3] in powers of r * r: Chebyshev interpolation, relative error below 1e-8."""

    def of_square(s: NDArray[np.float64]) -> NDArray[np.float64]:
        r = np.sqrt(s)
        return np.where(r > 0, 2 * np.arctanh(r) / np.where(r > 0, r, 1), 2.0)

    fit = np.polynomial.Chebyshev.interpolate(of_square, 6, domain=[0, 1 / 9])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


def _falling(code: Code, x: Vector) -> Vector:
    """Return exp(-|x|)."""
    return code.exp2(x.at_least(code.constant(0.0, x.lanes) - x) * code.constant(-math.log2(math.e), x.lanes))


def _is_negative(code: Code, x: Vector) -> ir.Value:
    return code.builder.fcmp_ordered("<", x.ir, code.constant(0.0, x.lanes).ir)


def gelu_gated(code: Code, gate: Vector, other: Vector) -> Vector:
    """Return gelu(gate) * other, where gelu is the approximation with the hyperbolic tangent."""

    def splat(value: float) -> Vector:
        return code.constant(value, gate.lanes)

    inner = gate * splat(math.sqrt(2 / math.pi))
    cubed = (gate * gate).times_plus(splat(_GELU_CUBED), splat(1.0))
    return gate * splat(0.5) * (splat(1.0) + tanh(code, inner * cubed)) * other


def soft_capped(code: Code, x: Vector, cap: Vector) -> Vector:
    """Return cap * tanh(x / cap)."""
    return tanh(code, x / cap) * cap


def clamped_gated(alpha: float, limit: float, code: Code, gate: Vector, other: Vector) -> Vector:
    """Return the gate of gpt-oss's experts: of numbers cut at `limit`, sigmoid(alpha * gate) * gate * (other + 1). What is
    no number stays so."""

    def splat(value: float) -> Vector:
        return code.constant(value, gate.lanes)

    gate = splat(limit).at_most(gate)
    other = splat(limit).at_most(splat(-limit).at_least(other))
    return sigmoid(code, gate * splat(alpha)) * gate * (other + splat(1.0))


def squared_relu(code: Code, x: Vector, _other: Vector) -> Vector:
    """Return the square of x where it is positive, else 0; NaN stays NaN."""
    positive = code.constant(0.0, x.lanes).at_least(x)
    return positive * positive


Gate = Callable[[Code, Vector, Vector], Vector]
Activation = str | tuple[float, float]
"""A name among `GATES`, or alpha and limit of a clamped gate."""

GATES: Mapping[str, Gate] = {
    "silu": gated,
    "gelu_tanh": gelu_gated,
    "sigmoid": sigmoid_gated,
    "relu2": squared_relu,
}
"""The activations of gates, those of `nbengine.models.configs.decoder_config.ACTIVATIONS` by their names there: each
makes activation(gate) * other, but for those of `UNGATED`."""
UNGATED = ("relu2",)
"""The activations that make activation(gate), and look at nothing else."""


def gate_of(activation: Activation) -> Gate:
    """Return the function of a gate."""
    return GATES[activation] if isinstance(activation, str) else partial(clamped_gated, *activation)


def rms_factor(code: Code, squares: Vector, size: int, eps: Vector) -> Vector:
    """Return what a row of `size` numbers is multiplied with in the root mean square normalisation, in every lane;
    `squares` are the sums of the squares of each lane's numbers, `eps` has one lane."""
    mean = squares.reduce(Vector.__add__) / code.constant(size)
    return (code.constant(1.0) / _square_root(code, mean + eps)).splat(MAX_LANES)


def l2_factor(code: Code, squares: Vector, eps: float) -> Vector:
    """Return what numbers are multiplied with to have norm 1; one lane, as `squares`, the sum of their squares."""
    return code.constant(1.0) / _square_root(code, squares + code.constant(eps))


def _square_root(code: Code, x: Vector) -> Vector:
    kind = x.ir.type
    function = declare(code.builder.module, "llvm.sqrt.v1f32", ir.FunctionType(kind, (kind,)))
    return Vector(code.builder, code.builder.call(function, (x.ir,)))
