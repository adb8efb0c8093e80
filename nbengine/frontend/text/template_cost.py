"""This module finds out, without running it, whether a chat template is sure to be rendered with little time
and memory.

A template is a program that somebody else has written. Most are plain: they loop over messages and tools and write what
is in them. Those may be rendered in the caller's own process, which costs least. Whatever is not known here
to be harmless counts as not plain: multiplication, formatting, ranges, macros, loops over texts, texts that
grow, most filters.

A plain template is bounded: no value is much longer than the data, N characters, and the template, L. A loop
makes at most as many rounds as the data has elements, E; one within it over other data as many again, and one
over its own element's part does not add to them. In each round the template's R references write N characters
at most, and its text L.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, nodes
from jinja2.nodes import Node

from nbengine.plain import plain as plain_value

MAX_STEPS = 10**8
"""The most characters that a plain template may write at worst: 100 MB, within a fraction of a second."""

_PLAIN: tuple[type[Node], ...] = (
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Break, nodes.Continue, nodes.Name,
    nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Keyword, nodes.Getattr, nodes.Getitem, nodes.Slice,
    nodes.Filter, nodes.Test, nodes.Call, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not,
    nodes.Concat, nodes.Add, nodes.Sub, nodes.Neg, nodes.Mod,
)  # fmt: skip
_SHRINKING = {"trim", "length", "count", "first", "last", "default", "d"}
_CHOOSING = {"list", "select", "reject", "selectattr", "rejectattr"}
_FILTERS = _SHRINKING | _CHOOSING | {"tojson", "string", "lower", "upper", "capitalize", "title", "int"}
_METHODS = {
    "strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "lower", "upper", "title", "capitalize",
    "items", "keys", "values", "get",
}  # fmt: skip
_LISTS = {"messages", "tools"}
"""The variables that are lists, and never text."""
_MAX_CONSTANT = 64
"""The most characters of a constant argument."""
_MAX_ASSIGNMENTS = 40
"""Each assignment may make a value longer by the data and the template, once."""


class _NotPlain(Exception):
    """The template has something that is not known to be harmless."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a plain template."""

    depth: int
    """The depth to which loops are nested."""
    num_references: int


def is_cheap(source: str, data: Mapping[str, Any], variables: Mapping[str, Any]) -> bool:
    """Return whether a template is sure to take little to render `data`, the messages and tools, with
    `variables`.

    `data` and `variables` are plain values, in lists and dicts.

    Raises:
        Exception: `source` is no template; jinja2 says why.
    """
    cost = _cost(source)
    if cost is None:
        return False
    num_characters, num_elements = _size(data)
    num_more, num_more_elements = _size(variables)
    # It is known of messages alone which parts are texts; elsewhere each character counts as an element, too.
    num_elements += num_more + num_more_elements
    num_characters += num_more
    rounds = max(1, num_elements) ** cost.depth
    return bool(rounds * (cost.num_references * (num_characters + num_elements) + len(source)) <= MAX_STEPS)


def parse(source: str) -> nodes.Template:
    """Return the tree of a template.

    Raises:
        Exception: `source` is no template; jinja2 says why.
    """
    # transformers' own tag marks a part of the text and changes none of it.
    without_tag = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_tag)


@functools.lru_cache(maxsize=32)
def _cost(source: str) -> _Cost | None:
    """Return the cost of a template, None if it is not plain."""
    try:
        return _Reader(parse(source)).cost()
    except _NotPlain:
        return None


