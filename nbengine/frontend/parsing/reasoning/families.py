"""The ways in which families of models mark their reasoning."""

from __future__ import annotations

from nbengine.frontend.parsing.reasoning.base import ReasoningParser

_THINK = ("<think>", "</think>")


class Qwen3ReasoningParser(ReasoningParser):
    """The parser of `<think>...</think>`, as Qwen3, SmolLM3 and others write it."""

    tags = (_THINK,)


class DeepSeekR1ReasoningParser(ReasoningParser):
    """The parser of DeepSeek's `<think>...</think>`, whose opening tag most often is the prompt's end."""

    tags = (_THINK,)


class GlmReasoningParser(ReasoningParser):
    """The parser of GLM's `<think>...</think>`; the answer may be introduced by `<answer>`."""

    tags = (_THINK,)
    answer_begins = ("<answer>",)
    answer_ends = ("</answer>",)


class GemmaReasoningParser(ReasoningParser):
    """The parser of Gemma 4's `<|channel>thought ... <channel|>`."""

    tags = (("<|channel>thought", "<channel|>"),)
    keeps_special_tokens = True

    @classmethod
    def closing_text(cls) -> str:
        return f"\n{cls.closing_marker()}"


class GraniteReasoningParser(ReasoningParser):
    """The parser of Granite 3.3's `<think>...</think><response>...</response>`, and of the sentences with which
    Granite 3.2 begins its thoughts and its answer."""

    tags = (
        _THINK,
        ("Here is my thought process:", "Here is my response:"),
        ("Here's my thought process:", "Here's my response:"),
    )
    answer_begins = ("<response>", "Here is my response:", "Here's my response:")
    answer_ends = ("</response>",)


class MistralReasoningParser(ReasoningParser):
    """The parser of Mistral's `[THINK]...[/THINK]`."""

    tags = (("[THINK]", "[/THINK]"),)
    keeps_special_tokens = True

    @classmethod
    def closing_text(cls) -> str:
        return cls.closing_marker()


class TagsReasoningParser(ReasoningParser):
    """The parser of whichever of the common tags an answer begins with, for models of no known family."""

    tags = (
        _THINK,
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
    )
