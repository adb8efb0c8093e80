"""The compiled functions of rows as functions of tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.row_functions import (
    DELTA_GATES,
    ROWS_AT_A_TIME,
    RowArguments,
    compile_clamped_gate,
    compile_rows,
)
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.vectors import UNGATED, Activation


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


class CpuSoftCap:
    """Numbers of rows as they approach a cap, float32."""

    def __init__(self, size: int, cap: float) -> None:
        self._caps = torch.full((size,), cap, dtype=torch.float32)
        self._function = RowFunction(compile_rows("soft_cap", size, Element.FLOAT32))

    def __call__(self, x: Tensor) -> Tensor:
        """Return cap * tanh(x / cap) in the place of x [T, size], whose rows are contiguous."""
        self._function.run(x, x, self._caps.data_ptr())
        return x


class CpuSigmoidScale:
    """A row times sigmoid of one number, float32."""

    def __init__(self, size: int) -> None:
        self._function = RowFunction(compile_rows("sigmoid_scale", size, Element.FLOAT32))

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Multiply x [T, size], contiguous, in place with sigmoid of the first of each row of scores [T, 1 or more]."""
        self._function.run(x, x, scores.data_ptr(), scores.stride(0) * scores.element_size())
        return x


class CpuGate:
    """The gate of a feed-forward block: an activation of the first half of a row times the second half, or of a row
    that has no other half."""

    def __init__(self, size: int, dtype: torch.dtype, activation: Activation) -> None:
        self._size = size
        self._second = 0 if activation in UNGATED else size
        element = ELEMENTS[dtype]
        self._function = RowFunction(
            compile_rows(activation, size, element)
            if isinstance(activation, str)
            else compile_clamped_gate(size, element, activation)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, size] for x [T, 2 * size], or for x [T, size] without another half."""
        x = x if x.stride(1) == 1 else x.contiguous()
        output = x.new_empty(x.shape[0], self._size)
        stride = x.stride(0) * x.element_size()
        self._function.run(x, output, x.data_ptr() + self._second * x.element_size(), stride)
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
