"""The small functions between a layer's products in Triton, each a pass over rows.

They compute in float32 and round once. torch composes them of up to four operations, and in a step with few rows each
takes about as long as one of these kernels does.

The shape of a program follows from the size of a row, never from the number of rows: a row has the same bits alone and
among others. A function is compiled when it is made, by running once on zeros.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid")
"""The activations of gates, as in `nbengine.kernels.cpu.vectors.GATES`."""
MAX_ROW = 16384
"""The largest row that is normalised: a program holds one in registers."""

_NORM_TILE = 1024
_GATE_COLUMNS = 1024
_ROTATION_TILE = 512
"""The numbers that a program takes at a time: as many rows or heads as fit in, and one at least."""
_NUMBERS_PER_WARP = 256
_MAX_WARPS = 16


@triton.jit(do_not_specialize=["rows", "heads"])
def rms_norm_kernel(
    output,
    x,
    added,
    weight,
    rows,
    heads,
    token_stride,
    head_stride,
    added_stride,
    scale,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Normalise ROWS of the rows [tokens, heads, SIZE] of x; WIDTH is the power of two above SIZE. If ADD, x gets the
    rows of `added` times `scale` before."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < SIZE)
    token, head = (row // heads).to(tl.int64), row % heads
    place = x + (token * token_stride + head * head_stride)[:, None] + column
    values = tl.load(place, mask=inside, other=0.0)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(added + (token * added_stride)[:, None] + column, mask=inside, other=0.0)
        # What is normalised is what others read of x: the rounded sum.
        values = (values.to(tl.float32) + more.to(tl.float32) * scale).to(values.dtype)
        tl.store(place, values, mask=inside)
    numbers = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / SIZE + eps)
    result = numbers * factor[:, None] * weights
    target = output + row.to(tl.int64)[:, None] * SIZE + column
    tl.store(target, result.to(output.dtype.element_ty), mask=inside)


def norm_shape(size: int) -> tuple[dict[str, int], int]:
    """Return the constants of a program that normalises rows of `size` numbers, and its warps."""
    width = triton.next_power_of_2(size)
    rows = max(1, _NORM_TILE // width)
    return {"SIZE": size, "WIDTH": width, "ROWS": rows}, min(_MAX_WARPS, rows * width // _NUMBERS_PER_WARP)


class TritonRMSNorm:
    """Root mean square normalisation of rows of type `dtype` with a weight of that type, or of float32."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._eps = eps
        self._size = size = len(weight)
        constants, warps = norm_shape(size)
        self._rows = constants["ROWS"]
        self._options = {**constants, "num_warps": warps, "enable_fp_fusion": True}
        zeros = torch.zeros((1, size), dtype=dtype, device=weight.device)
        self.after_adding(zeros, self(zeros), 1.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x [..., size]; the result is contiguous."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.dim() == 3:
            tokens, heads, _ = x.shape
            strides = x.stride(0), x.stride(1)
        else:
            x = x.reshape(-1, self._size)
            tokens, heads = x.shape[0], 1
            strides = x.stride(0), 0
        self._launch(output, x, x, tokens * heads, heads, *strides, 0, 0.0, add=False)
        return output

    def after_adding(self, x: torch.Tensor, added: torch.Tensor, scale: float) -> torch.Tensor:
        """Add `added` [T, size] times `scale` to x [T, size] in place, and normalise that; the result is contiguous.
        The rows of x are contiguous."""
        if added.stride(1) != 1:
            added = added.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        strides = x.stride(0), 0, added.stride(0)
        # A whole number would be compiled in.
        self._launch(output, x, added, x.shape[0], 1, *strides, float(scale), add=True)
        return output

    def _launch(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        added: torch.Tensor,
        rows: int,
        heads: int,
        token_stride: int,
        head_stride: int,
        added_stride: int,
        scale: float,
        *,
        add: bool,
    ) -> None:
        rms_norm_kernel[(-(-rows // self._rows),)](
            output,
            x,
            added,
            self._weight,
            rows,
            heads,
            token_stride,
            head_stride,
            added_stride,
            scale,
            self._eps,
            ADD=add,
            **self._options,
        )


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), from a power that cannot overflow."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1.0 + power)


@triton.jit
def gate_kernel(
    output,
    gate,
    other,
    gate_stride,
    other_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiply the activation of a row of `gate` with SIZE numbers of a row of `other`, from its number OFFSET on, on the
    grid (rows, blocks of COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(other + (row * other_stride + OFFSET) + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y), which loses no digits where it is small; 2 y is 2 sqrt(2 / pi) (x + 0.044715
        # x**3).
        passed = x * _sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
    elif ACTIVATION == "silu":
        passed = x * _sigmoid(x)
    else:
        passed = _sigmoid(x)
    tl.store(output + row * SIZE + column, (passed * factor).to(output.dtype.element_ty), mask=inside)


class TritonPairGate:
    """A gate beside what it gates: an activation of one tensor's numbers times another's."""

    def __init__(self, size: int, dtype: torch.dtype, activation: str, device: torch.device) -> None:
        self._gating = _Gating(size, activation, 0)
        zeros = torch.zeros((1, size), dtype=dtype, device=device)
        self(zeros, zeros)

    def __call__(self, gate: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return [T, size] for gate and other [T, size]."""
        return self._gating.run(_with_rows(gate), _with_rows(other))


class TritonGate:
    """The gate of a feed-forward block: an activation of the first half of a row times the second half."""

    def __init__(self, size: int, dtype: torch.dtype, activation: str, device: torch.device) -> None:
        self._gating = _Gating(size, activation, size)
        self(torch.zeros((1, 2 * size), dtype=dtype, device=device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, size] for x [T, 2 * size]."""
        x = _with_rows(x)
        return self._gating.run(x, x)


class _Gating:
    """The launches of gates of `size` numbers; those to multiply with begin at number `offset` of a row."""

    def __init__(self, size: int, activation: str, offset: int) -> None:
        self._size = size
        columns = min(_GATE_COLUMNS, triton.next_power_of_2(size))
        self._blocks = triton.cdiv(size, columns)
        self._options = {
            "SIZE": size,
            "COLUMNS": columns,
            "OFFSET": offset,
            "ACTIVATION": activation,
            "enable_fp_fusion": True,
        }

    def run(self, gate: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        tokens = gate.shape[0]
        output = torch.empty((tokens, self._size), dtype=gate.dtype, device=gate.device)
        strides = gate.stride(0), other.stride(0)
        gate_kernel[(tokens, self._blocks)](output, gate, other, *strides, **self._options)
        return output


@triton.jit
def rotate_kernel(
    output,
    x,
    angles,
    token_stride,
    head_stride,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn ROWS heads of a token, each of 2 * HALF numbers, on the grid (tokens, blocks of heads); WIDTH is the power of
    two above HALF."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    present = column < HALF
    inside = (head < HEADS) & present
    place = x + (token * token_stride + head * head_stride) + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = angles + token * angle_stride + column
    low_cos = tl.load(angle, mask=present, other=0.0).to(tl.float32)
    high_cos = tl.load(angle + HALF, mask=present, other=0.0).to(tl.float32)
    low_sin = tl.load(angle + 2 * HALF, mask=present, other=0.0).to(tl.float32)
    high_sin = tl.load(angle + 3 * HALF, mask=present, other=0.0).to(tl.float32)
    target = output + (token * HEADS + head) * (2 * HALF) + column
    low_turned = low * low_cos + high * low_sin
    high_turned = high * high_cos + low * high_sin
    tl.store(target, low_turned.to(output.dtype.element_ty), mask=inside)
    tl.store(target + HALF, high_turned.to(output.dtype.element_ty), mask=inside)


class TritonRotation:
    """Rotary position embedding of heads, in the half-split layout."""

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        half = head_dim // 2
        width = triton.next_power_of_2(half)
        rows = min(max(1, _ROTATION_TILE // width), triton.next_power_of_2(heads))
        self._blocks = triton.cdiv(heads, rows)
        self._options = {
            "HEADS": heads,
            "HALF": half,
            "WIDTH": width,
            "ROWS": rows,
            "enable_fp_fusion": True,
        }
        zeros = torch.zeros((1, heads + 1, head_dim), dtype=dtype, device=device)
        self(zeros[:, :heads], zeros.new_zeros(1, 2, 1, head_dim))

    def __call__(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Turn x [T, heads, head_dim] by angles [T, 2, (1,) head_dim], cosines before signed sines, contiguous."""
        if x.stride(2) != 1:
            x = x.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        strides = x.stride(0), x.stride(1), angles.stride(0)
        rotate_kernel[(x.shape[0], self._blocks)](output, x, angles, *strides, **self._options)
        return output


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous()
