"""The pages of docs/ are how a newcomer finds things, so what they name must be there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.tools.imports import statements

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text()

_PATH = re.compile(r"`((?:nbengine|magics|kernels|widgets|tests|benchmarks|examples|docs)(?:/[\w.-]+)*)`")
_NAMED = re.compile(r"`((?:nbengine|magics|kernels|widgets)/[\w./]+\.(?:py|js))`\s+`([A-Za-z_.]+)`")
PATHS = sorted({path for page in PAGES.values() for path in _PATH.findall(page)})
NAMED = sorted({named for page in PAGES.values() for named in _NAMED.findall(page)})
MOST_WORDS = 1500
QUESTIONS = (
    "where a preempted request loses its blocks",
    "what ends when the host dies",
    "where an argument's help comes from",
    "which file to open to add a model",
    "which file to open to add a magic",
    "which file to open to add a kernel",
    "which file to open to add a widget panel",
)


# From the bottom up: what is imported lies in the same layer, or in a lower one. A name is that of a package or a module
# of `nbengine`; those of one line know nothing of each other.
LAYERS = (
    ("errors", "plain", "units", "version"),
    ("grammar_schemas",),
    ("checks", "json_schemas"),
    ("sampling_params", "outputs", "pooling_outputs", "metrics", "config"),
    ("kernels",),
    ("ipc",),
    ("runtime",),
    ("kv_cache",),
    ("scheduler",),
    ("distributed",),
    ("sampling",),
    ("models",),
    ("worker",),
    ("cluster",),
    ("executor",),
    ("engine",),
    ("client",),
    ("widgets",),
    ("frontend",),
    ("server",),
    ("inputs", "magics"),
    ("cli",),
)
HEIGHTS = {name: height for height, layer in enumerate(LAYERS) for name in layer}
FOLDERS = {"kernels": ROOT / "kernels", "magics": ROOT / "magics", "widgets": ROOT / "widgets"}

# What whole layers do without, at whatever depth: a frontend and a host start fast and stay small.
WITHOUT = {
    "torch": ("scheduler", "kv_cache", "client", "widgets", "server", "magics"),
    "numpy": ("scheduler", "kv_cache"),
    "zmq": ("scheduler", "kv_cache", "magics"),
}
TIME_OF_DAY = {
    "magics": ("answers/kept", "engines/ledger", "kept_prompts/shelf", "kept_runs/recording", "runs"),
    "widgets": (
        "following/feed",
        "following/feed_state",
        "waves/recording",
        "words",
    ),
    "nbengine": (
        "cli/command",
        "client/calls",
        "client/engines/launch",
        "engine/core/core",
        "engine/core/core_proc",
        "engine/core/transcripts",
        "engine/host/coordinator",
        "engine/host/metrics_server",
        "frontend/observability/tracing",
        "frontend/outputs/transcripts",
        "frontend/prompts/store",
        "frontend/runs/store",
        "runtime/connection",
        "scheduler/trace_stream",
        "server/launch",
        "server/routes/common",
    ),
}
"""The files that read the time of day, which somebody may set: for people, for other programs, and as a stamp. Nothing
ends or begins by it: that goes by a clock that only goes on."""
NAME_EACH_OTHER = ("kernels", "magics", "widgets")
"""Within them values and their views name each other's types, and so do kernels and what they are called with."""
ONLY = {"kernels": ("errors", "units")}
"""The kernels can be taken out and used alone."""

STATE_DTYPES = ("kernels/cpu", "nbengine/models/prepared", "nbengine/sampling", "nbengine/worker/batch")
"""The kernels read and write at the addresses of their tensors, whatever torch's default dtype is in a notebook."""
MAKERS = {"empty", "empty_strided", "full", "ones", "tensor", "zeros"}


def files_of(name: str) -> list[Path]:
    """The files of a package or module of `nbengine`."""
    folder = FOLDERS.get(name, ROOT / "nbengine" / name)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@cache
