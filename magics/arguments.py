"""Command lines of magics: words, values, and a parser that explains instead of exiting."""

from __future__ import annotations

import argparse
import json
import keyword
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError

from nbengine.errors import (
    InvalidArgumentError,
    ModelNotFoundError,
    NotSupportedError,
    RequestError,
    did_you_mean,
    quoted,
)

CALLER_ERRORS = (InvalidArgumentError, ModelNotFoundError, NotSupportedError, RequestError)
"""Mistakes of the user who typed the line, which are shown as one line without a traceback."""

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKMGT]i?)?B?")
_MAX_SIZE = 2**63
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class HelpRequested(Exception):
    """`-h` was given; the exception carries the help text to print, and the parser that it describes."""

    def __init__(self, parser: MagicParser) -> None:
        super().__init__(parser.format_help())
        self.parser = parser


class MagicParser(argparse.ArgumentParser):
    """An argument parser for a magic: it never exits, and a mistake is one line with the nearest flag.

    Raises:
        UsageError: the line cannot be understood.
        HelpRequested: `-h` or `--help` was given.
    """

    stray_hint = ""
    """The hint that is added to the complaint about a word that belongs to no flag."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        self.add_argument("-h", "--help", action=_HelpAction, nargs=0, help="show this text")

    def take_flags(self, other: MagicParser, destinations: Iterable[str]) -> None:
        """Adopt the flags of another parser that are read into `destinations`."""
        wanted = set(destinations)
        for action in other._actions:
            if action.dest in wanted:
                self._add_action(action)

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a line."""
        namespace, extra = self.parse_known_args(list(words))
        for word in extra:
            if word.startswith("-") and word != "-":
                flag = word.partition("=")[0]
                self.error(f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}")
            self.error(f"unexpected {word!r}{self.stray_hint}")
        return namespace

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} -h lists the flags)")

    def takes_value(self, flag: str) -> bool | None:
        """Return whether a flag is followed by a value; None when there is no such flag."""
        action = self._option_string_actions.get(flag)
        return None if action is None else action.nargs != 0

    @property
    def flags(self) -> list[str]:
        """List all flags, those with two dashes first."""
        return sorted(self._option_string_actions, key=lambda flag: (not flag.startswith("--"), flag))

    @property
    def positionals(self) -> list[argparse.Action]:
        """List the arguments that are read from words without a flag, in their order."""
        return [action for action in self._actions if not action.option_strings]

    def action_of(self, flag: str) -> argparse.Action | None:
        """Find the argument that a flag belongs to; None when there is no such flag."""
        return self._option_string_actions.get(flag)

    def value_is_optional(self, flag: str) -> bool:
        """Return whether a flag that takes a value may also stand alone."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs == "?"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that is wide enough for a notebook cell and puts one flag on a line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


class _HelpAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        assert isinstance(parser, MagicParser)
        raise HelpRequested(parser)


def positive_seconds(text: str) -> float:
    """Read a number of seconds that is more than 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {quoted(text)}")
    return found


def split_words(line: str, prog: str) -> list[str]:
    """Split a line as a POSIX shell does."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{prog}: {str(error).lower()} in {line.strip()!r}") from None


def split_prompt(line: str, parser: MagicParser) -> tuple[list[str], str]:
    """Split a line into the words of its leading flags and the rest, which stays as it was typed.

    The rest begins at the first word that is neither a flag nor a flag's value, or after a lone `--`.
    """
    position = 0
    wants_value = may_stand_alone = False
    words: list[str] = []
    for match in re.finditer(r"""(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*')+""", line):
        word = match[0]
        if wants_value and not (may_stand_alone and word.startswith("-")):
            wants_value = False
        elif word == "--":
            position = match.end()
            break
        elif len(word) > 1 and word.startswith("-"):
            flag, has_equals, _ = word.partition("=")
            wants_value = not has_equals and bool(parser.takes_value(flag))
            may_stand_alone = parser.value_is_optional(flag)
        else:
            break
        words.extend(split_words(word, parser.prog))
        position = match.end()
    return words, line[position:].strip()


def values_of(flag: str, words: Sequence[str], parser: MagicParser) -> list[str]:
    """Collect the values that a flag has in the words of a line, before the line is read."""
    found = []
    remaining = list(words)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not parser.takes_value(name):
            continue
        if not equals:
            if not remaining or (parser.value_is_optional(name) and remaining[0].startswith("-")):
                continue
            value = remaining.pop(0)
        if name == flag:
            found.append(value)
    return found


def split_body(line: str, body: str | None, parser: MagicParser, what: str) -> tuple[list[str], str]:
    """Return the words of a magic's flags, and its text: a cell's body or, of a line magic, the line's rest.

    `what` names the text in the message that refuses a stray word.
    """
    if body is None:
        return split_prompt(line, parser)
    parser.stray_hint = f": the {what} is the cell's body, not its first line"
    return split_words(line, parser.prog), body.removesuffix("\n")


def literal(text: str) -> Any:
    """Read a value: JSON, or Python's `True`, `False` and `None`; anything else is a string."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def key_value(text: str) -> tuple[str, Any]:
    """Read `key=value` of a `--set`; dashes in the key count as underscores."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key.strip().replace("-", "_"), literal(value.strip())


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    value = literal(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as '{{\"key\": 1}}'")
    return value


def memory_size(text: str) -> int:
    """Read bytes: `1073741824`, `1.5GiB`, `800M`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2G")
    size = float(match["number"]) * _UNITS.get((match["unit"] or "").replace("k", "K"), 1)
    if size >= _MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a machine can have")
    return int(size)


def variable_name(text: str) -> str:
    """Read the name that `-o` binds a value to."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    return text


def unescaped(text: str) -> str:
    r"""Read `\n` and `\t` as the characters that they name."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
