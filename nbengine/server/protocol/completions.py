"""The body of `POST /v1/completions`, and what it is answered with."""

from __future__ import annotations

from nbengine.server.protocol.fields import SamplingFields


class CompletionRequest(SamplingFields, kw_only=True):
    """The body: `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
