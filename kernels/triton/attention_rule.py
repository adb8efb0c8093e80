"""This module brings a layer's options into the Triton kernels: what a query sees, soft caps, sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.attention_options import AttentionOptions

_LOG2_E = math.log2(math.e)
NO_SPAN, WINDOW, CHUNK = range(3)
"""The values of `SPAN`, which says what a query sees of the tokens before it."""
_WINDOW, _CHUNK = tl.constexpr(WINDOW), tl.constexpr(CHUNK)


@dataclass(frozen=True)
class Rule:
    """A layer's options as the kernels take them: what is compiled in, and numbers."""

    span_kind: int
    span: int
    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, options: AttentionOptions, num_heads: int) -> Rule:
        """Translate the options of a layer with `num_heads` query heads.

        Raises:
            InvalidArgumentError: there is not one sink for each head.
        """
        kind = NO_SPAN if options.span is None else CHUNK if options.window is None else WINDOW
        sinks = options.sinks
        if sinks is not None and sinks.shape[0] != num_heads:
            raise InvalidArgumentError("sinks", tuple(sinks.shape), f"[{num_heads}], one for each head")
        cap = options.soft_cap
        return cls(
            kind,
            options.span or 0,
            options.scale * _LOG2_E if cap is None else options.scale / cap,
            None if cap is None else cap * _LOG2_E,
            None if sinks is None else sinks.float().contiguous(),
        )

    def most_tokens(self, max_seq_len: int, tokens: int) -> int:
        """Return the most tokens between the first tile of `tokens` that a query reads of and the query's own."""
        return max_seq_len if self.span_kind == NO_SPAN else min(max_seq_len, self.span + tokens - 1)


@triton.jit
def first_seen(position, span, SPAN: tl.constexpr):
    """The first token that a query at `position` sees, for a number or a vector of them."""
    if SPAN == _WINDOW:
        return tl.maximum(position + 1 - span, position * 0)
    if SPAN == _CHUNK:
        return position // span * span
    return position * 0


@triton.jit
def tanh(x):
    """The hyperbolic tangent: a series where 1 - exp(-2 |x|) would lose digits."""
    square = x * x
    series = 62.0 / 2835
    series = series * square - 17.0 / 315
    series = series * square + 2.0 / 15
    series = series * square - 1.0 / 3
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - power) / (1.0 + power)
    large = tl.where(x < 0, -size, size)
    return tl.where(tl.abs(x) < 0.3, x + x * square * series, large)
