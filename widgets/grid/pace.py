"""The pace of the answers of a comparison, and the time that is left: arithmetic on times that are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_SECONDS = 3.0


@dataclass(frozen=True)
class AnswerCount:
    """The number of tokens of one answer, and the limit of that number (None: unknown)."""

    tokens: int
    limit: int | None
    ended: bool


@dataclass
class AnswerTotals:
    """The sums over answers that have ended: their tokens, and how many ended before their limit."""

    tokens: int = 0
    num_short: int = 0

    def add(self, answer: AnswerCount) -> None:
        """Add an answer that has ended."""
        self.tokens += answer.tokens
        self.num_short += answer.tokens != answer.limit


class Pace:
    """The tokens per second of the last seconds, and from it an estimate of the time left."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def take(self, now: float, tokens: int) -> None:
        """Note that all answers together have `tokens` tokens at `now` (seconds)."""
        self._points.append((now, tokens))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_SECONDS:
            self._points.popleft()

    @property
    def rate(self) -> float | None:
        """Return the tokens per second; None before there are two points to compare."""
        if len(self._points) < 2:
            return None
        (start, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - start) if after > before and end > start else None

    def seconds_left(
        self, answers: Iterable[AnswerCount], ended_before: AnswerTotals | None = None
    ) -> tuple[float, bool] | None:
        """Estimate the seconds left at this pace; True if it is a guess from the answers that have ended.

        Otherwise it is an upper bound: every answer might go up to its limit. `ended_before` sums up answers that
        have ended and are not among `answers`.
        """
        rate, counts = self.rate, list(answers)
        before = ended_before or AnswerTotals()
        if rate is None:
            return None
        # The chance that the next token is an answer's last one comes from all tokens so far: short answers
        # end first, so the mean length of the ended ones would be too small.
        ended = before.num_short + sum(answer.ended and answer.tokens != answer.limit for answer in counts)
        expected = (before.tokens + sum(answer.tokens for answer in counts)) / ended if ended else None
        remaining = 0.0
        for answer in counts:
            if answer.ended:
                continue
            bounds = [expected, None if answer.limit is None else answer.limit - answer.tokens]
            known = [bound for bound in bounds if bound is not None]
            if not known:
                return None
            remaining += min(known)
        return remaining / rate, ended > 0
