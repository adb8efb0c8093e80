"""The base of the parsers of reasoning: tags around it, at the beginning of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from nbengine.frontend.parsing.deltas import AnswerDelta, ReasoningDelta
from nbengine.frontend.parsing.markers import Markers

SPACES = " \t\r\n"


class ReasoningParser:
    """A parser that tells reasoning from the answer behind it, in a text that arrives in pieces.

    Reasoning stands at the very beginning, between one of the pairs of `tags`; anywhere else a tag is text.
    White space around the reasoning belongs to nothing.
    """

    tags: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The pairs of opening and closing tags."""
    answer_begins: ClassVar[tuple[str, ...]] = ()
    """Markers that may follow the reasoning and introduce the answer, to which they do not belong."""
    answer_ends: ClassVar[tuple[str, ...]] = ()
    """Markers that may stand at the end of an answer that has been introduced."""
    other_endings: ClassVar[tuple[str, ...]] = ()
    """Other forms of the closing tags, behind which the answer begins as well."""
    is_always_closed: ClassVar[bool] = False
    """True if every answer stands behind a closing tag, also where there was no reasoning."""
    ends_without_answer: ClassVar[tuple[str, ...]] = ()
    """Tokens that may end the output within reasoning, because a call stands there and no answer follows."""
    keeps_special_tokens: ClassVar[bool] = False
    """True if its markers may be special tokens, which a detokenizer leaves out unless told otherwise."""

    def __init__(self, *, prompt_opens_reasoning: bool = False) -> None:
        """Begin an answer, in the middle of its reasoning if the prompt has opened that."""
        self._openings = Markers.of(*(opening for opening, _ in self.tags))
        self._closings = Markers.of(*(closing for _, closing in self.tags))
        self._introductions = Markers.of(*self.answer_begins)
        self._ends = Markers.of(*self.answer_ends)
        self._text = ""
        self._spaces = ""
        """White space that is dropped unless more reasoning follows it."""
        self._has_reasoning = False
        self._is_opened_by_prompt = prompt_opens_reasoning
        self._is_introduced = False
        self._state: Callable[[list[AnswerDelta], bool], str | None] = self._at_start
        self.is_reasoning = prompt_opens_reasoning
        """True from the opening tag to the closing one."""
        self.is_done = False
        """True once all that follows is the answer, to the letter: it need not be fed any more."""

    @classmethod
    def markers(cls) -> frozenset[str]:
        """Return the markers of the family."""
        tags = [tag for pair in cls.tags for tag in pair]
        return frozenset((*tags, *cls.answer_begins, *cls.answer_ends))

    @classmethod
    def closing_marker(cls) -> str:
        """Return the marker with which reasoning ends."""
        return cls.tags[0][1]

    @classmethod
    def closing_text(cls) -> str:
        """Return the text that ends reasoning gracefully where it must be cut short."""
        return f"\n{cls.closing_marker()}\n\n"

    @classmethod
    def is_opened_by(cls, prompt: str) -> bool:
        """Tell whether the end of a prompt begins the reasoning."""
        ending = prompt[-256:].rstrip(SPACES)
        return any(ending.endswith(opening.rstrip(SPACES)) for opening, _ in cls.tags)

    def feed(self, text: str, out: list[AnswerDelta], *, final: bool = False) -> str:
        """Read the next piece, append the reasoning in it to `out` and return the answer in it."""
        self._text += text
        while (answer := self._state(out, final)) is None:
            pass
        return answer

    # Each state returns what is new of the answer, or None after it has chosen the next state.

    def _at_start(self, out: list[AnswerDelta], final: bool) -> str | None:
        del out
        text = self._text
        start = len(text) - len(text.lstrip(SPACES))
        match = self._openings.at(text, start)
        if not final and self._openings.may_begin_at(text, start):
            return ""
        if match is not None:
            self._text = text[match.end() :]
            self._closings = Markers.of(dict(self.tags)[match[0]])
            self.is_reasoning = True
        elif not self._is_opened_by_prompt:
            self.is_done = True
            self._state = self._in_answer
            return None
        self._state = self._in_reasoning
        return None

    def _in_reasoning(self, out: list[AnswerDelta], final: bool) -> str | None:
        text = self._text
        match = self._closings.find(text, 0, final=final)
        if match is None:
            held = len(text) if final else self._closings.held_from(text, 0)
            self._reasoning(text[:held], out)
            self._text = text[held:]
            return ""
        self._reasoning(text[: match.start()], out)
        self._text = text[match.end() :]
        self.is_reasoning = False
        self._state = self._behind_reasoning
        return None

    def _behind_reasoning(self, out: list[AnswerDelta], final: bool) -> str | None:
        """Skip white space, and a marker that introduces the answer."""
        del out
        text = self._text.lstrip(SPACES)
        match = self._introductions.at(text, 0)
        if match is not None:
            self._text = text[match.end() :]
            self._is_introduced = True
            self._state = self._behind_introduction
            return None
        if not final and self._introductions.may_begin_at(text, 0):
            self._text = text
            return ""
        self._text = text
        self.is_done = True
        self._state = self._in_answer
        return None

    def _behind_introduction(self, out: list[AnswerDelta], final: bool) -> str | None:
        del out
        self._text = self._text.lstrip(SPACES)
        if not self._text and not final:
            return ""
        self.is_done = not self.answer_ends
        self._state = self._in_answer
        return None

    def _in_answer(self, out: list[AnswerDelta], final: bool) -> str | None:
        del out
        text = self._text
        if self.is_done:
            self._text = ""
            return text
        place = 0
        while (match := self._ends.find(text, place, final=final)) is not None:
            if not text[match.end() :].strip(SPACES):
                # Only the end of the text shows that the marker is no part of the answer.
                self._text = "" if final else text[match.start() :]
                return text[: match.start()]
            place = match.end()
        held = len(text) if final else self._ends.held_from(text, place)
        self._text = text[held:]
        return text[:held]

    def _reasoning(self, text: str, out: list[AnswerDelta]) -> None:
        text = self._spaces + text
        if not self._has_reasoning:
            text = text.lstrip(SPACES)
        stripped = text.rstrip(SPACES)
        self._spaces = text[len(stripped) :]
        if stripped:
            self._has_reasoning = True
            out.append(ReasoningDelta(stripped))
