"""A run that is asked again: its prompt and settings, with the flags of a line in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from nbengine.frontend.prompts.prompt import Filled
from nbengine.magics.arguments import MagicParser
from nbengine.magics.comparison.arguments import ComparisonPlan, plan_of
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import (
    OWN_PARAMETERS,
    Expand,
    GenerateLine,
    GenerateOptions,
    generate_parser,
)
from nbengine.magics.generation.thinking import TemplateOptions
from nbengine.sampling_params import SamplingParams

_PROG = "%runs rerun"
_STAND_IN = "the run's own prompt"
"""The text that stands in the prompt's place while the line is read: braces in a kept prompt are text."""


def rerun_parser(expand: Expand = str) -> MagicParser:
    """Make the parser of `%runs rerun`: the flags of `%generate`, which stand behind a number."""
    parser = generate_parser(expand, _PROG)
    parser.usage = f"%{_PROG} N [flags]"
    parser.description = (
        "Ask a run's prompt again, with its messages and settings but for what the flags say, of the attached engine.\n"
        "--diff shows in what the new answer differs from the run's. Calls of tools are not carried out."
    )
    parser.epilog = None
    return parser


def plan_again(
    run: Mapping[str, Any], words: Sequence[str], config: NBEngine, namespace: Mapping[str, object]
) -> ComparisonPlan:
    """Read the flags of a line, and return the requests that ask a run again with them; lists compare.

    Raises:
        UsageError: the line cannot be understood, or asks for too many answers.
        HelpRequested: `-h` was given.
    """

    def read(expand: Expand) -> GenerateLine:
        return GenerateLine(_PROG, rerun_parser(expand), list(words), _STAND_IN)

    plan = plan_of(read, config, namespace)
    combinations = [
        replace(combination, options=options_again(run, combination.options, config))
        for combination in plan.combinations
    ]
    return replace(plan, combinations=tuple(combinations))


def options_again(run: Mapping[str, Any], given: GenerateOptions, config: NBEngine) -> GenerateOptions:
    """Return the options of a run, with those that are given in their place."""
    settings = run["settings"]
    params = msgspec.convert(settings, SamplingParams)
    sampling = {
        name: getattr(params, name) for name in SamplingParams.__struct_fields__ if name not in OWN_PARAMETERS
    }
    sampling |= given.sampling
    constraint = sampling["structured_outputs"]
    is_json = constraint is not None and (constraint.json is not None or bool(constraint.json_object))
    chat = settings["chat"] if given.chat is None else given.chat
    think = settings.get("think") if given.template.think is None else given.template.think
    template = TemplateOptions(think, {**settings.get("template", {}), **given.template.variables})
    kept = {name: settings[name] for name in ("tools", "tool_parser") if name in settings}
    return replace(
        given,
        prompt=run["prompt"],
        chat=chat,
        sampling=sampling,
        parse_json=is_json,
        format="json" if is_json and given.format == config.format else given.format,
        template=template if chat else TemplateOptions(),
        messages=_messages(run, given.system) if chat else (),
        tools=kept if chat else {},
        kept=_kept_prompt(run) if given.system is None else None,
    )


def _kept_prompt(run: Mapping[str, Any]) -> Filled | None:
    """Return the kept prompt of a run, as it was asked with."""
    if not run["prompt_name"]:
        return None
    text: str = run["prompt"]
    return Filled(run["prompt_name"], run["prompt_version"], text, text, (), run["prompt_values"])


def _messages(run: Mapping[str, Any], system: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a run, behind another system message if one is given; none if it had none."""
    messages = run["messages"]
    if system is None or not messages:
        return tuple(messages)
    behind = messages[1:] if messages[0].get("role") == "system" else messages
    return ({"role": "system", "content": system}, *behind)
