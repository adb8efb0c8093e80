"""The options of a layer's attention: which keys its queries see, and what is done to their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from nbengine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", int, NDArray[np.int32], "Tensor")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The options of one layer's causal attention; without any but `scale`, a query sees all keys up to its own.

    The score of a query and a key is their product times `scale`. `soft_cap` comes first, then the rule (`window`
    or `chunk`) hides scores, and `sinks` join the softmax as they are.

    Raises:
        InvalidArgumentError: a number is out of its range, or there are both a window and chunks.
    """

    scale: float
    window: int | None = None
    """A query at position p sees keys at positions k with p - window < k <= p."""
    chunk: int | None = None
    """A query at position p sees keys at positions k <= p with k // chunk == p // chunk."""
    soft_cap: float | None = None
    """A score s becomes soft_cap * tanh(s / soft_cap)."""
    sinks: Tensor | None = None
    """[num_heads], floating point: one more score a head, whose weight goes to no value."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InvalidArgumentError("scale", self.scale, "finite")
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise InvalidArgumentError(name, size, "at least 1 token, or None")
        if self.window is not None and self.chunk is not None:
            raise InvalidArgumentError("window, chunk", (self.window, self.chunk), "None, one of them")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise InvalidArgumentError("soft_cap", self.soft_cap, "above 0 and finite, or None")
        if self.sinks is not None and not (self.sinks.dim() == 1 and self.sinks.is_floating_point()):
            found = (tuple(self.sinks.shape), self.sinks.dtype)
            raise InvalidArgumentError("sinks", found, "[num_heads], floating point")

    @property
    def is_plain(self) -> bool:
        """Return whether there is nothing but a scale."""
        return self.span is None and self.soft_cap is None and self.sinks is None

    @property
    def span(self) -> int | None:
        """Return the most tokens that a query sees; None: all before it."""
        return self.chunk if self.window is None else self.window

    def first_seen(self, position: Positions) -> Positions:
        """Return the position of the first key that a query at `position` sees, for a number or an array."""
        if self.window is not None:
            return (position + 1 - self.window) * (position + 1 > self.window)
        return position // self.chunk * self.chunk if self.chunk is not None else position * 0
