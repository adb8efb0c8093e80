"""The formats of answers, and the choice of one by the text of a chat template."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.parsing.harmony import HarmonyParser, HarmonyReasoningParser
from nbengine.frontend.parsing.reasoning.base import ReasoningParser
from nbengine.frontend.parsing.reasoning.families import (
    DeepSeekR1ReasoningParser,
    GemmaReasoningParser,
    GlmReasoningParser,
    GraniteReasoningParser,
    MistralReasoningParser,
    Qwen3ReasoningParser,
    TagsReasoningParser,
)
from nbengine.frontend.parsing.tools.base import ToolParser
from nbengine.frontend.parsing.tools.deepseek import DeepSeekToolParser
from nbengine.frontend.parsing.tools.gemma import GemmaToolParser
from nbengine.frontend.parsing.tools.glm import GlmToolParser
from nbengine.frontend.parsing.tools.hermes import HermesToolParser
from nbengine.frontend.parsing.tools.json_lists import GraniteToolParser
from nbengine.frontend.parsing.tools.llama3_json import Llama3JsonToolParser
from nbengine.frontend.parsing.tools.mistral import MistralToolParser
from nbengine.frontend.parsing.tools.pythonic import PythonicToolParser
from nbengine.frontend.parsing.tools.qwen3_coder import Qwen3CoderToolParser

AUTO, NONE = "auto", "none"
HARMONY = "gpt_oss"
TAGS = "tags"
"""The parser of whichever tags an answer has."""

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": Qwen3ReasoningParser,
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "glm": GlmReasoningParser,
    HARMONY: HarmonyReasoningParser,
    "gemma": GemmaReasoningParser,
    "granite": GraniteReasoningParser,
    "mistral": MistralReasoningParser,
    TAGS: TagsReasoningParser,
}
"""The parsers of reasoning by name."""

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "llama3_json": Llama3JsonToolParser,
    "mistral": MistralToolParser,
    "pythonic": PythonicToolParser,
    "deepseek": DeepSeekToolParser,
    "glm": GlmToolParser,
    HARMONY: HarmonyParser,
    "gemma": GemmaToolParser,
    "granite": GraniteToolParser,
}
"""The parsers of tool calls by name."""

_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("gemma", ("<|channel>",)),
    ("granite", ("Here is my thought process",)),
    ("granite", ("<response>", "<think>")),
    ("glm", ("<think>", "<arg_key>")),
    ("glm", ("<think>", "<|observation|>")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("mistral", ("[THINK]",)),
    ("qwen3", ("</think>",)),
    (TAGS, ("</thinking>",)),
    (TAGS, ("</thought>",)),
    (TAGS, ("</reasoning>",)),
    (TAGS, ("</seed:think>",)),
    (TAGS, ("◁/think▷",)),
)
"""The parsers, each with texts that must all stand in a template; the first whose texts do is chosen."""

_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gemma", ("<|tool_call>",)),
    ("gemma", ("<start_function_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters":')),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The names of the parsers of an answer, None where none is wanted.

    With `keeps_special_tokens` the parsers need special tokens in the text: requests are sent with
    `skip_special_tokens=False`.
    """

    reasoning: str | None = None
    tools: str | None = None
    keeps_special_tokens: bool = False

    def __bool__(self) -> bool:
        """Tell whether there is anything to find."""
        return self.reasoning is not None or self.tools is not None

    def without_tools(self) -> AnswerFormat:
        """Return the format of answers to requests that have no tools."""
        # The reasoning of harmony is found by the same markers.
        reasoning = self.reasoning
        keeps = reasoning is not None and REASONING_PARSERS[reasoning].keeps_special_tokens
        return AnswerFormat(reasoning, None, self.keeps_special_tokens and keeps)

    @property
    def reasoning_parser(self) -> type[ReasoningParser] | None:
        """Return the class that knows the markers of the reasoning."""
        return None if self.reasoning is None else REASONING_PARSERS[self.reasoning]

    @property
    def tool_parser(self) -> type[ToolParser] | None:
        """Return the class that knows the markers of the calls."""
        return None if self.tools is None else TOOL_PARSERS[self.tools]

    @property
    def markers(self) -> frozenset[str]:
        """Return the markers of both."""
        families = (self.reasoning_parser, self.tool_parser)
        found = frozenset().union(*(family.markers() for family in families if family is not None))
        return found | HarmonyParser.markers() if HARMONY in (self.reasoning, self.tools) else found

    def is_opened_by(self, prompt: str) -> bool:
        """Tell whether the end of a prompt begins the reasoning."""
        family = self.reasoning_parser
        return family is not None and family.is_opened_by(prompt)


@functools.lru_cache(maxsize=256)
def answer_format(
    chat_template: str,
    reasoning: str = AUTO,
    tools: str = AUTO,
    *,
    special_tokens: Collection[str] | None = None,
) -> AnswerFormat:
    """Choose the format of the answers of a model.

    Args:
        chat_template: the text of its chat template, whose markers tell the family.
        reasoning: the name of a parser in `REASONING_PARSERS`; "auto" chooses it by the template, "none" leaves
            reasoning in the content.
        tools: the name of a parser in `TOOL_PARSERS`; "auto" and "none" likewise.
        special_tokens: the special tokens of the tokenizer, as a hashable collection, which tell whether
            a family's markers are among them; None: those are supposed that the family has.

    Raises:
        InvalidArgumentError: there is no parser of that name; the message lists all.
    """
    reasoning_name = _chosen(
        "reasoning_parser", reasoning, REASONING_PARSERS, _REASONING_SIGNS, chat_template
    )
    tools_name = _chosen("tool_parser", tools, TOOL_PARSERS, _TOOL_SIGNS, chat_template)
    chosen = AnswerFormat(reasoning_name, tools_name)
    if special_tokens is not None:
        keeps = any(token and token in marker for marker in chosen.markers for token in special_tokens)
    else:
        families = (chosen.reasoning_parser, chosen.tool_parser)
        keeps = any(family.keeps_special_tokens for family in families if family is not None)
    return AnswerFormat(reasoning_name, tools_name, keeps)


def _chosen(
    argument: str,
    name: str,
    parsers: Mapping[str, object],
    signs: tuple[tuple[str, tuple[str, ...]], ...],
    template: str,
) -> str | None:
    if name == AUTO:
        return next((found for found, texts in signs if all(text in template for text in texts)), None)
    if name == NONE:
        return None
    if name not in parsers:
        raise InvalidArgumentError(argument, name, "one of " + ", ".join((AUTO, NONE, *parsers)))
    return name
