"""The lines of magics that the documentation shows can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.arguments import HelpRequested, split_words
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import Extension

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.name: path.read_text() for path in PAGES}
CODE = re.compile(r"^```\w*\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
PLACES = {"N": "2", "R": "0", "S": "5"}
"""Words that stand for a number in a line, each with a number that it may be."""
GENERATED = [
    (name, block)
    for name, text in TEXTS.items()
    for block, _ in CODE.findall(text)
    if block.startswith("%%generate")
]


def engine_lines(text: str) -> list[str]:
    """The lines of `%engine` in blocks and in sentences."""
    lines = [line for found in CODE.findall(text) for part in found for line in part.splitlines()]
    return [line for line in lines if line.startswith("%engine ")]


def test_lines_are_found() -> None:
    assert "%engine start --tp 3 --pp 2" in engine_lines(TEXTS["README.md"])
    assert sum(len(engine_lines(text)) for text in TEXTS.values()) > 50
    assert len(GENERATED) > 3


@pytest.mark.parametrize("name", TEXTS)
def test_lines_of_engine_are_understood(name: str, shell: InteractiveShell) -> None:
    magics = Extension.loaded[shell].engine
    for line in engine_lines(TEXTS[name]):
        command, *words = split_words(line, "%engine")[1:]
        assert command in magics.command_names, line
        parser = magics.parser_of(command)
        if parser is None:
            assert not words, line
            continue
        try:
            parser.parse_words([PLACES.get(word, word) for word in words])
        except HelpRequested:
            assert words == ["-h"], line


@pytest.mark.parametrize(("name", "cell"), GENERATED)
def test_cells_of_generate_are_understood(name: str, cell: str) -> None:
    line, _, body = cell.partition("\n")
    variables = {
        "topic": "bread",
        "question": "Why?",
        "questions": ["Why?", "How?"],
        "capitals": [{"country": "Peru", "capital": "Lima"}],
        "short": lambda result, row: True,
    }
    assert parse_request(line.removeprefix("%%generate"), body, NBEngine(), variables)
