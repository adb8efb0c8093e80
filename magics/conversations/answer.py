"""An answer as `%%chat` shows it: its text, and the reasoning before it, also while both are being written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbengine.frontend.parsing.answer_parser import AnswerReading, ParsedAnswer
from nbengine.frontend.parsing.formats import TAGS, AnswerFormat
from nbengine.frontend.parsing.reading import answer_of

_ANY_TAGS = AnswerFormat(TAGS)
"""The format of models whose chat template says nothing of reasoning."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's text: its answer and the reasoning before it; `is_reasoning` while that reasoning goes on.

    `calling` is the name of the tool whose call is being written.
    """

    text: str
    reasoning: str = ""
    is_reasoning: bool = False
    calling: str = ""


def reading_of(prompt: Mapping[str, Any]) -> AnswerReading:
    """Return how the answer to a rendered prompt is to be read."""
    reading = answer_of(prompt) or AnswerReading(AnswerFormat())
    if reading.format.reasoning is not None:
        return reading
    opens = _ANY_TAGS.is_opened_by(str(prompt.get("prompt", "")))
    return replace(
        reading,
        format=replace(reading.format, reasoning=_ANY_TAGS.reasoning),
        prompt_opens_reasoning=opens,
    )


def answer_in(text: str, reading: AnswerReading, *, complete: bool = True) -> Answer:
    """Divide the text that a model has written so far; unless it is complete, what may be the beginning of
    a tag is held back."""
    parser = reading.parser()
    found = ParsedAnswer(parser.feed(text))
    if complete:
        found.add(parser.finish())
    return Answer(found.content, found.reasoning, parser.is_reasoning, found.calling)
