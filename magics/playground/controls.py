"""The settings of a side of the playground: the flags of `%%generate` that say how and in what form to answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.magics.arguments import MagicParser
from nbengine.magics.generation.arguments import add_sampling_flags
from nbengine.magics.generation.structured import add_constraint_flags

_SLIDERS = {
    "temperature": (0.0, 2.0, 0.05, 1.0),
    "top_p": (0.01, 1.0, 0.01, 1.0),
    "top_k": (0, 200, 1, 0),
    "min_p": (0.0, 1.0, 0.01, 0.0),
    "max_tokens": (16, 4096, 16, 512),
    "thinking_budget": (0, 4096, 32, 4096),
    "n": (1, 16, 1, 1),
    "presence_penalty": (-2.0, 2.0, 0.1, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.1, 0.0),
    "repetition_penalty": (0.5, 2.0, 0.05, 1.0),
}
"""The least and the largest value, the step, and the place while nothing is entered, of the parameters with a slider.

The field beside a slider takes what lies beyond it. A seed is no quantity, and has the field alone.
"""
_PENALTIES = {
    "presence_penalty": "above 0 tokens that the answer has become less likely, below 0 likelier",
    "frequency_penalty": "the same with each time that the answer has the token",
    "repetition_penalty": "above 1 tokens of prompt and answer become less likely, below 1 likelier",
}
"""Parameters that have no flag of their own: a line says them with `--set`."""
_FIELD_HELP = {
    "json": "answer in JSON that follows a schema: JSON, a file, or the name of a variable (a dict or a "
    'class); {"type": "object"} is any JSON object',
}
"""The help of flags whose own speaks of a line: of quotes around JSON, and of the flag without a value."""
_AS_TYPED = ("regex",)
"""Settings in which spaces at the ends count."""
_KINDS = {"float": "number", "int": "integer"}
# Shades and branches of tokens are a widget of their own, in the output of a cell.
_NOT_HERE = ("help", "logprobs")


@dataclass(frozen=True)
class _Setting:
    name: str
    label: str
    help: str
    kind: str
    words: str
    """The beginning of the word that says the setting in a line; its value follows."""


def controls() -> list[dict[str, Any]]:
    """Describe the settings of a side, as `PlaygroundWidget.controls` does; a new flag appears by itself."""
    return [_control(setting) for setting in _settings()]


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Return the words of a line that say these settings; empty ones say nothing."""
    words = []
    for setting in _settings():
        text = settings.get(setting.name, "")
        for value in text.splitlines() if setting.kind == "lines" else [text]:
            if value.strip():
                said = value if setting.name in _AS_TYPED else value.strip()
                words.append(f"{setting.words}{said}")
    return words


def _settings() -> Iterator[_Setting]:
    """Yield the flags in the order in which they are declared; what needs `--set` stands before that flag."""
    parser = MagicParser("%playground", "")
    add_sampling_flags(parser, str)
    add_constraint_flags(parser)
    for action in parser._actions:
        if action.dest in _NOT_HERE:
            continue
        flag = max(action.option_strings, key=len)
        if action.dest == "set":
            # A later word wins: what is typed into the field of --set holds, as in a line.
            for name, text in _PENALTIES.items():
                yield _Setting(name, name, text, "number", f"{flag}={name}=")
        told = _FIELD_HELP.get(action.dest, action.help or "")
        yield _Setting(action.dest, flag, told, _kind(action), f"{flag}=")


def _control(setting: _Setting) -> dict[str, Any]:
    control: dict[str, Any] = {
        "name": setting.name,
        "flag": setting.label,
        "help": setting.help,
        "kind": setting.kind,
    }
    if setting.name in _SLIDERS:
        control |= dict(zip(("low", "high", "step", "start"), _SLIDERS[setting.name], strict=True))
    return control


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse._AppendAction):
        return "lines"
    return _KINDS.get(getattr(action.type, "__name__", ""), "text")
