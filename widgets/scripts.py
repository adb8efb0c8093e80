"""The widgets' scripts and style sheets, each as one text, which is what anywidget takes.

A widget's script lies in `static/NAME/` as ES modules, `index.js` first; the browser can load them as they
are. For anywidget they are put one after another. Only modules that allow that are accepted: imports are
`import { a, b } from "./x.js";`, or from "../common/x.js" what several widgets share, exports stand before a declaration (in `index.js` also `export default`), a
name is declared at the top level of one module only, and modules do not import each other in circles.
"""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(
    r'^import \{\s*((?:[\w$]+,\s*)*[\w$]+),?\s*\} from "(?:\./([\w-]+\.js)|(\.\./common/[\w-]+\.js))";\n',
    re.MULTILINE,
)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let)\b)", re.MULTILINE)
_DECLARATION = re.compile(
    r"^(export )?(?:async function|function\*?|class|const|let|var) *([\w$]+)", re.MULTILINE
)
_UNKNOWN = re.compile(
    r"^(?:import\b|export (?!default\b)|const [\[{]|let [\[{]|var\b).*|\bimport\(.*|\bimport\.meta\b.*",
    re.MULTILINE,
)
_COMMENT_LINE = re.compile(r"^ *//.*\n", re.MULTILINE)


class ScriptError(ValueError):
    """An error: a module contains something that cannot be put into one text."""


def bundled(name: str, folder: Path = STATIC) -> str:
    """Put the modules of the widget `name` together as the text of one ES module.

    Raises `ScriptError` where a module contains something that is not understood.
    """
    order: dict[str, str] = {}
    declared: dict[str, str] = {}
    _visit(folder / name, "index.js", [], order, declared)
    return "\n".join(f"// {module}\n{text.strip()}\n" for module, text in order.items())


def stylesheet(name: str, folder: Path = STATIC) -> str:
    """Join the style sheets of the widget `name`, in the order of their names, and behind them what all widgets share."""
    paths = [path for part in (name, "common") for path in sorted((folder / part).glob("*.css"))]
    return "\n".join(path.read_text("utf-8").strip() + "\n" for path in paths)


def _visit(
    folder: Path, module: str, above: list[str], order: dict[str, str], declared: dict[str, str]
) -> set[str]:
    """Put a module behind the modules that it imports, and return the names that it exports."""
    if module in above:
        raise ScriptError(f"modules import each other: {' → '.join([*above, module])}")
    path = folder / module
    if not path.is_file():
        raise ScriptError(f"{above[-1] if above else folder.name} wants {module}, and {path} is not there")
    text = path.read_text("utf-8")
    declarations = _DECLARATION.findall(text)
    exported = {name for is_exported, name in declarations if is_exported}
    if module in order:
        return exported
    for names, own, common in _IMPORT.findall(text):
        imported = own or common
        missing = set(re.split(r",\s*", names)) - _visit(folder, imported, [*above, module], order, declared)
        if missing:
            raise ScriptError(f"{module}: {imported} does not export {', '.join(sorted(missing))}")
    for _, name in declarations:
        if name in declared:
            raise ScriptError(f"{module}: {name} is declared in {declared[name]}, too")
        declared[name] = module
    order[module] = _body(module, text)
    return exported


def _body(module: str, text: str) -> str:
    """Return a module's text without imports, exports and lines of comment."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.count("`") % 2:
            raise ScriptError(f"{module}, line {number}: a template goes over several lines: {line.strip()}")
    text = _EXPORT.sub("", _IMPORT.sub("", _COMMENT_LINE.sub("", text)))
    unknown = _UNKNOWN.search(text)
    if unknown:
        raise ScriptError(f"{module}: cannot be put into one text: {unknown[0].strip()}")
    if module != "index.js" and re.search(r"^export default\b", text, re.MULTILINE):
        raise ScriptError(f"{module}: only index.js may have a default export")
    return text
