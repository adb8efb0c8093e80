"""The steps that a model may compute right behind a step of one token a request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOST_FURTHER_STEPS = 7
"""Steps that may follow at once."""


@dataclass(slots=True)
class FurtherSteps:
    """Steps that may follow a step of B requests at once, each with the tokens of the one before: of the largest logits,
    or drawn.

    The caller sets `most` and `has_draws`, the model `taken`. A request's blocks have room for all of its tokens. No step
    follows one after which some logit is not finite, some request's token is one of its ends or cannot be drawn here,
    or `stop` is not 0.
    """

    ends: Tensor
    """[rows, ends] int64, the tokens after which a request goes no further; -1: none. Requests have the first rows."""
    stop: Tensor
    """[1] int64: another thread may write 1, for the steps to end soon."""
    token_ids: Tensor
    """[steps, rows] int64: the tokens that were taken, step by step."""
    draws: Tensor
    """[rows, bytes] uint8: a `DRAW_ROW` for each request, with the random number of its first token; the model overwrites
    them."""
    ended_at: Tensor
    """[steps, 2] int64: seconds and nanoseconds of `time.time()` at the end of each step that another one has followed."""
    has_draws: bool = False
    """Some token is drawn."""
    most: int = 0
    """Most steps that may follow."""
    taken: int = 0
    """The steps that have followed."""
