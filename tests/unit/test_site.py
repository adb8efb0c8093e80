"""The site that `make docs` builds has every page, and its reference every public name.

The build itself checks links, headings and members, and needs the extra `docs`; these tests do not.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import yaml
from IPython.core.magic import Magics

import nbengine
from nbengine.magics.chat import ChatMagics
from nbengine.magics.dashboard import DashboardMagics
from nbengine.magics.engine import EngineMagics
from nbengine.magics.generate import GenerateMagics
from nbengine.magics.runs import RunsMagics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS = DOCS / "hooks"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MAGICS: tuple[type[Magics], ...] = (ChatMagics, DashboardMagics, EngineMagics, GenerateMagics, RunsMagics)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a hook by name, as MkDocs does: with its folder on the path."""
    monkeypatch.syspath_prepend(str(HOOKS))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def settings() -> dict[str, Any]:
    """Read mkdocs.yml, without the functions that it names by Python's tags."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def in_navigation(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    match part:
        case str():
            yield part
        case dict():
            yield from (page for below in part.values() for page in in_navigation(below))
        case list():
            yield from (page for below in part for page in in_navigation(below))


def directives() -> Counter[str]:
    return Counter(
        name for path in REFERENCE for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
    )


def test_every_page_is_in_the_navigation_once(hook: Any) -> None:
    pages = [*hook("places").OUTSIDE, *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]
    assert sorted(in_navigation(settings()["nav"])) == sorted(pages)


def test_every_file_that_the_settings_name_exists() -> None:
    stated = settings()
    python = stated["plugins"][1]["mkdocstrings"]["handlers"]["python"]["options"]
    extensions = [extension.partition(":")[0] for extension in python["extensions"]]
    assets = [f"docs/{name}" for name in (*stated["extra_css"], stated["theme"]["favicon"])]
    assert [name for name in (*stated["hooks"], *extensions, *assets) if not (ROOT / name).is_file()] == []


def test_the_reference_has_every_public_name_once() -> None:
    found = directives()
    assert {name: found[f"nbengine.{name}"] for name in nbengine.__all__} == dict.fromkeys(
        nbengine.__all__, 1
    )


def test_everything_in_the_reference_exists() -> None:
    for name in directives():
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name


def test_every_magic_has_its_help_in_the_reference() -> None:
    text = (DOCS / "reference" / "magics.md").read_text()
    names = {name for magics in MAGICS for kind in magics.magics.values() for name in kind}
    assert {"engine", "generate", "chat", "dashboard"} <= names
    assert [
        name
        for name in sorted(names)
        if not re.search(rf"^## `%%?{name}`\n\n<!-- help: ", text, re.MULTILINE)
    ] == []
    for module, member in re.findall(r"<!-- help: ([\w.]+):(\w+) -->", text):
        assert hasattr(importlib.import_module(module), member), member


@pytest.mark.parametrize(
    ("page", "link", "translated"),
    [
        ("index.md", "docs/guide.md", "guide.md"),
        ("index.md", "docs/guide.md#ask", "guide.md#ask"),
        ("index.md", "docs/images/notebook.png", "images/notebook.png"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("guide.md", "../examples/01_quickstart.ipynb", "examples/01_quickstart.md"),
        ("guide.md", "../examples/scripts", "examples/scripts.md"),
        ("guide.md", "models.md", "models.md"),
        ("architecture.md", "../README.md", "index.md"),
        ("examples/01_quickstart.md", "02_tensor_parallel.ipynb", "02_tensor_parallel.md"),
        ("examples/01_quickstart.md", "../docs/guide.md", "../guide.md"),
        ("reference/engines.md", "../arguments.md", "../arguments.md"),
        ("guide.md", "../nbengine/config/engine.py", None),
        ("guide.md", "../no/such/file.py", "../no/such/file.py"),
        ("guide.md", "no_such_page.md", "no_such_page.md"),
        ("guide.md", "#ask", "#ask"),
        ("guide.md", "https://example.org/docs/guide.md", "https://example.org/docs/guide.md"),
    ],
)
def test_a_link_leads_to_the_page_made_of_its_target(
    hook: Any, page: str, link: str, translated: str | None
) -> None:
    assert hook("places").translated(link, page) == translated


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/css">', ["//fonts.example/css"]),
        ('<link rel="preconnect" href="https://fonts.example">', ["https://fonts.example"]),
        ('<img src="http://host.example/a.png">', ["http://host.example/a.png"]),
        ('<img srcset="https://host.example/a.png 2x">', ["https://host.example/a.png 2x"]),
        ('<svg><image href="https://host.example/a.svg"/></svg>', ["https://host.example/a.svg"]),
        ('<p style="background:url(https://host.example/b)">', ["https://host.example/b"]),
        ('@import "https://host.example/c.css";', ["https://host.example/c.css"]),
        ('<a href="https://host.example">a link</a>', []),
        ('<link rel="canonical" href="https://host.example">', []),
        ('<img src="images/a.png"><script src="../x.js"></script>', []),
        ("<p>https://host.example</p>", []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(hook: Any, html: str, found: list[str]) -> None:
    assert hook("self_contained").loaded_from_elsewhere(html) == found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_page_has_its_cells_and_outputs(hook: Any, path: Path) -> None:
    page = hook("notebooks").notebook_page(path)
    cells = nbformat.read(path, as_version=4).cells
    assert page.lstrip().startswith("# ")
    for cell in cells:
        assert cell.source in page
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert page.count('<div class="notebook-output"') == len(outputs) > 0
    html = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert html
    assert all(text.replace("`", "&#96;") in page for text in html)


def test_an_output_cannot_end_its_own_frame(hook: Any, tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("print(answer)")
    text = "<b>&\n```python\n\x1b[31mred\x1b[0m\n```\n"
    cell.outputs = [
        nbformat.v4.new_output("stream", text=text),
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=["<i>", "last line"]),
    ]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    page = hook("notebooks").notebook_page(path)
    assert "<pre>&lt;b&gt;&amp;\n&#96;&#96;&#96;python\nred\n&#96;&#96;&#96;\n</pre></div>" in page
    assert "<pre>&lt;i&gt;\nlast line</pre></div>" in page


def test_the_page_of_scripts_has_all_of_them(hook: Any) -> None:
    places = hook("places")
    page = hook("notebooks").scripts_page(places.SCRIPTS)
    assert places.SCRIPTS
    for path in places.SCRIPTS:
        assert f"\n## {path.name}\n" in page
        assert path.read_text().partition('"""\n')[2].partition("\n\n")[2].strip() in page


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("text\n- item\n- item\n", "text\n\n- item\n- item\n"),
        ("text\n1. item\ngoes on\n2. item\n", "text\n\n1. item\ngoes on\n2. item\n"),
        ("text\n| a | b |\n|---|---|\n", "text\n\n| a | b |\n|---|---|\n"),
        ("- item\n| a |\n", "- item\n\n| a |\n"),
        ("```\ncode\n- code\n```\n- item\n", "```\ncode\n- code\n```\n\n- item\n"),
        ("````\n```\n- code\n````\n", "````\n```\n- code\n````\n"),
        ("text\n\n- item\n\n| a |\n", "text\n\n- item\n\n| a |\n"),
    ],
)
def test_lists_and_tables_are_such_in_the_site_too(hook: Any, text: str, meant: str) -> None:
    assert hook("commonmark").spaced(text) == meant


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lists_have_one_level(path: Path) -> None:
    """A code host counts two spaces as the next level of a list, and the site's Markdown four."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ +(?:[-*+]|\d+\.) .*", text, re.MULTILINE) == []
