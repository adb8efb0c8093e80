"""docs/architecture.md is how a newcomer finds things, so what it names must be there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(
    set(re.findall(r"`((?:nbengine|magics|kernels|widgets|tests|benchmarks|docs)(?:/[\w.-]+)*)`", PAGE))
)
NAMED = sorted(set(re.findall(r"`((?:nbengine|magics|kernels|widgets)/[\w./]+\.py)` `([A-Za-z_.]+)`", PAGE)))


def names_in(path: Path) -> set[str]:
    """Top-level names, and `Class.method` for methods."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_the_page_names_files_and_symbols() -> None:
    assert len(PATHS) > 30
    assert len(NAMED) > 20


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_name_is_in_its_file(path: str, name: str) -> None:
    assert name in names_in(ROOT / path)
