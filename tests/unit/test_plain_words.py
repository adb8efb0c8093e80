"""Docstrings and pages keep to plain words, as far as a program can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "nbengine", "kernels", "magics", "widgets", "benchmarks", "examples", "tests")
FIRST_WORDS = re.compile(r"(What|Whether|Which|How|Who|Whoever|Whose|Why)\b")
"""A text that begins with one of these is a noun clause, and no sentence."""
CANDIDATE = re.compile(rf"[\"']\s*{FIRST_WORDS.pattern}")
"""A file without a match has no string that begins with such a word, and need not be parsed."""
WORDS = re.compile(r"\b(so many|so long|so much|whoever|anew|by which)\b", re.IGNORECASE)
EXAMPLE = """'''Docstring.'''
x = 1
'''How many there are.'''
class A:
    def f(self):
        '''Whether it is.'''
"""


def sources(folder: str) -> list[Path]:
    """List the Python files of a folder, each once: three folders are in `nbengine` by way of a link, too.

    This file is left out, because it has to name the words that it finds.
    """
    files = sorted((ROOT / folder).rglob("*.py"))
    own = Path(__file__)
    return [path for path in files if path != own and not any(parent.is_symlink() for parent in path.parents)]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that stands alone: docstrings of all kinds, and of attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text.strip()


def clauses(source: str) -> list[tuple[int, str]]:
    if not CANDIDATE.search(source):
        return []
    return [(line, text) for line, text in docstrings(source) if FIRST_WORDS.match(text)]


def test_a_docstring_that_is_a_clause_is_found() -> None:
    assert [line for line, _ in clauses(EXAMPLE)] == [3, 6]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_sentence_or_a_name(folder: str) -> None:
    files = sources(folder)
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in clauses(path.read_text())
    ]
    assert not found, "\n".join(found)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", [*map(ROOT.joinpath, FOLDERS), *pages()], ids=lambda path: path.name)
def test_plain_words_are_used(path: Path) -> None:
    files = sources(path.name) if path.is_dir() else [path]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not found, "\n".join(found)
