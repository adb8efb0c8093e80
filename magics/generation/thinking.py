"""Flags for what a model thinks before it answers, and for its chat template; and the prompts made with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.error import UsageError

from nbengine.magics.arguments import key_value
from nbengine.magics.session import AttachedEngine

_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch thinking: the first is that of Qwen3's templates, the second that of DeepSeek-V3.1's
and Granite's; other templates ignore both."""


@dataclass(frozen=True)
class TemplateOptions:
    """The options of a line that are for the chat template."""

    think: bool | None = None
    """Think before the answer or not; None leaves it to the template."""
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.think is not None or bool(self.variables)

    def all_variables(self, *, has_grammar: bool) -> dict[str, Any]:
        """Return the variables, with the switches of thinking.

        Where the answer has a grammar, a model that can answer without thinking does, unless the line says
        otherwise: an answer in a form is mostly wanted soon.
        """
        think = False if self.think is None and has_grammar else self.think
        return {**({} if think is None else dict.fromkeys(_SWITCHES, think)), **self.variables}


def add_template_flags(parser: argparse.ArgumentParser, expand: Callable[[str], str]) -> None:
    """Add the flags; `expand` is applied to a variable before it is read."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--think",
        action="store_const",
        const=True,
        dest="think",
        help="think before the answer, where the model can be told to (default: as its chat template says, and not "
        "with --json, --regex or --choice)",
    )
    group.add_argument(
        "--no-think", action="store_const", const=False, dest="think", help="answer without thinking"
    )
    parser.add_argument(
        "--template",
        metavar="KEY=VALUE",
        type=lambda text: key_value(expand(text)),
        action="append",
        default=[],
        help="a variable of the chat template, the value as JSON (repeatable)",
    )


def template_options(parsed: argparse.Namespace) -> TemplateOptions:
    """Return what the flags have said."""
    return TemplateOptions(parsed.think, dict(parsed.template))


def chat_prompt(
    engine: AttachedEngine,
    messages: list[dict[str, Any]],
    options: TemplateOptions,
    *,
    has_grammar: bool,
    **further: Any,
) -> Mapping[str, Any]:
    """Apply the chat template; `further` are arguments of `AsyncLLM.render_chat`.

    Raises:
        UsageError: the model cannot be told to think, or not to.
    """
    variables = options.all_variables(has_grammar=has_grammar)
    if variables:
        further["chat_template_kwargs"] = variables
    prompt = engine.client.render_chat(messages, **further)
    reasoning = prompt.get("reasoning")
    if options.think is False and reasoning is not None and not reasoning.openings:
        raise UsageError(
            f"--no-think: the model of engine {engine.name!r} always thinks before it answers; --thinking-budget N "
            "bounds that"
        )
    if options.think and reasoning is None:
        raise UsageError(
            f"--think: the chat template of engine {engine.name!r} has no thinking that could be switched on "
            f"with {' or '.join(_SWITCHES)}"
        )
    return prompt
