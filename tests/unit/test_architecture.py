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


# What each part may not import, at whatever depth: data flows one way.
FORBIDDEN = {
    "nbengine/scheduler": ("torch", "zmq", "numpy", "nbengine.engine", "nbengine.worker", "nbengine.client"),
    "nbengine/kv_cache": ("torch", "zmq", "numpy", "nbengine.engine", "nbengine.worker", "nbengine.client"),
    "nbengine/models": ("nbengine.engine", "nbengine.client", "nbengine.frontend"),
    "nbengine/engine": ("nbengine.frontend", "nbengine.magics", "nbengine.widgets"),
    "nbengine/client": ("torch", "nbengine.frontend", "nbengine.magics", "nbengine.widgets"),
    "nbengine/frontend": ("nbengine.magics",),
    "kernels": ("nbengine.engine", "nbengine.models"),
    "widgets": ("nbengine.magics", "nbengine.engine", "torch"),
    "magics": ("torch", "zmq"),
}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports when it is run; what only type checkers read does not count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


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


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_data_flows_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    against = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imports_of(path)
        for forbidden in FORBIDDEN[folder]
        if module == forbidden or module.startswith(f"{forbidden}.")
    ]
    assert not against, "\n".join(against)
