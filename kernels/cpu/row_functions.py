"""The small functions between a layer's products, each a pass over rows.

They compute in float32 and round once. torch composes them of three to six operations, which round each time
and take 15 to 30 µs for one row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from llvmlite import ir

from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.elements import supports
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.layout import vectors_of
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.cpu.vectors import (
    GATES,
    exp,
    gate_of,
    rms_factor,
    sigmoid,
    soft_capped,
    softplus,
)

ROWS_AT_A_TIME = 16
"""Rows that a thread draws at a time; as many are not worth waking another one."""

DELTA_GATES = ("decay", "beta")
"""The functions of the delta rule's gates, of `size` heads of float32: softplus(x + bias) * -exp(log), with bias and
log one after the other as the other operand, and sigmoid(x)."""

_WORD = 8

Body = Callable[["Row"], None]


class RowArguments(ctypes.Structure):
    """The arguments: addresses, strides in bytes, and counts; threads draw `items` of rows from `counter`.

    `picks`, int64, are used by functions compiled with `picked` alone.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("counter", "items", "rows", "x", "x_stride"),
                *("other", "other_stride", "picks", "output", "output_stride"),
            )
        ),
        ("eps", ctypes.c_float),
    ]


def supports_rows(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether there are functions for rows of `size` numbers, which is to be a multiple of 16."""
    return device.type == "cpu" and supports(dtype) and size % MAX_LANES == 0


@cache
def compile_rows(
    name: str, size: int, element: Element, head_dim: int = 0, *, picked: bool = False, turned: int = 0
) -> Function:
    """Compile a function of rows: "rms_norm", "add", "multiply", "divide", "softplus" (of the sum), "at_least", "at_most", "soft_cap",
    "scale" (`x` times the first number of the other operand), "sigmoid_scale" (times sigmoid of it),
    `DELTA_GATES` or a gate, by the name of its activation, of rows of `size` numbers; "rotate", "rotate_pairs" (of neighbours), "rms_norm_heads",
    "rms_norm_every_other_head", "rms_norm_groups" (each with weights of its own) or "gate_every_other_head" of `size`
    heads.

    The other operand of row i is row i, too, or with `picked` row number `picks[i]`. Of every head the first `turned`
    numbers are turned (0: all), the others are copied. Where every other head is taken, `x` has twice the heads.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.row_trials import try_rows

    arguments = name, size, element, head_dim, picked, turned
    (function,), _ = compile_tried(_define, [name], lambda _: arguments, try_rows)
    return function


@cache
def compile_clamped_gate(size: int, element: Element, clamp: tuple[float, float]) -> Function:
    """Compile the function of rows of `size` numbers that are a clamped gate's, with its alpha and limit.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    from nbengine.kernels.cpu.row_trials import try_clamped_gate

    arguments = size, element, clamp
    (function,), _ = compile_tried(
        _define_clamped_gate, ["clamped_gate"], lambda _: arguments, try_clamped_gate
    )
    return function


def _define_clamped_gate(module: ir.Module, size: int, element: Element, clamp: tuple[float, float]) -> None:
    body = partial(_over_rows, partial(_each, size, gate_of(clamp)), element, False)
    define(module, "clamped_gate", 1, body, exported=True)


def _define(
    module: ir.Module, name: str, size: int, element: Element, head_dim: int, picked: bool, turned: int
) -> None:
    bodies: dict[str, Body] = {
        "rms_norm": partial(rms_norm, size),
        "rms_norm_groups": partial(_over_groups, size, head_dim, partial(rms_norm, head_dim)),
        "rms_norm_heads": partial(_over_heads, size, head_dim, 1, partial(rms_norm, head_dim)),
        "rms_norm_every_other_head": partial(_over_heads, size, head_dim, 2, partial(rms_norm, head_dim)),
        "gate_every_other_head": partial(_gate_heads, size, head_dim),
        "rotate": partial(_rotate, size, head_dim, turned or head_dim, turn_halves),
        "rotate_pairs": partial(_rotate, size, head_dim, turned or head_dim, turn_pairs),
        DELTA_GATES[0]: partial(_decay, size),
        DELTA_GATES[1]: partial(_sigmoid, size),
        "scale": partial(_scale, size),
        "sigmoid_scale": partial(_sigmoid_scale, size),
        "add": partial(_each, size, lambda _, x, other: x + other),
        "multiply": partial(_each, size, lambda _, x, other: x * other),
        "divide": partial(_each, size, lambda _, x, other: x / other),
        "softplus": partial(_each, size, lambda code, x, other: softplus(code, x + other)),
        "soft_cap": partial(_each, size, soft_capped),
        # These keep what is no number.
        "at_least": partial(_each, size, lambda _, x, other: other.at_least(x)),
        "at_most": partial(_each, size, lambda _, x, other: other.at_most(x)),
        **{activation: partial(_each, size, gate) for activation, gate in GATES.items()},
    }
    define(module, name, 1, partial(_over_rows, bodies[name], element, picked), exported=True)


@dataclass(frozen=True)
class Row:
    """The code that computes one row: its operands, in vectors of 16 numbers."""

    code: Code
    element: Element
    eps: Vector
    x: Int
    other: Int
    output: Int

    @property
    def size(self) -> int:
        return self.element.size

    def load(self, address: Int, lanes: int = MAX_LANES) -> Vector:
        return self.code.load(address, lanes, self.element)

    def store(self, value: Vector, address: Int) -> None:
        self.code.store(value, address, self.element)

    def splat(self, value: float) -> Vector:
        return self.code.constant(value, MAX_LANES)


def _over_rows(body: Body, element: Element, picked: bool, code: Code, args: Int) -> None:
    def get(name: str) -> Int:
        return code.load_int(args + getattr(RowArguments, name).offset)

    eps = code.load(args + RowArguments.eps.offset)
    with code.tickets(args + RowArguments.counter.offset, get("items")) as item:
        first = item * ROWS_AT_A_TIME
        with code.loop(first, (first + ROWS_AT_A_TIME).at_most(get("rows"))) as row:
            x, pick = get("x") + row * get("x_stride"), row
            if picked:
                pick = code.load_int(get("picks") + row * _WORD)
            other = get("other") + pick * get("other_stride")
            body(Row(code, element, eps, x, other, get("output") + row * get("output_stride")))


def rms_norm(size: int, row: Row) -> None:
    """Normalise a row of `size` numbers by their root mean square, and multiply it with the other operand."""
    code, end, step = row.code, row.code.integer(size * row.size), MAX_LANES * row.size
    total = code.accumulator(row.splat(0.0))
    with code.loop(0, end, step) as place:
        values = row.load(row.x + place)
        total.set(values.times_plus(values, total.get()))
    scale = rms_factor(code, total.get(), size, row.eps)
    with code.loop(0, end, step) as place:
        row.store(row.load(row.x + place) * scale * row.load(row.other + place), row.output + place)


def _over_heads(heads: int, head_dim: int, step: int, body: Body, row: Row) -> None:
    """Do something to every `step`-th head; the other operand is the same for all."""
    with row.code.loop(0, row.code.integer(heads)) as head:
        at = head * (head_dim * row.size)
        body(replace(row, x=row.x + at * step, output=row.output + at))


def _over_groups(groups: int, group_size: int, body: Body, row: Row) -> None:
    """Do something to each group of numbers with its part of the other operand."""
    with row.code.loop(0, row.code.integer(groups)) as group:
        at = group * (group_size * row.size)
        body(replace(row, x=row.x + at, other=row.other + at, output=row.output + at))


def _gate_heads(heads: int, head_dim: int, row: Row) -> None:
    """Multiply each head of the other operand with sigmoid of every other head of `x`."""
    with row.code.loop(0, row.code.integer(heads)) as head:
        at = head * (head_dim * row.size)
        each = replace(row, x=row.x + at * 2, other=row.other + at, output=row.output + at)
        _each(head_dim, GATES["sigmoid"], each)


def _decay(heads: int, row: Row) -> None:
    code = row.code
    for column, lanes in vectors_of(heads):
        at = column * row.size
        step = code.load(row.x + at, lanes) + code.load(row.other + at, lanes)
        rate = code.constant(0.0, lanes) - exp(code, code.load(row.other + (at + heads * row.size), lanes))
        code.store(softplus(code, step) * rate, row.output + at)


def _sigmoid(heads: int, row: Row) -> None:
    for column, lanes in vectors_of(heads):
        at = column * row.size
        row.code.store(sigmoid(row.code, row.code.load(row.x + at, lanes)), row.output + at)


def _scale(size: int, row: Row) -> None:
    _times(size, row, row.load(row.other, 1))


def _sigmoid_scale(size: int, row: Row) -> None:
    _times(size, row, sigmoid(row.code, row.load(row.other, 1)))


def _times(size: int, row: Row, factor: Vector) -> None:
    scale = factor.splat(MAX_LANES)
    with row.code.loop(0, row.code.integer(size * row.size), MAX_LANES * row.size) as place:
        row.store(row.load(row.x + place) * scale, row.output + place)


def _each(size: int, combine: Callable[[Code, Vector, Vector], Vector], row: Row) -> None:
    whole = size // MAX_LANES * MAX_LANES
    with row.code.loop(0, row.code.integer(whole * row.size), MAX_LANES * row.size) as place:
        value = combine(row.code, row.load(row.x + place), row.load(row.other + place))
        row.store(value, row.output + place)
    for column, lanes in vectors_of(size - whole):
        at = (whole + column) * row.size
        value = combine(row.code, row.load(row.x + at, lanes), row.load(row.other + at, lanes))
        row.store(value, row.output + at)


def _rotate(heads: int, head_dim: int, turned: int, turn: Callable[[int, Row], None], row: Row) -> None:
    code = row.code
    with code.loop(0, code.integer(heads)) as head:
        start = head * (head_dim * row.size)
        turn(turned, replace(row, x=row.x + start, output=row.output + start))
        if turned < head_dim:
            end = code.integer(head_dim * row.size)
            with code.loop(turned * row.size, end, MAX_LANES * row.size) as place:
                row.store(row.load(row.x + start + place), row.output + start + place)


def turn_halves(turned: int, head: Row) -> None:
    """Turn the first half of some numbers with the second half."""
    half = turned // 2 * head.size
    with head.code.loop(0, head.code.integer(half), MAX_LANES * head.size) as place:
        low, high = head.load(head.x + place), head.load(head.x + place + half)
        for own, partner, at in ((low, high, place), (high, low, place + half)):
            cos, sin = head.load(head.other + at), head.load(head.other + at + 2 * half)
            head.store(own * cos + partner * sin, head.output + at)


def turn_pairs(turned: int, head: Row) -> None:
    """Turn each number with its neighbour."""
    b, end = head.code.builder, turned * head.size
    swapped = ir.VectorType(ir.IntType(32), MAX_LANES)([lane ^ 1 for lane in range(MAX_LANES)])
    with head.code.loop(0, head.code.integer(end), MAX_LANES * head.size) as place:
        own = head.load(head.x + place)
        partner = Vector(b, b.shuffle_vector(own.ir, own.ir, swapped))
        cos, sin = head.load(head.other + place), head.load(head.other + place + end)
        head.store(own * cos + partner * sin, head.output + place)
