"""Input transformers that keep prompts byte for byte, and let a kernel's cell await its answer."""

from __future__ import annotations

import ast
import asyncio
import re
import threading
import tokenize
from collections.abc import Iterator
from typing import TypeGuard

from IPython.core.interactiveshell import InteractiveShell

from nbengine.widgets.live import in_kernel

AWAITED = {"generate": "GenerateMagics", "chat": "ChatMagics", "runs": "RunsMagics"}
"""Magics that may ask an engine, and the class whose coroutine `stream` a kernel's cell awaits in their place."""

_NAMES = "|".join(AWAITED)
_CELL = re.compile(rf"%%(?P<magic>{_NAMES}|prompt)(?=\s|$)")
_QUESTION = re.compile(rf"(?P<lead>\s*(?:[\w.\[\]'\", ]+=\s*)?)%(?P<magic>{_NAMES})[ \t]+(?P<rest>.*\?)\s*")
_COMMAND_HELP = re.compile(r"\s*%engine[ \t]+(?P<command>\w+)[^?]*\?{1,2}\s*")
_MAGIC_CALLS = ("run_line_magic", "run_cell_magic")


def keep_prompts(lines: list[str]) -> list[str]:
    """Turn `%%generate`, `%%chat` and `%%prompt` cells and `%generate …?` lines into calls before IPython edits them.

    IPython would dedent a body, strip `>>>` from it and drop its trailing blanks; a line that ends with a
    question mark would become a request for help on its last word. `%engine start?` asks for the help of that
    command.
    """
    start = next((index for index, line in enumerate(lines) if not line.isspace()), None)
    cell = None if start is None else _CELL.match(lines[start])
    if start is not None and cell is not None:
        magic, arguments = cell["magic"], lines[start][cell.end() :].strip()
        body = "".join(lines[start + 1 :])
        if not body.strip() and magic in AWAITED:
            return [f"get_ipython().run_line_magic({magic!r}, {arguments!r})\n"]
        return [f"get_ipython().run_cell_magic({magic!r}, {arguments!r}, {body!r})\n"]
    kept: list[str] = []
    for line in lines:
        call = _line_call(line)
        kept.append(line if call is None or _inside_string(kept) else call)
    return kept


def _line_call(line: str) -> str | None:
    """Return the call that a line with a question mark at its end means; None if it is none of ours."""
    if (match := _QUESTION.fullmatch(line)) is not None:
        return f"{match['lead']}get_ipython().run_line_magic({match['magic']!r}, {match['rest']!r})\n"
    if (match := _COMMAND_HELP.fullmatch(line)) is not None:
        return f"get_ipython().run_line_magic('engine', {'help ' + match['command']!r})\n"
    return None


# IPython calls transformers on incomplete input, too, to see whether it is complete; this exempts ours.
keep_prompts.has_side_effects = True  # type: ignore[attr-defined]


class AwaitGenerate:
    """A transformer that turns calls of the magics in `AWAITED` at the top level of a cell into awaits.

    While the cell awaits, the kernel's event loop runs, so that interrupts and widget messages arrive. A cell
    that runs inside another one (`%%time`, `get_ipython().run_cell(…)`) cannot await and keeps the blocking
    call.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._running = threading.local()

    def on_pre_execute(self) -> None:
        """Note that a cell begins in this thread."""
        self._running.depth = self._depth + 1

    def on_post_execute(self) -> None:
        """Note that a cell has ended in this thread."""
        self._running.depth = max(0, self._depth - 1)

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines)
        if not any(f"_magic({name!r}" in source for name in AWAITED) or not self._can_await():
            return lines
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return lines  # compiling the cell reports it
        return _with_awaits(source, list(_awaited_calls(tree.body))).splitlines(keepends=True)

    @property
    def _depth(self) -> int:
        return getattr(self._running, "depth", 0)

    def _can_await(self) -> bool:
        shell = self._shell
        if not in_kernel(shell) or not shell.autoawait or self._depth:
            return False
        if shell.loop_runner is not shell.loop_runner_map["asyncio"][0]:
            return False
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True


def _awaited_calls(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    """Find calls of the magics that are statements or assigned values, outside functions and classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Expr | ast.Assign) and _is_awaited(statement.value):
            yield statement.value
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _awaited_calls(child.body)
        nested = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        yield from _awaited_calls(nested)


def _is_awaited(node: ast.expr) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"), args=[]), attr=attribute),
            args=[ast.Constant(value=str(name)), _, *_],
            keywords=[],
        ):
            return attribute in _MAGIC_CALLS and name in AWAITED
    return False


def _with_awaits(source: str, calls: list[ast.Call]) -> str:
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        begin = starts[call.lineno - 1] + call.col_offset
        end = starts[(call.end_lineno or call.lineno) - 1] + (call.end_col_offset or 0)
        arguments = ", ".join(ast.unparse(argument) for argument in call.args[1:])
        home = AWAITED[ast.literal_eval(call.args[0])]
        awaited = f"await get_ipython().magics_manager.registry[{home!r}].stream({arguments})"
        data = data[:begin] + awaited.encode() + data[end:]
    return data.decode()


def _inside_string(lines: list[str]) -> bool:
    """Return whether a line after `lines` would continue a string literal."""
    try:
        for _ in tokenize.generate_tokens(iter(lines).__next__):
            pass
    except tokenize.TokenError as error:
        return any(sign in str(error) for sign in ("multi-line string", "triple-quoted"))
    except IndentationError:
        return False
    return False
