"""The lines that the documentation shows can be typed: magics, commands of a shell, Python."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.cli import command
from nbengine.magics.arguments import HelpRequested, split_words
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.arguments import parse_chat
from nbengine.magics.engines.arguments import start_parser
from nbengine.magics.extension import Extension
from nbengine.server.arguments import add_server_arguments

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


BLOCKS = [
    (name, block)
    for name, text in TEXTS.items()
    for block in re.findall(r"^```python\n(?!%)(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]


def lines_of(text: str, beginning: str) -> list[str]:
    """The lines in blocks and in sentences that begin in one way, without comments."""
    lines = [line for found in CODE.findall(text) for part in found for line in part.splitlines()]
    return [line.partition("  #")[0] for line in lines if line.startswith(beginning)]


def engine_lines(text: str) -> list[str]:
    """The lines of `%engine` in blocks and in sentences."""
    return lines_of(text, "%engine ")


def test_lines_are_found() -> None:
    assert "%engine start --tp 3 --pp 2" in engine_lines(TEXTS["README.md"])
    assert sum(len(engine_lines(text)) for text in TEXTS.values()) > 50
    assert len(GENERATED) > 3
    assert len(BLOCKS) > 10
    assert sum(len(lines_of(text, "nbengine ")) for text in TEXTS.values()) > 15
    assert sum(len(lines_of(text, "%config ")) for text in TEXTS.values()) > 2


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


def temperature(city: str) -> float:
    """Tell the temperature of a city.

    Args:
        city: The name of the city.
    """
    return len(city)


def test_lines_of_chats_are_understood() -> None:
    cells = [
        block for text in TEXTS.values() for block, _ in CODE.findall(text) if block.startswith("%%chat")
    ]
    assert cells
    for cell in cells:
        line, _, body = cell.partition("\n")
        parse_chat(line.removeprefix("%%chat"), body, NBEngine(), str, {"temperature": temperature})


@pytest.mark.parametrize("name", TEXTS)
def test_commands_of_the_shell_are_understood(name: str) -> None:
    for line in lines_of(TEXTS[name], "nbengine "):
        words = [PLACES.get(word, word.strip("[]")) for word in shlex.split(line)[1:]]
        if words == ["--version"]:
            continue
        _, further = command._parser().parse_known_args(words)
        if words[0] not in ("fit", "serve", "start", "chat"):
            assert further == [], line
            continue
        parser = start_parser(words[0], f"nbengine {words[0]}")
        if words[0] == "serve":
            add_server_arguments(parser)
        try:
            parser.parse_words(further)
        except HelpRequested:
            assert further == ["--help"], line


def test_settings_of_the_notebook_exist() -> None:
    settings = [name for text in TEXTS.values() for name in re.findall(r"\bNBEngine\.(\w+) =", text)]
    assert settings
    assert set(settings) <= set(NBEngine.class_trait_names())


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_python_can_be_read_and_what_it_imports_exists(name: str, block: str) -> None:
    # Top-level await is what cells can do.
    tree = compile(block, name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nbengine"):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
