"""The trials of functions of rows: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.product_trials import ACTIVATIONS, activated
from nbengine.kernels.cpu.row_functions import DELTA_GATES, RowArguments
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers

_ROWS = 3
EPS = 1e-5
_ERROR = 2e-5
"""The error of what is computed in float32, as a part of results and of the largest one."""


@dataclass(frozen=True)
class _Sizes:
    """The numbers that a function of rows was compiled for, and its other operand's: those of a row."""

    size: int
    head_dim: int = 0
    turned: int = 0

    @property
    def heads(self) -> int:
        return self.size * self.head_dim


@dataclass(frozen=True)
class _Rows:
    """A kind of function: the numbers of a row of x and of the other operand, and what it makes of them."""

    x: Callable[[_Sizes], int]
    other: Callable[[_Sizes], int]
    function: Callable[[Tensor, Tensor, _Sizes], Tensor]


def other_halves(x: Tensor) -> Tensor:
    """Return the numbers with which those of a head turn, if halves turn together."""
    return x.roll(x.shape[-1] // 2, -1)


def neighbours(x: Tensor) -> Tensor:
    """Return the numbers with which those of a head turn, if neighbours turn together."""
    return x.unfold(-1, 2, 2).flip(-1).flatten(-2)


def turned(x: Tensor, angles: Tensor, partners: Callable[[Tensor], Tensor]) -> Tensor:
    """Turn heads [T, heads, n] by angles [T, 2 n], cosines before signed sines."""
    cos, sin = angles.view(len(x), 2, 1, -1).unbind(1)
    return x * cos + partners(x) * sin


def _norm(x: Tensor, weight: Tensor, _sizes: _Sizes) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _norm_of_heads(x: Tensor, weight: Tensor, sizes: _Sizes) -> Tensor:
    heads = x.view(len(x), -1, sizes.head_dim)
    return _norm(heads, weight.view(len(x), -1, sizes.head_dim), sizes).flatten(1)


def _every_other(x: Tensor, sizes: _Sizes) -> Tensor:
    return x.view(len(x), -1, 2, sizes.head_dim)[:, :, 0].flatten(1)


def _turn(x: Tensor, angles: Tensor, sizes: _Sizes, partners: Callable[[Tensor], Tensor]) -> Tensor:
    count = sizes.turned or sizes.head_dim
    heads = x.view(len(x), -1, sizes.head_dim).clone()
    heads[..., :count] = turned(heads[..., :count], angles, partners)
    return heads.flatten(1)


def _decay(x: Tensor, other: Tensor, _sizes: _Sizes) -> Tensor:
    bias, log = other.chunk(2, 1)
    return F.softplus(x + bias, threshold=1e9) * -log.exp()


def _same(function: Callable[[Tensor, Tensor], Tensor]) -> _Rows:
    return _Rows(lambda s: s.size, lambda s: s.size, lambda x, other, _: function(x, other))


_KINDS: Mapping[str, _Rows] = {
    "rms_norm": _Rows(lambda s: s.size, lambda s: s.size, _norm),
    "rms_norm_groups": _Rows(lambda s: s.heads, lambda s: s.heads, _norm_of_heads),
    "rms_norm_heads": _Rows(lambda s: s.heads, lambda s: s.head_dim, _norm_of_heads),
    "rms_norm_every_other_head": _Rows(
        lambda s: 2 * s.heads,
        lambda s: s.head_dim,
        lambda x, weight, s: _norm_of_heads(_every_other(x, s), weight, s),
    ),
    "gate_every_other_head": _Rows(
        lambda s: 2 * s.heads, lambda s: s.heads, lambda x, other, s: _every_other(x, s).sigmoid() * other
    ),
    "rotate": _Rows(
        lambda s: s.heads,
        lambda s: 2 * (s.turned or s.head_dim),
        lambda x, angles, s: _turn(x, angles, s, other_halves),
    ),
    "rotate_pairs": _Rows(
        lambda s: s.heads,
        lambda s: 2 * (s.turned or s.head_dim),
        lambda x, angles, s: _turn(x, angles, s, neighbours),
    ),
    DELTA_GATES[0]: _Rows(lambda s: s.size, lambda s: 2 * s.size, _decay),
    DELTA_GATES[1]: _same(lambda x, _: x.sigmoid()),
    "scale": _Rows(lambda s: s.size, lambda _: 1, lambda x, other, _: x * other),
    "sigmoid_scale": _Rows(lambda s: s.size, lambda _: 1, lambda x, other, _: x * other.sigmoid()),
    "add": _same(torch.add),
    "multiply": _same(torch.mul),
    "divide": _same(torch.div),
    "softplus": _same(lambda x, other: F.softplus(x + other, threshold=1e9)),
    "soft_cap": _same(lambda x, other: (x / other).tanh() * other),
    "at_least": _same(torch.maximum),
    "at_most": _same(torch.minimum),
    **{name: _same(gate) for name, gate in ACTIVATIONS.items()},
}
"""The functions of `nbengine.kernels.cpu.row_functions.compile_rows` in torch."""


def try_rows(
    functions: Sequence[Function],
    name: str,
    size: int,
    element: Element,
    head_dim: int,
    picked: bool,
    turned: int,
) -> Trial:
    """Try a function of rows."""
    return (yield from _try(functions[0], _KINDS[name], _Sizes(size, head_dim, turned), element, picked))


def try_clamped_gate(
    functions: Sequence[Function], size: int, element: Element, clamp: tuple[float, float]
) -> Trial:
    """Try the function of a clamped gate."""
    kind = _same(lambda x, other: activated(clamp, x, other))
    return (yield from _try(functions[0], kind, _Sizes(size), element, picked=False))


def _try(function: Function, kind: _Rows, sizes: _Sizes, element: Element, picked: bool) -> Trial:
    dtype = TYPES[element]
    x = random_numbers(_ROWS, kind.x(sizes), dtype=dtype, seed=1)
    # None of them is near 0: they are divisors, too.
    other = random_numbers(_ROWS, kind.other(sizes), seed=2)
    other = (other + other.sign() / 2).to(dtype)
    picks = torch.tensor([2, 0, 1], dtype=torch.int64)
    expected = kind.function(x.double(), (other[picks] if picked else other).double(), sizes)
    output = poisoned(expected.shape, dtype)
    arguments = RowArguments(
        items=1,
        rows=_ROWS,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        other=other.data_ptr(),
        other_stride=other.stride(0) * other.element_size(),
        picks=picks.data_ptr(),
        output=output.data_ptr(),
        output_stride=output.stride(0) * output.element_size(),
        eps=EPS,
    )
    yield [(function, arguments)]
    return is_near(output, expected, (expected.abs() + expected.abs().max()) * _ERROR)
