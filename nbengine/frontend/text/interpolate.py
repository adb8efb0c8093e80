"""This module puts values into texts: `{name}` becomes the value of `name`, other braces stay."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Mapping

_PATH = r"""
        [^\W\d]\w*
        (?: \.[^\W\d]\w* | \[ (?: -?\d+ | "[^"\\\n]*" | '[^'\\\n]*' ) \] )*
"""
_WHOLE_PATH = re.compile(_PATH, re.VERBOSE)
_FIELD = re.compile(rf"(?<!\{{)(?P<open>\{{++)(?P<path>{_PATH})(?P<close>\}}++)", re.VERBOSE)

_UNFINISHED_FIELD = re.compile(r"(?<!\{)(?:\{\{)*\{(?:(?P<owner>[^\W\d]\w*)\.)?(?P<begun>(?:[^\W\d]\w*)?)\Z")

_NEVER_TEXT = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
)
"""Kinds of values that are never meant in a prompt: `{json}` after `import json` is text about JSON."""


class _Unresolved(Exception):
    """An error: the field names nothing that can be put into a prompt."""


def interpolate(text: str, namespace: Mapping[str, object]) -> str:
    """Replace the fields of `text` that resolve in `namespace` by their values.

    A field is a name, followed by attributes and by subscripts that are integers or quoted strings:
    `{name}`, `{obj.attr}`, `{In[3]}`, `{row["key"]}`. It has no spaces and calls nothing. Where it resolves,
    braces double as in `str.format`: `{{x}}` gives `{x}`, `{{{x}}}` gives the value in braces, and a brace
    without a partner on the other side is text. Where it does not resolve, and everywhere else, the text
    comes back byte for byte. Substituted text is not expanded again.
    """

    def replacement(match: re.Match[str]) -> str:
        try:
            value = _resolve(match["path"], namespace)
        except _Unresolved:
            return match[0]
        literal, is_field = divmod(_pairs(match), 2)
        return _in_braces(match, literal, str(value) if is_field else match["path"])

    return _FIELD.sub(replacement, text)


def paths_in(text: str) -> list[str]:
    """List what the fields of a text name, once each, in the order of the text: `name`, `row["key"]`."""
    found = (match for match in _FIELD.finditer(text) if _pairs(match) % 2)
    return list(dict.fromkeys(match["path"] for match in found))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace all fields of `text` by their values, which stand under what the fields name (`paths_in`).

    `{{x}}` gives `{x}` everywhere; substituted text is not expanded again.

    Raises:
        KeyError: a field has no value.
    """

    def replacement(match: re.Match[str]) -> str:
        literal, is_field = divmod(_pairs(match), 2)
        return _in_braces(match, literal, values[match["path"]] if is_field else match["path"])

    return _FIELD.sub(replacement, text)


def look_up(path: str, namespace: Mapping[str, object]) -> object:
    """Return the value that a field could name.

    Raises:
        LookupError: `path` is no such path, or names nothing.
    """
    try:
        if _WHOLE_PATH.fullmatch(path) is not None:
            return _resolve(path, namespace)
    except _Unresolved:
        pass
    raise LookupError(path)


def unfinished_field(text: str) -> tuple[str | None, str] | None:
    """Find the field that is being typed at the end of `text`: its owner and its beginning.

    The owner is None where a variable is typed and not an attribute; the result is None outside of a field.
    """
    match = _UNFINISHED_FIELD.search(text)
    return None if match is None else (match["owner"], match["begun"])


def is_text(value: object) -> bool:
    """Return whether a field that names this value becomes text: modules, classes and functions never do."""
    return not isinstance(value, _NEVER_TEXT)


def _pairs(match: re.Match[str]) -> int:
    return min(len(match["open"]), len(match["close"]))


def _in_braces(match: re.Match[str], literal: int, inner: str) -> str:
    """Put back the braces of a match that are text: `literal` pairs, and those without a partner."""
    pairs = _pairs(match)
    opening, closing = (len(match[side]) - pairs + literal for side in ("open", "close"))
    return "{" * opening + inner + "}" * closing


def _resolve(path: str, namespace: Mapping[str, object]) -> object:
    try:
        value = _value_of(ast.parse(path, mode="eval").body, namespace)
    except (SyntaxError, AttributeError, LookupError, TypeError):
        raise _Unresolved from None
    if not is_text(value):
        raise _Unresolved
    return value


def _value_of(node: ast.expr, namespace: Mapping[str, object]) -> object:
    match node:
        case ast.Name(id=name):
            return namespace[name]
        case ast.Attribute(value=owner, attr=attribute):
            return getattr(_value_of(owner, namespace), attribute)
        case ast.Subscript(value=owner, slice=index):
            container: object = _value_of(owner, namespace)
            return container[ast.literal_eval(index)]  # type: ignore[index]
        case _:
            raise _Unresolved
