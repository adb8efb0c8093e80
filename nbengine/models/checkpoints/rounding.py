"""This module rounds matrices to 8 or 4 bits a weight, in blocks of 32 neighbouring columns.

A block's numbers depend on its 32 values alone: all sums are made of operations on single numbers, in one
order, so that a rank that rounds its part of a matrix gets the bits that another gets of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.kernels.quantized import FORMATS, SPAN, Format, Levels

_FORMATS = {8: FORMATS["q8_0"], 4: FORMATS["q4_1"]}
_SEARCHED = (-1.0, -0.4, 0.4, 1.3)
"""The ranges that the search for the best scale tries: each is this many steps narrower than the block's
own, or wider."""
_LARGEST = 15.0


def rounded_format(bits: int) -> Format:
    """Return the format to which matrices are rounded."""
    return _FORMATS[bits]


def rounded(bits: int, matrix: Tensor) -> Levels:
    """Round a matrix [rows, columns], columns a multiple of 32, to `rounded_format(bits)`.

    A scale that float16 cannot hold, because a value is too large or not finite, is not finite.
    """
    rows = matrix.shape[0]
    blocks = matrix.reshape(-1, SPAN).t().contiguous().float()
    scales, minima, levels = _eight_bits(blocks) if bits == 8 else _four_bits(blocks)
    return Levels(
        levels.to(torch.uint8).t().reshape(matrix.shape),
        scales.half().view(rows, -1),
        None if minima is None else minima.half().view(rows, -1),
    )


def _eight_bits(blocks: Tensor) -> tuple[Tensor, None, Tensor]:
    """Round blocks [32, n] to multiples of a scale [n]; levels are the multiples plus 128."""
    scale = (blocks.abs().amax(0) / 127).half().float()
    levels = (blocks / _divisor(scale)).round_().clamp_(-128, 127)
    return scale, None, levels.add_(128)


def _four_bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round blocks [32, n] to 16 levels between a minimum and a maximum [n] each.

    Of several ranges, each fitted to the levels that it leads to by least squares, a block takes the one with
    the smallest sum of squared errors. The first is that from its smallest value to its largest.
    """
    low, high = blocks.amin(0), blocks.amax(0)
    mean = _sum(blocks) / SPAN
    best = _Fit(blocks, ((high - low) / _LARGEST).half(), low.half())
    for narrowed in _SEARCHED:
        step = (high - low) / (_LARGEST - narrowed)
        start = low + step * (narrowed / -2)
        levels = ((blocks - start) / _divisor(step)).round_().clamp_(0, _LARGEST)
        middle = _sum(levels) / SPAN
        levels -= middle
        spread = _sum(levels * levels)
        scale = _sum(levels * blocks) / _divisor(spread)
        best.take_better(_Fit(blocks, scale.half(), (mean - scale * middle).half()))
    return best.scale, best.minimum, best.levels


class _Fit:
    """The levels of blocks for a scale and a minimum in float16, and the squared errors."""

    def __init__(self, blocks: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.scale, self.minimum = scale.float(), minimum.float()
        self.levels = ((blocks - self.minimum) / _divisor(self.scale)).round_().clamp_(0, _LARGEST)
        errors = self.levels * self.scale
        errors += self.minimum
        errors -= blocks
        self.error = _sum(errors.square_())

    def take_better(self, other: _Fit) -> None:
        """Take over the blocks of which the other has smaller errors."""
        is_better = other.error < self.error
        for name in ("scale", "minimum", "levels", "error"):
            setattr(self, name, torch.where(is_better, getattr(other, name), getattr(self, name)))


def _divisor(scale: Tensor) -> Tensor:
    """Return the scale, or 1 where it is 0: all values of the block are 0, or as good as 0, then."""
    return torch.where(scale == 0, 1.0, scale)


def _sum(blocks: Tensor) -> Tensor:
    """Sum blocks [32, n] to [n], in an order that does not depend on n."""
    while len(blocks) > 1:
        half = len(blocks) // 2
        blocks = blocks[:half] + blocks[half:]
    return blocks[0]
