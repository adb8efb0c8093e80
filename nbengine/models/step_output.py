"""The outcome of a decoder's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outcome for T tokens."""

    hidden: Tensor
    """[T, hidden]"""
    logits: Tensor | None = None
    """[T, vocabulary], where they were computed with the hidden states."""
    largest: tuple[Tensor, Tensor] | None = None
    """The place of the largest logit of each token, the first of equals, int64 [T], and that logit, float32 [T];
    None: they have not been looked for, or some logit is not finite."""
