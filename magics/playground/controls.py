"""The settings of a side of the playground, which are the sampling flags of `%%generate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from nbengine.magics.arguments import MagicParser
from nbengine.magics.generation.arguments import add_sampling_flags

_SLIDERS = {"temperature": (0.0, 2.0, 0.05), "top_p": (0.0, 1.0, 0.01), "min_p": (0.0, 1.0, 0.01)}
"""The least and the largest value and the step of the parameters whose range is worth a slider."""
_KINDS = {"float": "number", "int": "integer"}
# Shades and branches of tokens are a widget of their own, in the output of a cell.
_NOT_HERE = ("help", "logprobs")


def sampling_actions() -> list[argparse.Action]:
    """List the sampling flags, in the order in which they are declared."""
    parser = MagicParser("%playground", "")
    add_sampling_flags(parser, str)
    return [action for action in parser._actions if action.dest not in _NOT_HERE]


def controls() -> list[dict[str, Any]]:
    """Describe the settings of a side, as `PlaygroundWidget.controls` does; a new flag appears by itself."""
    return [_control(action) for action in sampling_actions()]


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Return the words of a line that say these settings; empty ones say nothing."""
    words = []
    for action in sampling_actions():
        text = settings.get(action.dest, "").strip()
        for value in text.splitlines() if _is_repeatable(action) else [text]:
            if value.strip():
                words.append(f"{flag_of(action)}={value.strip()}")
    return words


def flag_of(action: argparse.Action) -> str:
    """Return the flag's longest form."""
    return max(action.option_strings, key=len)


def _control(action: argparse.Action) -> dict[str, Any]:
    kind = "lines" if _is_repeatable(action) else _KINDS.get(getattr(action.type, "__name__", ""), "text")
    control: dict[str, Any] = {
        "name": action.dest,
        "flag": flag_of(action),
        "help": action.help or "",
        "kind": kind,
    }
    if action.dest in _SLIDERS:
        control |= dict(zip(("low", "high", "step"), _SLIDERS[action.dest], strict=True))
    return control


def _is_repeatable(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)
