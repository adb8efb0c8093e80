"""The text of a completion, divided into reasoning, content and calls of tools."""

from __future__ import annotations

from nbengine.frontend.parsing.answer_parser import AnswerReading, ParsedAnswer
from nbengine.outputs import CompletionOutput, UnreadableCall


class DividedText:
    """The state between the deltas of a completion whose text is divided."""

    __slots__ = ("_has_reasoning", "_new", "_parser")

    def __init__(self, reading: AnswerReading) -> None:
        self._parser = reading.parser()
        self._has_reasoning = reading.format.reasoning is not None
        self._new = ParsedAnswer()

    def divide(self, completion: CompletionOutput) -> None:
        """Fill in the parts of the answer that the text of a delta brings."""
        new = self._new
        new.add(self._parser.feed(completion.text))
        if completion.finished:
            new.add(self._parser.finish())
        completion.content = new.content
        completion.tool_calls = new.tool_calls
        if new.malformed:
            completion.unreadable_calls = [UnreadableCall(call.text, call.reason) for call in new.malformed]
        if self._has_reasoning:
            completion.reasoning = new.reasoning
        new.clear()
