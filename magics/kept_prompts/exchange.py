"""Prompts in a file: what `%prompts export` writes and `%prompts import` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nbengine.errors import InvalidArgumentError, NBEngineError, shown
from nbengine.frontend.prompts.prompt import Example, Prompt
from nbengine.ipc.private import reason_of

_FORMAT = 1
_MOST_BYTES = 64 << 20


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt in a file."""

    name: str
    text: str
    raw: bool = False
    defaults: dict[str, str] = {}
    examples: list[tuple[str, str]] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    nbengine_prompts: int
    prompts: list[_Written]


def write_prompts(path: Path, prompts: Sequence[Prompt], *, replace: bool) -> None:
    """Write prompts into a file, which must not exist unless it is to be replaced.

    Raises:
        InvalidArgumentError: the file exists.
        NBEngineError: it cannot be written.
    """
    text = json.dumps(
        {"nbengine_prompts": _FORMAT, "prompts": [_written(prompt) for prompt in prompts]},
        ensure_ascii=False,
        indent=1,
    )
    try:
        with path.open("w" if replace else "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise InvalidArgumentError("file", str(path), "a new one; --force replaces it") from None
    except OSError as error:
        raise NBEngineError(f"{shown(path)} cannot be written: {reason_of(error)}") from error


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file.

    Raises:
        InvalidArgumentError: they are no prompts, or of a newer nbengine.
        NBEngineError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise NBEngineError(f"{shown(path)} cannot be read: {reason_of(error)}") from error
    if len(data) > _MOST_BYTES:
        raise InvalidArgumentError("file", str(path), f"at most {_MOST_BYTES >> 20} MiB long")
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError("file", str(path), f"what %prompts export writes ({error})") from None
    if file.nbengine_prompts != _FORMAT:
        raise InvalidArgumentError("file", str(path), f"in format {_FORMAT}, not {file.nbengine_prompts}")
    return [
        Prompt(each.name, each.text, each.raw, each.defaults, tuple(Example(*pair) for pair in each.examples))
        for each in file.prompts
    ]


def _written(prompt: Prompt) -> Mapping[str, Any]:
    return {
        "name": prompt.name,
        "text": prompt.source,
        **({"raw": True} if prompt.raw else {}),
        **({"defaults": dict(prompt.defaults)} if prompt.defaults else {}),
        **({"examples": [[e.question, e.answer] for e in prompt.examples]} if prompt.examples else {}),
    }
