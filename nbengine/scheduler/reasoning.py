"""The course of a request's output from its reasoning to its answer, token by token."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence

from nbengine.ipc.reasoning import ReasoningTokens

Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of tokens, special ones included."""


class ReasoningPhase(enum.Enum):
    """The part of an output to which its next token belongs."""

    BEFORE = enum.auto()
    """Reasoning has not begun, and may begin here."""
    REASONING = enum.auto()
    CLOSING = enum.auto()
    """The budget of reasoning is spent, and its closing is being written."""
    GAP = enum.auto()
    """Reasoning has ended, and white space may precede the answer."""
    ANSWER = enum.auto()


class ReasoningTracker:
    """A tracker follows an output and knows where in it the answer begins.

    `budget` is the most tokens that reasoning may have between its opening and its closing, None for any
    number. `decode` is needed where `marks` has texts.
    """

    __slots__ = (
        "_budget",
        "_decode",
        "_marks",
        "_position",
        "_recent",
        "_sequences",
        "error",
        "num_reasoning_tokens",
        "phase",
        "rest",
    )

    def __init__(self, marks: ReasoningTokens, budget: int | None, decode: Decode | None = None) -> None:
        self._budget = budget
        self._decode = decode
        self._marks = marks
        # A token may be a single byte, and the one before them all may hold part of the first character.
        sizes = [len(text.encode()) + 1 for text in marks.ending_texts]
        self._recent: deque[int] = deque(
            maxlen=max([*sizes, *map(len, marks.endings), len(marks.closing), 1])
        )
        self._sequences = marks.openings
        """The openings, closings or gaps that go on with the tokens so far, `_position` of which have come."""
        self._position = 0
        self.num_reasoning_tokens = 0
        self.rest = ""
        """The beginning of the answer, where the token that has ended the reasoning has that, too."""
        self.error = ""
        """Says which token interrupted the closing, and was taken for more reasoning; empty until then."""
        self.phase = ReasoningPhase.BEFORE
        if not marks.openings:
            self._begin_reasoning()

    @property
    def next_tokens(self) -> list[int]:
        """Return the tokens with which an opening, a closing or a gap begins or goes on; empty elsewhere."""
        if self.phase in (ReasoningPhase.REASONING, ReasoningPhase.ANSWER):
            return []
        return [sequence[self._position] for sequence in self._sequences]

    def take(self, token_id: int) -> bool:
        """Advance by a token of the output, and return whether it belongs to the answer.

        A token that does not go on with an opening or a gap begins the answer; the tokens that looked like
        such a beginning are then part of the answer as well.
        """
        if self.phase is ReasoningPhase.ANSWER:
            return True
        if self.phase is ReasoningPhase.REASONING:
            self._take_reasoning(token_id)
            return False
        return not self._goes_on(token_id)

    def is_free(self, num_unknown: int) -> bool:
        """Tell whether no closing token is due behind `num_unknown` further tokens, whatever these are."""
        if self.phase is ReasoningPhase.CLOSING:
            return num_unknown >= len(self._sequences[0]) - self._position
        if self._budget is None or self.phase in (ReasoningPhase.GAP, ReasoningPhase.ANSWER):
            return True
        num_left = self._budget - self.num_reasoning_tokens
        if self.phase is ReasoningPhase.BEFORE:
            num_left += min(map(len, self._sequences)) - self._position
        return num_unknown < num_left

    def _begin_reasoning(self) -> None:
        self.phase = ReasoningPhase.REASONING
        self._close_if_spent()

    def _take_reasoning(self, token_id: int) -> None:
        self.num_reasoning_tokens += 1
        self._recent.append(token_id)
        if not self._has_ended():
            self._close_if_spent()
        elif self.rest or not self._marks.gaps:
            self.phase = ReasoningPhase.ANSWER
        else:
            self._expect(ReasoningPhase.GAP, self._marks.gaps)

    def _has_ended(self) -> bool:
        recent = list(self._recent)
        if any(recent[-len(ending) :] == ending for ending in self._marks.endings):
            return True
        if self._decode is not None and self._marks.ending_texts:
            text = self._decode(recent)
            for ending in self._marks.ending_texts:
                _, found, rest = text.partition(ending)
                if found:
                    self.rest = rest.lstrip()
                    return True
        return False

    def _close_if_spent(self) -> None:
        if self._budget is None or self.num_reasoning_tokens < self._budget:
            return
        closing, recent = self._marks.closing, list(self._recent)
        self._expect(ReasoningPhase.CLOSING, [closing])
        # The model may have begun the closing by itself.
        sizes = range(1, min(len(closing), len(recent) + 1))
        self._position = max((size for size in sizes if recent[-size:] == closing[:size]), default=0)

    def _expect(self, phase: ReasoningPhase, sequences: list[list[int]]) -> None:
        self.phase, self._sequences, self._position = phase, sequences, 0

    def _goes_on(self, token_id: int) -> bool:
        """Advance an opening, a closing or a gap; return False if the token is no part of it."""
        phase, position = self.phase, self._position
        going = [sequence for sequence in self._sequences if sequence[position : position + 1] == [token_id]]
        if not going and phase is ReasoningPhase.CLOSING:
            self.error = f"the token {token_id} came where the reasoning had to be closed"
            self.phase = ReasoningPhase.REASONING
            self._take_reasoning(token_id)
            return True
        if not going:
            self.phase = ReasoningPhase.ANSWER
            return False
        self._sequences, self._position = going, position + 1
        if any(len(sequence) == position + 1 for sequence in going):
            if phase is ReasoningPhase.BEFORE:
                self._begin_reasoning()
            else:
                self.phase = ReasoningPhase.ANSWER
        return True