def imports_of(path: Path, *, of_type_checkers: bool = True) -> set[str]:
    """The modules that a file imports, in functions, too; with or without what only type checkers read."""
    tree = ast.parse(path.read_text())
    skipped = set()
    if not of_type_checkers:
        skipped = {
            id(inner)
            for node in statements(tree)
            if isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            for inner in statements(node)
        }
    found = set()
    for node in statements(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str, path: Path) -> str:
    """The module that a file of a package or module of `nbengine` is."""
    root = FOLDERS.get(name, ROOT / "nbengine" / name).parent
    return ".".join(("nbengine", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def parts_imported(path: Path) -> set[str]:
    """The packages and modules of `nbengine` that a file imports; "" is the root itself."""
    names = [name.split(".") for name in imports_of(path)]
    return {
        parts[1] if len(parts) > 1 and parts[1] in HEIGHTS else ""
        for parts in names
        if parts[0] == "nbengine"
    }


@cache
def names_in(path: Path) -> set[str]:
    """Top-level names, and `Class.method` for methods."""
    if path.suffix == ".js":
        return set(
            re.findall(r"^(?:export )?(?:class|function|const|let) (\w+)", path.read_text(), re.MULTILINE)
        )
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of docs/architecture.md, row by row, without its head."""
    [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_pages_name_files_and_symbols() -> None:
    assert len(PATHS) > 200
    assert len(NAMED) > 150


def test_every_path_in_the_pages_exists() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []


def test_every_name_is_in_its_file() -> None:
    assert [(path, name) for path, name in NAMED if name not in names_in(ROOT / path)] == []


def test_the_page_is_short() -> None:
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(text.split()) <= MOST_WORDS


def test_the_page_has_the_layers_in_their_order() -> None:
    layers = [tuple(re.findall(r"`(\w+)`", row[0])) for row in rows_under("Layers")]
    assert layers == list(LAYERS)


def test_the_page_names_every_room_of_a_large_package() -> None:
    named = "|".join(cell for row in rows_under("Layers") for cell in row[1:])
    tops = [ROOT / "nbengine", *FOLDERS.values()]
    rooms = {init.parent.relative_to(ROOT) for top in tops for init in top.rglob("__init__.py")}
    rooms = {room for room in rooms if len(room.parts) > (2 if room.parts[0] == "nbengine" else 1)}
    assert len(rooms) > 20
    assert [str(room) for room in sorted(rooms) if f"`{room}`" not in named] == []


def test_a_reader_finds_each_answer_in_the_table() -> None:
    answers = dict(rows_under("Where is ..."))
    assert set(QUESTIONS) <= set(answers)
    assert [question for question, answer in answers.items() if not _NAMED.search(answer)] == []


def test_every_part_has_its_layer() -> None:
    here = {path.stem for path in (ROOT / "nbengine").glob("*.py")} - {"__init__"}
    here |= {path.name for path in (ROOT / "nbengine").iterdir() if any(path.glob("*.py"))}
    assert here == set(HEIGHTS)


@pytest.mark.parametrize("name", HEIGHTS)
def test_imports_go_down_the_layers_or_stay(name: str) -> None:
    files = files_of(name)
    assert files
    against = [
        f"{path.relative_to(ROOT)} imports {'nbengine.' + part if part else 'nbengine itself'}"
        for path in files
        for part in parts_imported(path)
        if part != name
        and (not part or HEIGHTS[part] >= HEIGHTS[name] or part not in ONLY.get(name, (part,)))
    ]
    assert not against, "\n".join(against)


@pytest.mark.parametrize("folder", STATE_DTYPES)
def test_tensors_for_kernels_do_not_have_the_default_dtype(folder: str) -> None:
    calls = [
        (path, node)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKERS
        and ast.unparse(node.func.value) == "torch"
    ]
    assert len(calls) > 5
    against = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, node in calls
        if "dtype" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not against, "\n".join(against)


@pytest.mark.parametrize("name", [name for name in HEIGHTS if name not in NAME_EACH_OTHER])
def test_no_modules_import_each_other_in_a_ring(name: str) -> None:
    files = {module_of(name, path): path for path in files_of(name)}
    waiting = {
        module: {each if each in files else each.rpartition(".")[0] for each in imports_of(path)} - {module}
        for module, path in files.items()
    }
    # A module whose imports have all been taken away is in no ring.
    while free := [module for module, imported in waiting.items() if not imported & set(waiting)]:
        for module in free:
            del waiting[module]
    rings = [
        f"{module} imports {', '.join(sorted(imported & set(waiting)))}"
        for module, imported in waiting.items()
    ]
    assert not rings, "\n".join(rings)


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library in WITHOUT for name in WITHOUT[library]]
)
def test_a_layer_does_without_a_library(library: str, name: str) -> None:
    against = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files_of(name)
        for module in imports_of(path, of_type_checkers=False)
        if module.split(".")[0] == library
    ]
    assert not against, "\n".join(against)


_OF_THE_TIME = re.compile(r"\btime\s*\.\s*time|\bfrom\s+time\b|\bdatetime\b")
"""Every file that reads the time of day has this in its text; most others have not, and need not be parsed."""


def reads_time_of_day(path: Path) -> bool:
    """Return whether a file names a function that gives the time of day."""
    text = path.read_text()
    if _OF_THE_TIME.search(text) is None:
        return False
    functions = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    named = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    taken = {tuple(name.split(".")) for name in imports_of(path)}
    return bool(functions & (named | taken))


@pytest.mark.parametrize("folder", [*FOLDERS, "nbengine"])
def test_the_time_of_day_is_read_where_it_is_shown_and_nowhere_else(folder: str) -> None:
    root = ROOT / folder
    found = [
        str(path.relative_to(root).with_suffix(""))
        for path in sorted(root.rglob("*.py"))
        if reads_time_of_day(path)
    ]
    assert tuple(found) == TIME_OF_DAY.get(folder, ())
