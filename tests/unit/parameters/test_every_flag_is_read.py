"""Every flag of the magics, and every default that a notebook can set, is read by somebody."""

from __future__ import annotations

import argparse
import ast
from dataclasses import fields
from pathlib import Path

import pytest

from nbengine.magics.config import SAMPLING_DEFAULTS, NBEngine
from nbengine.magics.conversations.arguments import ChatOptions, chat_parser
from nbengine.magics.dashboard_arguments import dashboard_parser
from nbengine.magics.engines.arguments import StartOptions
from nbengine.magics.generation.arguments import GenerateOptions, generate_parser
from nbengine.magics.generation.thinking import TemplateOptions
from tests.unit.parameters.field_reads import Types, field_reads

MAGICS = Path(__file__).parents[3] / "magics"
OPTIONS = (GenerateOptions, ChatOptions, StartOptions, TemplateOptions)
READ_BY_NAME = {("NBEngine", name): "NBEngine.sampling_defaults" for name in SAMPLING_DEFAULTS}
"""Fields that a method finds by their names, and the method."""
HANDED_ON = {("GenerateOptions", "diff"): "Turn.diff, and the options of a row in the grid"}
"""Fields whose readers are found by other tests: `test_diff.py`."""
FROM_WORDS = {"each"}
"""Flags that are read before the parser reads the line, once for each of their elements."""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path): ast.parse(path.read_text()) for path in sorted(MAGICS.rglob("*.py"))}


def test_every_option_of_a_line_and_every_default_is_read(trees: dict[str, ast.Module]) -> None:
    names = [cls.__name__ for cls in OPTIONS]
    reads = field_reads(trees, Types(trees.values()), [*names, "NBEngine"])
    every = [(cls.__name__, option.name) for cls in OPTIONS for option in fields(cls)]
    every += [("NBEngine", name) for name in NBEngine.class_own_traits(config=True)]
    found_otherwise = READ_BY_NAME.keys() | HANDED_ON.keys()
    assert found_otherwise <= set(every)
    assert [key for key in every if key not in found_otherwise and not reads.used(*key)] == []


def test_the_defaults_of_sampling_are_found_by_their_names() -> None:
    given = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.125, "max_tokens": 9, "seed": 4}
    assert given.keys() == set(SAMPLING_DEFAULTS)
    assert NBEngine(**given).sampling_defaults() == given


@pytest.mark.parametrize("make", [generate_parser, chat_parser, dashboard_parser])
def test_what_every_flag_has_set_is_read(make: object, trees: dict[str, ast.Module]) -> None:
    assert callable(make)
    parser = make()
    destinations = {action.dest for action in parser._actions if action.dest != "help"}
    assert len(destinations) > 6
    assert destinations - names_read(trees) - FROM_WORDS == set()


def test_a_flag_that_nobody_reads_is_found_out(trees: dict[str, ast.Module]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nobody-reads-this")
    assert {action.dest for action in parser._actions} - names_read(trees) >= {"nobody_reads_this"}


def names_read(trees: dict[str, ast.Module]) -> set[str]:
    """The attributes of parsed lines that are read, and the names in tuples, through which others are."""
    found: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if isinstance(node.value, ast.Name) and node.value.id in ("parsed", "options", "chosen"):
                    found.add(node.attr)
            elif isinstance(node, ast.Tuple | ast.List):
                found |= {item.value for item in node.elts if isinstance(item, ast.Constant)}
    return found
