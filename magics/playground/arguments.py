"""Command lines of `%playground`."""

from __future__ import annotations

from nbengine.magics.arguments import MagicParser
from nbengine.magics.kept_runs.arguments import prompt_reference


def playground_parser() -> MagicParser:
    """Make the parser of `%playground`."""
    parser = MagicParser(
        "%playground",
        "Edit a prompt, fill its variables, and ask it with two settings side by side.\n\n"
        "Every sampling flag of %generate is a setting of a side, and so are --json, --regex and --choice; an empty one is\n"
        "as the model wants it. A prompt is kept under its name with a button, with its examples, and each side becomes a\n"
        "cell or a script. Answers are runs (%runs).",
    )
    parser.add_argument(
        "prompt", nargs="?", type=prompt_reference, metavar="NAME[:V]", help="a kept prompt to begin with"
    )
    return parser
