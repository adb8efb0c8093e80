"""docs/arguments.md says what the declarations of the engine arguments say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from nbengine.config.argument import argument_of
from nbengine.config.arguments_page import arguments_page
from nbengine.config.engine import EngineArgs
from nbengine.magics.engines.arguments import start_parser

PAGE = Path(__file__).parents[3] / "docs" / "arguments.md"


def test_the_page_is_made_from_the_declarations():
    assert PAGE.read_text() == arguments_page(), (
        "python -m nbengine.config.arguments_page > docs/arguments.md"
    )


def test_every_argument_has_a_help_text_and_a_flag_with_that_text():
    helped = {action.dest: action for action in start_parser()._actions}
    for declared in fields(EngineArgs):
        argument = argument_of(declared)
        assert argument.help
        action = helped[declared.name]
        assert action.help.replace("%%", "%").startswith(argument.help)
        assert set(argument.flags) <= set(action.option_strings)
