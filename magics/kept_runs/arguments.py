"""Command lines of `%runs`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.prompts.prompt import named
from nbengine.magics.arguments import MagicParser, variable_name
from nbengine.magics.config import FORMATS
from nbengine.magics.kept_runs.repeating import rerun_parser

MOST_LISTED = 20
"""The number of runs that are listed unless the line says otherwise."""
_AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>min|h|d|w)")
_SECONDS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DESCRIPTION = """\
List the prompts that were asked in your notebooks, with their answers, the latest first.

  %runs                            the latest, of all notebooks and engines
  %runs --find TEXT --last 5       those with a text in prompt, answer or note
  %runs --prompt capital:2         those that were asked with a kept prompt
  %runs show 12                    one with all that is kept of it
  %runs diff 12 15                 what differs between two answers
  %runs rerun 12 --temperature 0   ask again, with any flag of %generate
  %runs pin 12 [--off]             keep it, whatever its age
  %runs note 12 TEXT               write something down about it
  %runs clear [--older-than 30d]   forget those that are not pinned

In Python: nbengine.runs(find="…").rows() and .to_frame()."""
_EPILOG = """\
%config NBEngine.keep_runs = False keeps nothing from then on. Runs go after NBEngine.runs_max_days days, and the
oldest ones beyond NBEngine.runs_max_mb megabytes."""


def runs_parser() -> MagicParser:
    """Make the parser of the list's flags."""
    parser = MagicParser("%runs", _DESCRIPTION, _EPILOG, usage="%%runs [flags], or %%runs COMMAND …")
    parser.add_argument(
        "--last",
        type=_at_least_one,
        default=MOST_LISTED,
        metavar="N",
        help="most runs to list (default: %(default)s)",
    )
    parser.add_argument("--find", metavar="TEXT", help="a text in the prompt, an answer or the note")
    parser.add_argument("--model", metavar="M", help="a part of the model's name")
    parser.add_argument("--engine", metavar="NAME", help="the engine's name")
    parser.add_argument(
        "--prompt",
        type=prompt_reference,
        metavar="NAME[:V]",
        help="the kept prompt that was asked with, in one version or in any",
    )
    parser.add_argument("--errors", action="store_true", help="only those that an error has ended")
    parser.add_argument("--pinned", action="store_true", help="only those that are pinned")
    parser.add_argument("--here", action="store_true", help="only those of this notebook")
    return parser


def show_parser() -> MagicParser:
    """Make the parser of `%runs show`."""
    parser = MagicParser("%runs show", "Show a run with all that is kept of it.")
    parser.add_argument("number", type=run_number, metavar="N", help="its number in the list")
    parser.add_argument("-f", "--format", choices=FORMATS, metavar="F", help="text, markdown, json or code")
    parser.add_argument(
        "-o", "--out", type=variable_name, metavar="NAME", help="bind its row, a dict, to a variable"
    )
    return parser


def diff_parser() -> MagicParser:
    """Make the parser of `%runs diff`."""
    parser = MagicParser("%runs diff", "Show in what the answer of one run differs from that of another.")
    parser.add_argument("old", type=run_number, metavar="N", help="the number of the one")
    parser.add_argument("new", type=run_number, metavar="M", help="the number of the other")
    return parser


def pin_parser() -> MagicParser:
    """Make the parser of `%runs pin`."""
    parser = MagicParser("%runs pin", "Keep a run, whatever its age and the size of the store.")
    parser.add_argument("number", type=run_number, metavar="N", help="its number in the list")
    parser.add_argument("--off", action="store_true", help="no longer")
    return parser


def note_parser() -> MagicParser:
    """Make the parser of `%runs note`."""
    parser = MagicParser("%runs note", "Write something down about a run; without a text the note goes.")
    parser.add_argument("number", type=run_number, metavar="N", help="its number in the list")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="the rest of the line, as it is")
    return parser


def clear_parser() -> MagicParser:
    """Make the parser of `%runs clear`."""
    parser = MagicParser(
        "%runs clear", "Forget the runs that are not pinned; their texts are overwritten on the disk."
    )
    parser.add_argument(
        "--older-than", dest="age", type=_age, metavar="AGE", help="only older ones: 90min, 12h, 30d, 8w"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


PARSERS: Mapping[str, Callable[[], MagicParser]] = {
    "show": show_parser,
    "diff": diff_parser,
    "rerun": rerun_parser,
    "pin": pin_parser,
    "note": note_parser,
    "clear": clear_parser,
}
"""The parsers of the commands."""


def prompt_reference(text: str) -> tuple[str, int | None]:
    """Read `NAME` or `NAME:VERSION`, which may stand behind an `@`.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        return named(text.removeprefix("@"))
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_number(text: str) -> int:
    """Read the number of a run.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = text.removeprefix("#")
    if not (number.isascii() and number.isdecimal() and 1 <= int(number) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a run, such as 12")
    return int(number)


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return int(text)


def _age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 90min, 12h, 30d or 8w")
    return float(match["number"]) * _SECONDS[match["unit"]]
