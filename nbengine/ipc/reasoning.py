"""The part of a request that says where reasoning begins and ends, in the tokens of its model."""

from __future__ import annotations

import msgspec


class ReasoningTokens(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The tokens between which a request's output is reasoning; the answer follows it.

    Reasoning ends with any of `endings` or `ending_texts`, one of which there must be.
    """

    openings: list[list[int]] = []
    """Each may begin the output, and then begins its reasoning; without any, the prompt has begun it."""
    endings: list[list[int]] = []
    ending_texts: list[str] = []
    """Texts that are no fixed tokens, because the model may join their characters with those around them."""
    closing: list[int] = []
    """The tokens that end reasoning whose budget is spent; the answer comes behind them."""
    gaps: list[list[int]] = []
    """White space, each of which may stand between reasoning and an answer that follows a grammar."""
    final_token_ids: list[int] = []
    """End tokens that may end the output within its reasoning, also where a grammar waits for the answer."""
    num_written: int = 0
    """Tokens at the prompt's end that are the beginning of the output, which goes on from its middle."""