class _Reader:
    """A reader that goes through a template's tree once; what it does not know raises `_NotPlain`."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        assignments = list(tree.find_all(nodes.Assign))
        self._assigned = {name for node in assignments for name in _names_in(node.target)}
        lists = _LISTS | self._assigned
        while wrong := {
            name
            for node in assignments
            for name in _names_in(node.target) & lists
            if not (isinstance(node.target, nodes.Name) and _is_list(node.node, lists))
        }:
            lists = lists - wrong
        # The target of a loop may be anything.
        loops = list(tree.find_all(nodes.For))
        for loop in loops:
            lists = lists - _names_in(loop.target)
        self._lists = lists
        self._sources: dict[str, set[str]] = {name: set() for name in self._assigned}
        """The names of values that the template makes, and those of loops over such values, with the names
        from which they are made."""
        for node in assignments:
            for name in _names_in(node.target):
                self._sources[name] |= _names_in(node.node)
        for _ in loops:
            for loop in loops:
                if _names_in(loop.iter) & self._sources.keys():
                    for name in _names_in(loop.target):
                        self._sources.setdefault(name, set()).update(_names_in(loop.iter))
        if len(assignments) > _MAX_ASSIGNMENTS:
            raise _NotPlain

    def cost(self) -> _Cost:
        num_references = sum(1 for _ in self._tree.find_all(nodes.Name))
        return _Cost(self._depth(self._tree.body, None, 0), num_references)

    def _depth(self, body: Sequence[Node], element: str | None, rounds: int) -> int:
        """Return the most loops within loops of a part of the template, which has `rounds` loops around
        it."""
        deepest = rounds
        for node in body:
            if isinstance(node, nodes.For):
                deepest = max(deepest, self._loop(node, element, rounds))
            elif isinstance(node, nodes.If):
                _check(node.test)
                for part in (node.body, node.elif_, node.else_):
                    deepest = max(deepest, self._depth(part, element, rounds))
            elif isinstance(node, nodes.Assign):
                self._check_assignment(node)
            else:
                _check(node)
        return deepest

    def _loop(self, loop: nodes.For, element: str | None, rounds: int) -> int:
        if loop.recursive or not _is_list(loop.iter, self._lists):
            raise _NotPlain
        for part in (loop.iter, loop.test):
            if part is not None:
                _check(part)
        is_part = element is not None and element not in self._assigned and _root(loop.iter) == element
        target = loop.target.name if isinstance(loop.target, nodes.Name) else None
        deepest = self._depth(loop.body, target, rounds if is_part else rounds + 1)
        return max(deepest, self._depth(loop.else_, element, rounds))

    def _check_assignment(self, node: nodes.Assign) -> None:
        """Check that values stay short: a value made from others that the template has made may only be
        longer than one of them, and only if that one does not come from it. In a list it would be longer as
        text."""
        if not isinstance(node.target, (nodes.Name, nodes.NSRef)):
            raise _NotPlain
        _check(node.node)
        parts = [node.node, *node.node.find_all(Node)]
        made = [part.name for part in parts if isinstance(part, nodes.Name) and part.name in self._sources]
        if not made:
            return
        for part in parts:
            if isinstance(part, (nodes.List, nodes.Tuple)) or (
                isinstance(part, nodes.Filter) and part.name not in _SHRINKING | _CHOOSING
            ):
                raise _NotPlain
        if any(isinstance(part, (nodes.Concat, nodes.Add)) for part in parts) and (
            len(made) > 1 or node.target.name in self._origins(made[0])
        ):
            raise _NotPlain

    def _origins(self, name: str) -> set[str]:
        """Return the name of a value and those from which it may come."""
        found: set[str] = set()
        open_names = {name}
        while open_names:
            found |= open_names
            open_names = {source for n in open_names for source in self._sources.get(n, ())} - found
        return found


def _check(expression: Node) -> None:
    for node in (expression, *expression.find_all(Node)):
        if not isinstance(node, _PLAIN):
            raise _NotPlain
        if isinstance(node, nodes.Filter):
            _check_filter(node)
        elif isinstance(node, nodes.Call):
            _check_call(node)
        elif isinstance(node, nodes.Mod) and not _counts_rounds(node.left):
            # With a text on the left, `%` is formatting.
            raise _NotPlain


def _check_filter(node: nodes.Filter) -> None:
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    is_fixed = node.dyn_args is None and node.dyn_kwargs is None and all(map(_is_short, arguments))
    # With an indent, deeply nested data is written many times as long as it is.
    indents = node.name == "tojson" and (node.args or any(keyword.key == "indent" for keyword in node.kwargs))
    if node.name not in _FILTERS or not is_fixed or indents:
        raise _NotPlain


def _check_call(node: nodes.Call) -> None:
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    match node.node:
        case nodes.Name(name="raise_exception"):
            is_plain = True
        case nodes.Name(name="namespace"):
            is_plain = not node.args and all(_is_short(value) or _is_number(value) for value in arguments)
        case nodes.Name(name="strftime_now") | nodes.Getattr():
            name = node.node.attr if isinstance(node.node, nodes.Getattr) else None
            is_plain = (name is None or name in _METHODS) and all(map(_is_short, arguments))
        case _:
            is_plain = False
    if not is_plain or node.dyn_args is not None or node.dyn_kwargs is not None:
        raise _NotPlain


def _is_short(node: Node) -> bool:
    """Return whether an expression is a constant of which nothing large can be made."""
    if isinstance(node, nodes.Tuple):
        return all(map(_is_short, node.items))
    if not isinstance(node, nodes.Const):
        return False
    return (
        len(node.value) <= _MAX_CONSTANT
        if isinstance(node.value, str)
        else abs(node.value or 0) <= _MAX_CONSTANT
    )


def _is_number(node: Node) -> bool:
    """Return whether an expression is a count, or a count that something is subtracted from."""
    if isinstance(node, nodes.Sub):
        return _is_number(node.left) and _is_short(node.right)
    return isinstance(node, nodes.Filter) and node.name in ("length", "count")


def _is_list(node: Node, lists: set[str]) -> bool:
    """Return whether an expression is a list, or anything else that has elements, and no text."""
    match node:
        case nodes.Name(name=name):
            return name in lists
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_list(inner, lists)
        case nodes.Getitem(arg=nodes.Const(value="tool_calls")) | nodes.Getattr(attr="tool_calls"):
            # `render_chat` has seen to that.
            return True
        case nodes.Filter(node=Node() as inner, name=name):
            return name in _CHOOSING and _is_list(inner, lists)
        case nodes.Call(node=nodes.Getattr(attr="items")) | nodes.List():
            return True
        case nodes.Or(left=left, right=right):
            return _is_list(left, lists) and _is_list(right, lists)
    return False


def _counts_rounds(node: Node) -> bool:
    """Return whether an expression is the number of a loop's round, perhaps with something added."""
    if isinstance(node, (nodes.Add, nodes.Sub)):
        return _counts_rounds(node.left) and isinstance(node.right, nodes.Const)
    return isinstance(node, nodes.Getattr) and node.attr in ("index", "index0") and _root(node) == "loop"


