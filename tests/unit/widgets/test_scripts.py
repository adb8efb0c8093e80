"""Modules become one text: in order, once each, and whatever is not understood is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbengine.widgets.scripts import STATIC, ScriptError, bundled, stylesheet

INDEX = 'import { twice } from "./twice.js";\n\nexport default { render: () => twice(2) };\n'
TWICE = (
    "// Doubles.\nexport function twice(x) {\n  // Not more.\n  return FACTOR * x;\n}\nconst FACTOR = 2;\n"
)


def write(folder: Path, **modules: str) -> None:
    (folder / "demo").mkdir(exist_ok=True)
    for name, text in modules.items():
        (folder / "demo" / f"{name}.js").write_text(text)


def test_imported_modules_come_first_and_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        index='import {\n  b,\n  c,\n} from "./b.js";\nimport { a } from "./a.js";\nexport default [a, b, c];\n',
        a="export const a = 1;\n",
        b='import { a } from "./a.js";\nexport const b = a + 1;\nexport let c = 3;\n',
    )
    assert bundled("demo", tmp_path) == (
        "// a.js\nconst a = 1;\n\n// b.js\nconst b = a + 1;\nlet c = 3;\n\n// index.js\nexport default [a, b, c];\n"
    )


def test_comment_lines_and_the_word_export_go(tmp_path: Path) -> None:
    write(tmp_path, index=INDEX, twice=TWICE)
    assert bundled("demo", tmp_path) == (
        "// twice.js\nfunction twice(x) {\n  return FACTOR * x;\n}\nconst FACTOR = 2;\n\n"
        "// index.js\nexport default { render: () => twice(2) };\n"
    )


@pytest.mark.parametrize(
    ("twice", "error"),
    [
        ("export const once = 1;\n", "index.js: twice.js does not export twice"),
        ("const twice = 1;\n", "index.js: twice.js does not export twice"),
        ("export default 3;\nexport const twice = 1;\n", "only index.js may have a default export"),
        ("export { twice };\nexport const twice = 1;\n", "cannot be put into one text: export { twice };"),
        ("export * from './other.js';\nexport const twice = 1;\n", "export \\* from"),
        ('import * as a from "./a.js";\nexport const twice = 1;\n', "import \\* as a"),
        ('import { a as b } from "./a.js";\nexport const twice = 1;\n', "import { a as b }"),
        ('import { a } from "https://x.org/a.js";\nexport const twice = 1;\n', "https://x.org"),
        ('import { a } from "../a.js";\nexport const twice = 1;\n', 'from "../a.js"'),
        ('export const twice = () => import("./a.js");\n', 'import\\("./a.js"\\)'),
        ("export const twice = import.meta.url;\n", "import.meta.url"),
        ("export const twice = 1;\nconst { a } = {};\n", "const { a }"),
        ("export const twice = `a\nb`;\n", "twice.js, line 1: a template goes over several lines"),
        ('import { a } from "./gone.js";\nexport const twice = 1;\n', "twice.js wants gone.js"),
        ('import { x } from "./index.js";\nexport const twice = 1;\n', "index.js → twice.js → index.js"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, twice: str, error: str) -> None:
    write(tmp_path, index=INDEX, twice=twice)
    with pytest.raises(ScriptError, match=error):
        bundled("demo", tmp_path)


def test_a_name_of_two_modules_is_refused(tmp_path: Path) -> None:
    write(tmp_path, index=INDEX + "const FACTOR = 3;\n", twice=TWICE)
    with pytest.raises(ScriptError, match=r"index\.js: FACTOR is declared in twice\.js, too"):
        bundled("demo", tmp_path)


def test_an_unknown_widget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"demo wants index\.js"):
        bundled("demo", tmp_path)


def test_style_sheets_are_joined_by_name(tmp_path: Path) -> None:
    write(tmp_path, index=INDEX)
    (tmp_path / "demo" / "b.css").write_text("b{}\n\n")
    (tmp_path / "demo" / "a.css").write_text("a{}")
    assert stylesheet("demo", tmp_path) == "a{}\n\nb{}\n"


@pytest.mark.parametrize("name", ["dashboard", "scores"])
def test_a_widget_s_script_is_one_text_without_danger(name: str) -> None:
    script = bundled(name)
    assert script.count("\nexport ") == 1
    assert "\nexport default {" in script
    assert not re.search(
        r"\b(eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write|Function)\b", script
    )
    assert not re.search(r"https?://(?!www\.w3\.org/)", script + stylesheet(name))
    assert "url(" not in stylesheet(name)


@pytest.mark.parametrize("module", sorted((STATIC / "dashboard").glob("*.js")), ids=lambda path: path.name)
def test_every_module_is_used_and_short(module: Path) -> None:
    assert f"// {module.name}\n" in bundled("dashboard")
    assert len(module.read_text().splitlines()) <= 350
