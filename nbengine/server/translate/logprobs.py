"""Log probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbengine.outputs import Logprob

LEAST = -9999.0
"""The log probability of what cannot come; JSON has no infinity."""

Entry = Mapping[int, Logprob]


def chat_logprobs(entries: Iterable[Entry], top: int) -> list[dict[str, Any]]:
    """Return the `content` of a choice's `logprobs`: for each token itself, and the `top` likeliest."""
    return [
        {**_token(next(iter(entry.values()))), "top_logprobs": _likeliest(entry, top)} for entry in entries
    ]


class CompletionLogprobs:
    """The `logprobs` of one choice of `/v1/completions`; the place in the text goes on from part to part."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def part(self, entries: Sequence[Entry | None], texts: Sequence[str | None] = ()) -> dict[str, Any]:
        """Return the object for further tokens; None stands for the first of a prompt, whose text is in
        `texts`."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position, entry in enumerate(entries):
            own = None if entry is None else next(iter(entry.values()))
            text = (texts[position] if own is None else own.decoded_token) or ""
            tokens.append(text)
            values.append(None if own is None else _finite(own.logprob))
            tops.append(None if entry is None else self._tops(entry))
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _tops(self, entry: Entry) -> dict[str, float]:
        # OpenAI's object has the token itself, too, so that it may have one more than was asked for.
        return {
            logprob.decoded_token or "": _finite(logprob.logprob) for logprob in list(entry.values())[::-1]
        }


def _likeliest(entry: Entry, top: int) -> list[dict[str, Any]]:
    ranked = [logprob for logprob in entry.values() if logprob.rank is not None and logprob.rank <= top]
    return [_token(logprob) for logprob in sorted(ranked, key=lambda logprob: logprob.rank or 0)]


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode(errors="replace"))}


def _finite(value: float) -> float:
    return max(value, LEAST) if not math.isnan(value) else LEAST
