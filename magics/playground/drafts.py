"""This module turns what was entered in the playground into a request, a cell and a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec
from IPython.core.error import UsageError

from nbengine.frontend.prompts.prompt import Example, Filled, Prompt
from nbengine.frontend.text.interpolate import fill, paths_in
from nbengine.magics.comparison.arguments import plan_of
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import (
    OWN_PARAMETERS,
    GenerateLine,
    GenerateOptions,
    generate_parser,
    sampling_params,
)
from nbengine.magics.generation.submission import as_text
from nbengine.magics.kept_prompts.calls import PromptCall
from nbengine.magics.playground.controls import words_of
from nbengine.magics.session import AttachedEngine
from nbengine.sampling_params import SamplingParams

PROG = "%playground"
_UNNAMED = "playground"
"""The name of a prompt that the user has not named."""
_BARE_WORD = re.compile(r"[\w@%+=:,./-]+")


class SideState(msgspec.Struct):
    """The settings of one side; empty texts are not given."""

    engine: str = ""
    raw: bool = False
    settings: dict[str, str] = {}


class Shot(msgspec.Struct):
    """An example that was entered; one without any text is none."""

    question: str = ""
    answer: str = ""


class State(msgspec.Struct):
    """All that the user has entered: a name, the text, the values of its variables, examples, and the sides."""

    name: str
    text: str
    values: dict[str, str]
    sides: list[SideState]
    examples: list[Shot] = []


def prompt_of(state: State) -> Prompt:
    """Return the prompt that stands in the editor.

    Raises:
        InvalidArgumentError: it is none.
    """
    examples = tuple(
        Example(each.question, each.answer) for each in state.examples if each.question or each.answer
    )
    return Prompt(state.name.strip() or _UNNAMED, state.text, examples=examples)


def options_of_side(
    state: State, side: int, config: NBEngine, namespace: Mapping[str, object]
) -> GenerateOptions:
    """Return what a side asks for.

    Raises:
        UsageError: a setting is not possible, or a variable has no value.
        InvalidArgumentError: the text is no prompt.
    """
    prompt = prompt_of(state)
    given = {name: state.values.get(name, "") for name in prompt.variables}
    parser = generate_parser(str, PROG)
    call = PromptCall(PROG, prompt, given)
    line = GenerateLine(PROG, parser, words_of_side(state.sides[side]), "", call)
    plan = plan_of(lambda _: line, config, namespace)
    if plan.axes:
        raise UsageError(f"{PROG}: a side takes one value for each setting; %%generate compares several")
    return plan.options


def words_of_side(side: SideState) -> list[str]:
    """Return the words of a line with the settings of a side."""
    engine = [f"--engine={side.engine}"] if side.engine else []
    return [*engine, *(["--raw"] if side.raw else []), *words_of(side.settings)]


def as_cell(prompt: Prompt, state: State, side: int) -> str:
    """Write a side as a cell: a text that is all of the prompt as a `%%generate` cell, any other one by its name."""
    flags = [_word(word) for word in words_of_side(state.sides[side])]
    if is_plain(prompt):
        return "\n".join([" ".join(["%%generate", *flags]), prompt.text()])
    values = [_word(f"{name}={state.values.get(name, '')}") for name in prompt.variables]
    return " ".join(["%%generate", f"@{prompt.reference}", *values, *flags])


def is_plain(prompt: Prompt) -> bool:
    """Return whether a `%%generate` cell with the prompt's text as its body asks the same."""
    if prompt.variables or prompt.has_roles or prompt.examples:
        return False
    # Braces that are text here would be a field there.
    text = prompt.text()
    return not paths_in(text) and fill(text, {}) == text


def as_python(options: GenerateOptions, filled: Filled, engine: AttachedEngine, config: NBEngine) -> str:
    """Write a side as a script that asks the same model the same."""
    client = engine.client
    params = sampling_params(options, client.default_sampling_params(), config)
    usual = SamplingParams()
    given = {
        name: getattr(params, name)
        for name in SamplingParams.__struct_fields__
        if name not in (*OWN_PARAMETERS, "bad_words_token_ids")
        and getattr(params, name) != getattr(usual, name)
    }
    arguments = "".join(f"    {name}={value!r},\n" for name, value in given.items())
    chat = client.has_chat_template if options.chat is None else options.chat
    asked, method = _asked(options, None if chat else as_text(filled, engine.name), config)
    names = ["LLM", "SamplingParams", *(["StructuredOutputsParams"] if params.structured_outputs else [])]
    return (
        f"from nbengine import {', '.join(names)}\n\n"
        f"params = SamplingParams(\n{arguments})\n"
        f"{asked}\n"
        f"with LLM({client.config.model.model!r}) as llm:\n"
        f"    for output in llm.{method}:\n"
        "        for completion in output.outputs:\n"
        "            print(completion.text)\n"
    )


def _asked(options: GenerateOptions, text: str | None, config: NBEngine) -> tuple[str, str]:
    """Return the statement with the prompt, and the call that asks it; `text` is the prompt without a chat template."""
    if text is not None:
        return f"prompt = {text!r}\n", "generate([prompt], params)"
    system = [{"role": "system", "content": config.system}] if config.system is not None else []
    messages: list[Any] = list(options.messages) or [*system, {"role": "user", "content": options.prompt}]
    lines = "".join(f"    {message!r},\n" for message in messages)
    return f"messages = [\n{lines}]\n", "chat(messages, params)"


def _word(text: str) -> str:
    """Quote a word of a line where that is needed."""
    return text if _BARE_WORD.fullmatch(text) else shlex.quote(text)
