"""The parser of a whole answer: its reasoning, its content and its calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.frontend.parsing.formats import HARMONY, AnswerFormat
from nbengine.frontend.parsing.harmony import HarmonyParser
from nbengine.frontend.parsing.markers import SpecialTokenFilter
from nbengine.frontend.parsing.reasoning.base import ReasoningParser
from nbengine.frontend.parsing.schemas import ToolSchema, ToolTypes
from nbengine.frontend.parsing.tools.base import ToolParser
from nbengine.outputs import ToolCall


class AnswerParser:
    """A parser that divides an answer while it arrives; any way of cutting the text gives the same parts.

    Only what may be the beginning of a marker, and white space that may stand beside one, is held back.

    Args:
        format: the formats of reasoning and calls.
        tools: the schemas of the tools, `{"type": "function", "function": {...}}`, which tell the types of
            arguments.
        prompt_opens_reasoning: the prompt's end begins the reasoning (`AnswerFormat.is_opened_by`).
        special_tokens: the texts of the tokenizer's special tokens, which are left out unless they are
            markers of the format.
    """

    def __init__(
        self,
        format: AnswerFormat,
        *,
        tools: Sequence[ToolSchema] = (),
        prompt_opens_reasoning: bool = False,
        special_tokens: frozenset[str] = frozenset(),
    ) -> None:
        self.format = format
        types = ToolTypes(tools)
        self._filter = SpecialTokenFilter(special_tokens, format.markers) if special_tokens else None
        self._harmony: HarmonyParser | None = None
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        if HARMONY in (format.reasoning, format.tools):
            self._harmony = self._tools = HarmonyParser(types, prompt_opens_reasoning=prompt_opens_reasoning)
            return
        if (reasoning := format.reasoning_parser) is not None:
            self._reasoning = reasoning(prompt_opens_reasoning=prompt_opens_reasoning)
        if (family := format.tool_parser) is not None:
            self._tools = family(types)

    @property
    def is_reasoning(self) -> bool:
        """Tell whether the text so far ends within reasoning."""
        stage = self._harmony or self._reasoning
        return stage is not None and stage.is_reasoning

    def feed(self, text: str) -> list[AnswerDelta]:
        """Read the next piece of the text and return what it brings."""
        out: list[AnswerDelta] = []
        if self._filter is not None:
            text = self._filter.feed(text)
        if self._reasoning is not None and not self._reasoning.is_done:
            text = self._reasoning.feed(text, out)
        if text:
            self._answer(text, out)
        return out

    def finish(self) -> list[AnswerDelta]:
        """Return what was held back, at the end of the text; nothing may be fed after it."""
        out: list[AnswerDelta] = []
        text = "" if self._filter is None else self._filter.feed("", final=True)
        if self._reasoning is not None:
            text = self._reasoning.feed(text, out, final=True)
        if text:
            self._answer(text, out)
        if self._tools is not None:
            self._tools.finish(out)
        return out

    def _answer(self, text: str, out: list[AnswerDelta]) -> None:
        if self._tools is None:
            out.append(ContentDelta(text))
        else:
            self._tools.feed(text, out)


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """All that a parser needs to know of one answer; the arguments are those of `AnswerParser`."""

    format: AnswerFormat
    tools: Sequence[ToolSchema] = ()
    prompt_opens_reasoning: bool = False
    special_tokens: frozenset[str] = frozenset()

    def parser(self) -> AnswerParser:
        """Make a parser at the beginning of the answer."""
        return AnswerParser(
            self.format,
            tools=self.tools,
            prompt_opens_reasoning=self.prompt_opens_reasoning,
            special_tokens=self.special_tokens,
        )


class ParsedAnswer:
    """The parts of an answer as far as it has come, put together from deltas."""

    __slots__ = ("_content", "_open", "_reasoning", "malformed", "tool_calls")

    def __init__(self, deltas: Iterable[AnswerDelta] = ()) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._open: tuple[ToolCallStarted, list[str]] | None = None
        self.tool_calls: list[ToolCall] = []
        """The calls that are complete."""
        self.malformed: list[MalformedCall] = []
        self.add(deltas)

    @property
    def reasoning(self) -> str:
        """Return the reasoning; it is empty if there is none."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """Return the content, with the text of malformed calls; it is empty if there is none."""
        return "".join(self._content)

    @property
    def calling(self) -> str:
        """Return the name of the tool whose call is being written; it is empty if none is."""
        return "" if self._open is None else self._open[0].name

    def clear(self) -> None:
        """Forget all but a call that is still being written."""
        self._reasoning.clear()
        self._content.clear()
        self.tool_calls = []
        self.malformed = []

    def add(self, deltas: Iterable[AnswerDelta]) -> None:
        """Append what a parser has found."""
        for delta in deltas:
            match delta:
                case ContentDelta(text=text):
                    self._content.append(text)
                case ReasoningDelta(text=text):
                    self._reasoning.append(text)
                case ArgumentsDelta(text=text):
                    if self._open is not None:
                        self._open[1].append(text)
                case ToolCallStarted():
                    self._open = delta, []
                case ToolCallEnded():
                    if self._open is not None:
                        started, parts = self._open
                        self.tool_calls.append(ToolCall(started.id, started.name, "".join(parts)))
                    self._open = None
                case MalformedCall(text=text):
                    self.malformed.append(delta)
                    self._content.append(text)
                    self._open = None