def _names_in(node: Node) -> set[str]:
    return {part.name for part in (node, *node.find_all(Node)) if isinstance(part, (nodes.Name, nodes.NSRef))}


def _root(node: Node) -> str | None:
    """Return the name of the variable from which an expression takes something."""
    while isinstance(node, (nodes.Getattr, nodes.Getitem, nodes.Filter, nodes.Call)):
        inner = node.node
        if inner is None:
            return None
        node = inner
    return node.name if isinstance(node, nodes.Name) else None


def _size(data: object) -> tuple[int, int]:
    """Count the characters and elements of plain values."""
    characters = elements = 0
    parts = [data]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, Mapping):
            elements += len(part)
            parts += [*part.keys(), *part.values()]
            if isinstance(part.get("tool_calls"), str):
                # `_is_list` takes `tool_calls` for a list; if it is a text, a loop over it has a round for
                # each character.
                elements += len(part["tool_calls"])
        elif isinstance(part, (list, tuple)):
            elements += len(part)
            parts += part
        else:
            characters += 32 if isinstance(part, (bool, float, type(None))) else len(str(part))
    return characters, elements


def plain(value: Any) -> Any:
    """Copy a value of the caller's, made of texts, numbers, lists and dicts; anything else becomes a text
    that names its type."""
    value = plain_value(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"
