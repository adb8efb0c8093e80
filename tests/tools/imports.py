"""The import graph of the product and its tests, read from the source."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("kernels", "magics", "widgets")
"""Folders that are packages of `nbengine` by way of a link."""


def module_of(path: str) -> str:
    """The dotted name of a Python file, which is given relative to the root."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(("nbengine", *parts) if parts[0] in LINKED else parts)


@cache
def source_files() -> dict[str, Path]:
    """The files of the product and of the tests, by module."""
    found = {}
    for top in ("nbengine", *LINKED, "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if not (
                relative.parts[0] == "nbengine" and len(relative.parts) > 1 and relative.parts[1] in LINKED
            ):
                found[module_of(str(relative))] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, at whatever depth; expressions hold none, and are most of a tree."""
    pending = [node]
    while pending:
        parent = pending.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(parent, field, ())
            pending += inner
            yield from inner


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules that a module imports, wherever in its source."""
    files = source_files()
    found = set()
    for node in statements(ast.parse(files[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in found if name in files)


def distances(changed: Iterable[str]) -> dict[str, int]:
    """Count the imports between each module and the nearest changed one; leave out modules without a way there."""
    importers: dict[str, set[str]] = {}
    for module in source_files():
        for imported in imports_of(module):
            importers.setdefault(imported, set()).add(module)
    found = dict.fromkeys(changed, 0)
    queue = deque(found)
    while queue:
        module = queue.popleft()
        for importer in importers.get(module, ()):
            if importer not in found:
                found[importer] = found[module] + 1
                queue.append(importer)
    return found
