"""The package list is written by hand (see pyproject.toml), so it is compared with the tree."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("kernels", "magics", "widgets")


def packages_in_tree() -> set[str]:
    found = {"nbengine"}
    for top in (ROOT / "nbengine", *(ROOT / name for name in LINKED)):
        prefix = "nbengine" if top.name == "nbengine" else f"nbengine.{top.name}"
        if any(top.glob("*.py")):
            found.add(prefix)
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(top).parts
            if parts and parts[0] not in LINKED:
                found.add(".".join((prefix, *parts)))
    return found


def test_package_list_is_the_tree() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_in_tree()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_relative_links(name: str) -> None:
    link = ROOT / "nbengine" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_kernels_has_no_init() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [
        "nbengine",
        "nbengine.magics.extension",
        "nbengine.frontend.async_llm",
        "nbengine.engine.host.supervisor",
        "nbengine.engine.host.ray_launcher",
        "nbengine.cluster.keeper",
    ],
)
def test_light_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numba', 'ray') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
