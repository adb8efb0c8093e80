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
from torch import Tensor

from nbengine.kernels.cpu.backend import ELEMENTS, supports
from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Element, Int, Vector, define
from nbengine.kernels.cpu.jit import Function, compile_module
from nbengine.kernels.cpu.layout import vectors_of
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.vectors import GATES, Activation, exp, gate_of, rms_factor, sigmoid, softplus

ROWS_AT_A_TIME = 16
"""Rows that a thread draws at a time; as many are not worth waking another one."""

DELTA_GATES = ("decay", "beta")
"""The functions of the delta rule's gates, of `size` heads of float32: softplus(x + bias) * -exp(log), with bias and
log one after the other as the other operand, and sigmoid(x)."""

_WORD = 8

Body = Callable[["_Row"], None]


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


class RowFunction:
    """A compiled function of rows, for one thread at a time, the one that calls torch."""

    def __init__(self, function: Function, eps: float = 0.0) -> None:
        self._function = function
        self._arguments = RowArguments(eps=eps)
        self._run = select_runner()

    def run(self, x: Tensor, output: Tensor, other: int, other_stride: int = 0) -> None:
        """Fill output, contiguous, from x [rows, ...], whose rows are contiguous; `other` is the address of
        another operand, and `other_stride` the bytes from row to row of it."""
        rows, arguments = x.shape[0], self._arguments
        arguments.counter, arguments.items, arguments.rows = 0, -(-rows // ROWS_AT_A_TIME), rows
        arguments.x, arguments.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
        arguments.other, arguments.other_stride = other, other_stride
        arguments.output, arguments.output_stride = output.data_ptr(), output.nbytes // max(1, rows)
        threads = torch.get_num_threads() if rows > ROWS_AT_A_TIME else 1
        self._run(self._function, ctypes.addressof(arguments), threads)


class CpuRMSNorm:
    """Root mean square normalisation with a weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._function = RowFunction(compile_rows("rms_norm", len(weight), ELEMENTS[weight.dtype]), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x [..., size]; the result is contiguous."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._function.run(rows, output, self._weight.data_ptr())
        return output

    def after_adding(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Add `added` [T, size] times `scale` to x [T, size] in place, and normalise that."""
        return self(x.add_(added if scale == 1 else added * scale))


class CpuGroupNorm:
    """Root mean square normalisation of each of some groups of numbers of a row, with a weight."""

    def __init__(self, weight: Tensor, groups: int, eps: float) -> None:
        self._weight = weight
        function = compile_rows("rms_norm_groups", groups, ELEMENTS[weight.dtype], len(weight) // groups)
        self._function = RowFunction(function, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [T, size], contiguous."""
        output = torch.empty_like(x)
        self._function.run(x, output, self._weight.data_ptr())
        return output


class CpuSoftplus:
    """Softplus of the sum of a row and a vector, float32."""

    def __init__(self, size: int) -> None:
        self._function = RowFunction(compile_rows("softplus", size, Element.FLOAT32))

    def __call__(self, x: Tensor, added: Tensor) -> Tensor:
        """Return log(1 + exp(x + added)), [T, size], for x [T, size], whose rows are contiguous, and added [size]."""
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._function.run(x, output, added.data_ptr())
        return output


class CpuSigmoidScale:
    """A row times sigmoid of one number, float32."""

    def __init__(self, size: int) -> None:
        self._function = RowFunction(compile_rows("sigmoid_scale", size, Element.FLOAT32))

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Multiply x [T, size], contiguous, in place with sigmoid of the first of each row of scores [T, 1 or more]."""
        self._function.run(x, x, scores.data_ptr(), scores.stride(0) * scores.element_size())
        return x


class CpuGate:
    """The gate of a feed-forward block: an activation of the first half of a row times the second half."""

    def __init__(self, size: int, dtype: torch.dtype, activation: Activation) -> None:
        self._size = size
        element = ELEMENTS[dtype]
        self._function = RowFunction(
            compile_rows(activation, size, element)
            if isinstance(activation, str)
            else compile_clamped_gate(size, element, activation)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, size] for x [T, 2 * size]."""
        x = x if x.stride(1) == 1 else x.contiguous()
        output = x.new_empty(x.shape[0], self._size)
        stride = x.stride(0) * x.element_size()
        self._function.run(x, output, x.data_ptr() + self._size * x.element_size(), stride)
        return output


class CpuPairGate:
    """A gate beside what it gates: an activation of one tensor's numbers times another's."""

    def __init__(self, size: int, dtype: torch.dtype, activation: str) -> None:
        self._function = RowFunction(compile_rows(activation, size, ELEMENTS[dtype]))

    def __call__(self, gate: Tensor, other: Tensor) -> Tensor:
        """Return [T, size] for gate and other [T, size]."""
        gate = gate if gate.stride(1) == 1 else gate.contiguous()
        other = other if other.stride(1) == 1 else other.contiguous()
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        self._function.run(gate, output, other.data_ptr(), other.stride(0) * other.element_size())
        return output


class CpuDeltaGates:
    """The two gates of the delta rule, float32."""

    def __init__(self, heads: int) -> None:
        self._decay, self._beta = (
            RowFunction(compile_rows(name, heads, Element.FLOAT32)) for name in DELTA_GATES
        )

    def __call__(self, step: Tensor, beta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return softplus(step + bias) * -exp(log), and sigmoid(beta), each [T, heads], for step and beta of that
        shape; `weights` [2, heads] are bias and log."""
        found = step.new_empty(2, *step.shape)
        self._decay.run(step, found[0], weights.data_ptr())
        self._beta.run(beta, found[1], weights.data_ptr())
        return found[0], found[1]


class CpuRotation:
    """Rotary position embedding of heads, in the half-split layout."""

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._function = RowFunction(compile_rows("rotate", heads, ELEMENTS[dtype], head_dim))

    def __call__(self, x: Tensor, angles: Tensor) -> Tensor:
        """Turn x [T, heads, head_dim] by angles [T, 2, head_dim], cosines before signed sines, contiguous."""
        if x.stride(1) != x.shape[2] or x.stride(2) != 1:
            x = x.contiguous()
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        stride = angles.stride(0) * angles.element_size()
        self._function.run(x, output, angles.data_ptr(), stride)
        return output


def supports_rows(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether there are functions for rows of `size` numbers, which is to be a multiple of 16."""
    return device.type == "cpu" and supports(dtype) and size % MAX_LANES == 0


@cache
def compile_rows(
    name: str, size: int, element: Element, head_dim: int = 0, *, picked: bool = False, turned: int = 0
) -> Function:
    """Compile a function of rows: "rms_norm", "add", "multiply", "divide", "softplus" (of the sum), "at_least", "at_most",
    "sigmoid_scale" (`x` times sigmoid of the first number of the other operand),
    `DELTA_GATES` or a gate, by the name of its activation, of rows of `size` numbers; "rotate", "rms_norm_heads",
    "rms_norm_every_other_head", "rms_norm_groups" (each with weights of its own) or "gate_every_other_head" of `size`
    heads.

    The other operand of row i is row i, too, or with `picked` row number `picks[i]`. Of every head the first `turned`
    numbers are turned (0: all), the others are copied. Where every other head is taken, `x` has twice the heads.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define, [name], name, size, element, head_dim, picked, turned)
    return function


@cache
def compile_clamped_gate(size: int, element: Element, clamp: tuple[float, float]) -> Function:
    """Compile the function of rows of `size` numbers that are a clamped gate's, with its alpha and limit.

    Raises:
        NBEngineError: LLVM has no code generator for this processor.
    """
    (function,) = compile_module(_define_clamped_gate, ["clamped_gate"], size, element, clamp)
    return function


def _define_clamped_gate(module: ir.Module, size: int, element: Element, clamp: tuple[float, float]) -> None:
    body = partial(_over_rows, partial(_each, size, gate_of(clamp)), element, False)
    define(module, "clamped_gate", 1, body, exported=True)


def _define(
    module: ir.Module, name: str, size: int, element: Element, head_dim: int, picked: bool, turned: int
) -> None:
    bodies: dict[str, Body] = {
        "rms_norm": partial(_rms_norm, size),
        "rms_norm_groups": partial(_over_groups, size, head_dim, partial(_rms_norm, head_dim)),
        "rms_norm_heads": partial(_over_heads, size, head_dim, 1, partial(_rms_norm, head_dim)),
        "rms_norm_every_other_head": partial(_over_heads, size, head_dim, 2, partial(_rms_norm, head_dim)),
        "gate_every_other_head": partial(_gate_heads, size, head_dim),
        "rotate": partial(_rotate, size, head_dim, turned or head_dim),
        DELTA_GATES[0]: partial(_decay, size),
        DELTA_GATES[1]: partial(_sigmoid, size),
        "sigmoid_scale": partial(_sigmoid_scale, size),
        "add": partial(_each, size, lambda _, x, other: x + other),
        "multiply": partial(_each, size, lambda _, x, other: x * other),
        "divide": partial(_each, size, lambda _, x, other: x / other),
        "softplus": partial(_each, size, lambda code, x, other: softplus(code, x + other)),
        # These keep what is no number.
        "at_least": partial(_each, size, lambda _, x, other: other.at_least(x)),
        "at_most": partial(_each, size, lambda _, x, other: other.at_most(x)),
        **{activation: partial(_each, size, gate) for activation, gate in GATES.items()},
    }
    define(module, name, 1, partial(_over_rows, bodies[name], element, picked), exported=True)


@dataclass(frozen=True)
class _Row:
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
            body(_Row(code, element, eps, x, other, get("output") + row * get("output_stride")))


def _rms_norm(size: int, row: _Row) -> None:
    code, end, step = row.code, row.code.integer(size * row.size), MAX_LANES * row.size
    total = code.accumulator(row.splat(0.0))
    with code.loop(0, end, step) as place:
        values = row.load(row.x + place)
        total.set(values.times_plus(values, total.get()))
    scale = rms_factor(code, total.get(), size, row.eps)
    with code.loop(0, end, step) as place:
        row.store(row.load(row.x + place) * scale * row.load(row.other + place), row.output + place)


def _over_heads(heads: int, head_dim: int, step: int, body: Body, row: _Row) -> None:
    """Do something to every `step`-th head; the other operand is the same for all."""
    with row.code.loop(0, row.code.integer(heads)) as head:
        at = head * (head_dim * row.size)
        body(replace(row, x=row.x + at * step, output=row.output + at))


def _over_groups(groups: int, group_size: int, body: Body, row: _Row) -> None:
    """Do something to each group of numbers with its part of the other operand."""
    with row.code.loop(0, row.code.integer(groups)) as group:
        at = group * (group_size * row.size)
        body(replace(row, x=row.x + at, other=row.other + at, output=row.output + at))


def _gate_heads(heads: int, head_dim: int, row: _Row) -> None:
    """Multiply each head of the other operand with sigmoid of every other head of `x`."""
    with row.code.loop(0, row.code.integer(heads)) as head:
        at = head * (head_dim * row.size)
        each = replace(row, x=row.x + at * 2, other=row.other + at, output=row.output + at)
        _each(head_dim, GATES["sigmoid"], each)


def _decay(heads: int, row: _Row) -> None:
    code = row.code
    for column, lanes in vectors_of(heads):
        at = column * row.size
        step = code.load(row.x + at, lanes) + code.load(row.other + at, lanes)
        rate = code.constant(0.0, lanes) - exp(code, code.load(row.other + (at + heads * row.size), lanes))
        code.store(softplus(code, step) * rate, row.output + at)


def _sigmoid(heads: int, row: _Row) -> None:
    for column, lanes in vectors_of(heads):
        at = column * row.size
        row.code.store(sigmoid(row.code, row.code.load(row.x + at, lanes)), row.output + at)


def _sigmoid_scale(size: int, row: _Row) -> None:
    scale = sigmoid(row.code, row.load(row.other, 1)).splat(MAX_LANES)
    with row.code.loop(0, row.code.integer(size * row.size), MAX_LANES * row.size) as place:
        row.store(row.load(row.x + place) * scale, row.output + place)


def _each(size: int, combine: Callable[[Code, Vector, Vector], Vector], row: _Row) -> None:
    whole = size // MAX_LANES * MAX_LANES
    with row.code.loop(0, row.code.integer(whole * row.size), MAX_LANES * row.size) as place:
        value = combine(row.code, row.load(row.x + place), row.load(row.other + place))
        row.store(value, row.output + place)
    for column, lanes in vectors_of(size - whole):
        at = (whole + column) * row.size
        value = combine(row.code, row.load(row.x + at, lanes), row.load(row.other + at, lanes))
        row.store(value, row.output + at)


def _rotate(heads: int, head_dim: int, turned: int, row: _Row) -> None:
    code, half = row.code, turned // 2 * row.size
    with code.loop(0, code.integer(heads)) as head:
        start = head * (head_dim * row.size)
        with code.loop(0, code.integer(half), MAX_LANES * row.size) as place:
            low, high = row.load(row.x + start + place), row.load(row.x + start + place + half)
            for own, partner, at in ((low, high, place), (high, low, place + half)):
                cos, sin = row.load(row.other + at), row.load(row.other + at + 2 * half)
                row.store(own * cos + partner * sin, row.output + start + at)
        if turned < head_dim:
            end = code.integer(head_dim * row.size)
            with code.loop(turned * row.size, end, MAX_LANES * row.size) as place:
                row.store(row.load(row.x + start + place), row.output + start + place)
