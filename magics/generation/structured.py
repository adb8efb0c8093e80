"""`--json`, `--regex` and `--choice` say what form an answer must have."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError
from nbengine.sampling_params import StructuredOutputsParams

ANY_OBJECT = ""
"""The value that a bare `--json` stands for."""


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; a line takes only one of them."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json",
        nargs="?",
        const=ANY_OBJECT,
        metavar="SCHEMA",
        help="answer in JSON that follows a schema: JSON in quotes, a file, or the name of a variable (a dict or a "
        "class); alone: any JSON object",
    )
    group.add_argument(
        "--regex", metavar="R", help="answer with text that matches this from beginning to end"
    )
    group.add_argument("--choice", metavar="A,B", help="answer with one of these")


def constraint_of(
    parsed: argparse.Namespace, namespace: Mapping[str, object], prog: str
) -> StructuredOutputsParams | None:
    """Return the constraint that the line asks for, None where it asks for none.

    Raises:
        UsageError: the schema cannot be found or read, or a value is not allowed.
    """
    try:
        if parsed.json == ANY_OBJECT:
            return StructuredOutputsParams(json_object=True)
        if parsed.json is not None:
            return StructuredOutputsParams(json=_schema(parsed.json, namespace, prog))
        if parsed.regex is not None:
            return StructuredOutputsParams(regex=parsed.regex)
        if parsed.choice is not None:
            return StructuredOutputsParams(choice=_choices(parsed.choice))
    except InvalidArgumentError as error:
        raise UsageError(f"{prog}: {error}") from None
    return None


def _schema(text: str, namespace: Mapping[str, object], prog: str) -> Any:
    name = text.removeprefix("{").removesuffix("}") if text.startswith("{") else text
    if name.isidentifier() and name in namespace:
        return namespace[name]
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "it is not text"
    except ValueError:
        reason = "a path cannot have such characters"
    except RuntimeError as error:
        reason = str(error)  # `~name` is nobody's home directory
    raise UsageError(f"{prog}: --json {text}: neither a variable nor JSON in quotes, and as a file: {reason}")


def _choices(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        try:
            choices: list[str] = json.loads(text)
        except json.JSONDecodeError:
            pass
        else:
            return choices
    return [choice.strip() for choice in text.split(",")]
