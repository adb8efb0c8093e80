"""The figures of an engine core's requests since its start."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import msgspec

from nbengine.metrics.histograms import Histogram, Seconds, Tokens

FINISHED_REASONS = ("stop", "length", "abort", "error")
"""The reasons for which requests end, in the order of `nbengine.ipc.messages.FinishReason`."""


class RequestStats(msgspec.Struct, array_like=True, gc=False):
    """The ends of requests by reason, and histograms of what requests took; everything only grows.

    Times begin when the engine core has read a request, and end when it has a token, not when the client has
    it. A request that another engine core takes over has not ended; each of `n` completions is a request.
    """

    finished: list[int] = msgspec.field(default_factory=lambda: [0] * len(FINISHED_REASONS))
    """Requests that have ended, by `FINISHED_REASONS`. One that its client ends counts as "abort", except where
    the client has found a stop string."""
    time_to_first_token: Seconds = msgspec.field(default_factory=Seconds)
    """From the arrival of a request to its first token."""
    inter_token_latency: Seconds = msgspec.field(default_factory=Seconds)
    """Between two tokens: when a request ends, its mean counts once for each of its tokens but the first."""
    e2e_latency: Seconds = msgspec.field(default_factory=Seconds)
    """From the arrival of a request to its end."""
    queue_time: Seconds = msgspec.field(default_factory=Seconds)
    """From the arrival of a request to the first step that it is part of."""
    prefill_time: Seconds = msgspec.field(default_factory=Seconds)
    """From there to its first token, or to the result of a pooling request."""
    decode_time: Seconds = msgspec.field(default_factory=Seconds)
    """From the first token of a request to its end."""
    prompt_tokens: Tokens = msgspec.field(default_factory=Tokens)
    """Prompts of requests that have ended."""
    generation_tokens: Tokens = msgspec.field(default_factory=Tokens)
    """Outputs of requests that have ended; pooling requests have none."""

    @property
    def num_finished(self) -> int:
        """Return the number of requests that have ended."""
        return sum(self.finished)

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "finished"}

    def copy(self) -> RequestStats:
        """Return a copy that later requests leave alone."""
        return _made_of(self.finished.copy(), [h.copy() for h in self.histograms().values()])

    def plus(self, other: RequestStats) -> RequestStats:
        """Return the figures of the requests of both, of two engine cores for instance."""
        finished = [a + b for a, b in zip(self.finished, other.finished, strict=True)]
        theirs = other.histograms()
        return _made_of(finished, [h.plus(theirs[name]) for name, h in self.histograms().items()])

    def since(self, earlier: RequestStats) -> RequestStats:
        """Return the figures of what has happened since an earlier state of the same engine core.

        If the engine core was started again in between, so that it counts from 0, this is everything since
        that start.
        """
        theirs = earlier.histograms()
        mine = self.histograms()
        began_again = self.num_finished < earlier.num_finished or any(
            h.count < theirs[name].count for name, h in mine.items()
        )
        if began_again:
            return self.copy()
        finished = [a - b for a, b in zip(self.finished, earlier.finished, strict=True)]
        return _made_of(finished, [h.minus(theirs[name]) for name, h in mine.items()])


def _made_of(finished: list[int], histograms: Iterable[Any]) -> RequestStats:
    return RequestStats(finished, *histograms)


def added_up(parts: Iterable[RequestStats | None]) -> RequestStats:
    """Add up the figures of several engine cores; None stands for one that has told nothing yet."""
    return reduce(RequestStats.plus, [part for part in parts if part is not None], RequestStats())
