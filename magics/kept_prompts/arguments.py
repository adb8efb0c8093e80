"""Command lines of `%%prompt` and `%prompts`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from nbengine.magics.arguments import MagicParser, unescaped, variable_name
from nbengine.magics.kept_runs.arguments import prompt_reference

_DEFAULT = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)", re.DOTALL)
_PROMPT_DESCRIPTION = r"""Keep the cell's body as a prompt, to ask with as often as you like.

  %%prompt capital
  What is the capital of {country}?

  %generate @capital country=Peru

A field in braces is a variable: {country}, {row["country"]}, {city.name}; {{country}} is the text {country}.
Lines that say system:, user: or assistant: and nothing else begin a message each; messages of user and assistant
before the last one are examples. \user: is the text user:. Without such lines the body is one message.

A changed text is a new version, the same text the same version: @capital is the one that was kept last, @capital:1
the first one."""
_PROMPT_EPILOG = """\
The prompt is kept beside the runs (%runs), which know its name, version and values. While
NBEngine.keep_runs is off it lives in this kernel alone.

examples:
  %%prompt capital --default language=English
  %%prompt mood --examples reviews --answer label     a column of reviews for each variable, and one for the answer
  %generate @mood text="I love it" --temperature 0
  %generate @mood --each reviews --expect label --match normalised
  %%generate @mood                                    the body is the value of the variable that has none"""
_LIST_DESCRIPTION = """\
List the prompts that %%prompt has kept: versions, variables, the runs that used them, and when.

  %prompts                         all, one line each
  %prompts show capital:1          one with all that is kept of it
  %prompts diff capital            what the current version has changed; capital:1 capital:3 compares these
  %prompts delete capital          forget it, or one version of it
  %prompts export FILE [NAME …]    write prompts into a file, to keep beside a notebook
  %prompts import FILE             take them from there

In Python: nbengine.prompts()["capital"].messages(country="Peru"), .text(…), nbengine.prompts().rows()."""


def prompt_parser() -> MagicParser:
    """Make the parser of `%%prompt`."""
    parser = MagicParser("%%prompt", _PROMPT_DESCRIPTION, _PROMPT_EPILOG, usage="%%%%prompt NAME [flags]")
    parser.stray_hint = ": the prompt is the cell's body, not its first line"
    parser.add_argument("name", metavar="NAME", help="its name: letters, digits, dots, dashes, underscores")
    parser.add_argument(
        "--default",
        metavar="NAME=VALUE",
        type=_default,
        action="append",
        default=[],
        help=r"the value of a variable that is given none (repeatable; \n is a line break)",
    )
    parser.add_argument(
        "--examples",
        metavar="ROWS",
        help="rows of the notebook (list, dict, table) that become examples before the last message",
    )
    parser.add_argument(
        "--answer", metavar="COLUMN", help="the field of the rows that has the answer (default: answer)"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="no line names a role: the body is text as it is, but for its fields",
    )
    parser.add_argument(
        "-o", "--out", type=variable_name, metavar="NAME", help="bind the prompt to a variable"
    )
    return parser


def prompts_parser() -> MagicParser:
    """Make the parser of the list's flags."""
    parser = MagicParser("%prompts", _LIST_DESCRIPTION, usage="%%prompts [flags], or %%prompts COMMAND …")
    parser.add_argument("--versions", action="store_true", help="every version, not only the current ones")
    return parser


def show_parser() -> MagicParser:
    """Make the parser of `%prompts show`."""
    parser = MagicParser("%prompts show", "Show a prompt with all that is kept of it.")
    _add_prompt(parser, "prompt", "the prompt, in its current version or in that one")
    parser.add_argument(
        "-o", "--out", type=variable_name, metavar="NAME", help="bind the prompt to a variable"
    )
    return parser


def diff_parser() -> MagicParser:
    """Make the parser of `%prompts diff`."""
    parser = MagicParser(
        "%prompts diff", "Show in what a version of a prompt differs from another, or from the one before it."
    )
    _add_prompt(parser, "first", "the one version, or the prompt")
    _add_prompt(parser, "second", "the other one", nargs="?")
    return parser


def delete_parser() -> MagicParser:
    """Make the parser of `%prompts delete`."""
    parser = MagicParser(
        "%prompts delete",
        "Forget a prompt or one of its versions; the text is overwritten on the disk. Runs that used it stay.",
    )
    _add_prompt(parser, "prompt", "the prompt with all versions, or that version")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def export_parser() -> MagicParser:
    """Make the parser of `%prompts export`."""
    parser = MagicParser("%prompts export", "Write prompts into a JSON file, which must not exist.")
    parser.add_argument("file", metavar="FILE", help="the file")
    _add_prompt(parser, "prompts", "which (default: the current versions of all)", nargs="*")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    return parser


def import_parser() -> MagicParser:
    """Make the parser of `%prompts import`."""
    parser = MagicParser("%prompts import", "Keep the prompts of a file that %prompts export has written.")
    parser.add_argument("file", metavar="FILE", help="the file")
    return parser


PARSERS: Mapping[str, Callable[[], MagicParser]] = {
    "show": show_parser,
    "diff": diff_parser,
    "delete": delete_parser,
    "export": export_parser,
    "import": import_parser,
}
"""The parsers of the commands."""


def _add_prompt(parser: MagicParser, dest: str, what: str, nargs: str | None = None) -> None:
    parser.add_argument(dest, nargs=nargs, type=prompt_reference, metavar="NAME[:V]", help=what)


def _default(text: str) -> tuple[str, str]:
    match = _DEFAULT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return match["name"], unescaped(match["value"])
