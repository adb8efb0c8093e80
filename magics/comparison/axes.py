"""The axes of a comparison: lists in flags, `--each` over the notebook's collections, several engines."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import did_you_mean
from nbengine.frontend.text.interpolate import look_up

EACH = "each"
"""The name of an element where there is only one `--each`, besides its own name."""
RAISE_LIMIT = " (`%config NBEngine.max_answers` allows more)"
_NAMED_SOURCE = re.compile(r"(?P<name>[^\W\d]\w*)=(?!=)(?P<source>.+)", re.DOTALL)
_LAST_NAME = re.compile(r"""(?P<name>[^\W\d]\w*)["']?\]?\Z""")
_BARE_SUBSCRIPT = re.compile(r"\[([^\W\d][^]\"'\\\n]*)\]")
_PLAIN = (str, int, float, bool, type(None))
_PLAIN_KINDS = "biufU"
"""Kinds of numpy scalars that equal one of Python's types; times are not among them."""


class Several(tuple[Any, ...]):
    """Several values of one flag, which are compared with each other."""

    __slots__ = ()


@dataclass(frozen=True)
class Choice:
    """One value of an axis: `value` goes into the request, `setting` stands for it in settings and tables."""

    value: Any
    setting: Any


@dataclass(frozen=True)
class Axis:
    """Something that varies; settings have its value under `name`."""

    name: str
    choices: tuple[Choice, ...]

    @property
    def settings(self) -> list[Any]:
        """List what stands for the values in settings and tables, in order."""
        return [choice.setting for choice in self.choices]


class Bindings(Mapping[str, object]):
    """A row's own variables above the notebook's; it notes which of the row's own were looked up."""

    def __init__(self, own: Mapping[str, object], base: Mapping[str, object]) -> None:
        self.used: set[str] = set()
        self._own = own
        self._base = base

    @property
    def own(self) -> frozenset[str]:
        """Return the names of the row's own variables."""
        return frozenset(self._own)

    def __getitem__(self, name: str) -> object:
        if name in self._own:
            self.used.add(name)
            return self._own[name]
        return self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own})

    def __len__(self) -> int:
        return len({**self._base, **self._own})


def one_or_several(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a reader of `0.7`, and of `0,0.7,1` or `[0, 0.7, 1]` as `Several`, with the errors of `kind`."""

    def read(text: str) -> Any:
        inner = text.strip()
        if inner[:1] + inner[-1:] in ("[]", "()"):
            inner = inner[1:-1].removesuffix(",")
        if "," not in inner:
            return kind(inner)
        return several(map(kind, inner.split(",")))

    read.__name__ = kind.__name__
    return read


def several(values: Iterable[Any]) -> Any:
    """Return `Several` of these values, or the only one."""
    found = Several(values)
    return found[0] if len(found) == 1 else found


def flag_axis(flag: str, name: str, values: Several, prog: str) -> Axis:
    """Make the axis of a flag with several values.

    Raises:
        UsageError: a value appears twice.
    """
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UsageError(f"{prog}: {flag}: {value!r} appears twice")
    return Axis(name, tuple(Choice(value, value) for value in values))


def each_axis(spec: str, namespace: Mapping[str, object], prog: str, limit: int) -> Axis:
    """Make the axis of `--each SOURCE` or `--each NAME=SOURCE`.

    The source is a variable, with attributes and subscripts as in a prompt, or words with commas between
    them. A mapping gives its keys as settings, and a table its rows by their index; otherwise an element that
    is a string, a number or a truth value stands for itself, and any other one is known by its position.

    Raises:
        UsageError: there is no such variable, it has nothing to iterate over, or more than `limit` elements.
    """
    match = _NAMED_SOURCE.fullmatch(spec)
    source = (match["source"] if match else spec).strip()
    last = _LAST_NAME.search(source)
    name = match["name"] if match else last["name"] if last else EACH
    try:
        # Reading the line has taken the quotes out of df["question"].
        collection = look_up(_BARE_SUBSCRIPT.sub(r'["\1"]', source), namespace)
    except LookupError:
        collection = _words(source)
        name = match["name"] if match else EACH
    if collection is None:
        raise UsageError(f"{prog}: --each {spec}: no variable {source!r}{did_you_mean(source, namespace)}")
    choices = tuple(itertools.islice(_elements(collection, spec, prog), limit + 1))
    if not choices:
        raise UsageError(f"{prog}: --each {spec}: {source} is empty")
    if len(choices) > limit:
        raise UsageError(f"{prog}: --each {spec}: more than {limit} elements{RAISE_LIMIT}")
    return Axis(name, choices)


def bindings_of(axes: Sequence[Axis], row: Sequence[Choice], base: Mapping[str, object]) -> Bindings:
    """Make the variables of a row: each element under its axis's name, and a single one under `each`, too."""
    own = {axis.name: choice.value for axis, choice in zip(axes, row, strict=True)}
    if len(row) == 1:
        own[EACH] = row[0].value
    return Bindings(own, base)


def _words(source: str) -> list[Any] | None:
    if source.startswith("[") and source.endswith("]"):
        try:
            return list(json.loads(source))
        except json.JSONDecodeError:
            source = source[1:-1]
    return [word.strip() for word in source.split(",")] if "," in source else None


def _elements(collection: Any, spec: str, prog: str) -> Iterator[Choice]:
    if isinstance(collection, Mapping):
        return (Choice(value, _unwrapped(key)) for key, value in collection.items())
    if hasattr(collection, "iterrows"):
        return (Choice(row, _unwrapped(index)) for index, row in collection.iterrows())
    if isinstance(collection, str | bytes) or not isinstance(collection, Iterable):
        kind = type(collection).__name__
        raise UsageError(f"{prog}: --each {spec}: needs a list, dict or column to go through, got {kind}")
    return (
        Choice(value, plain if isinstance(plain := _unwrapped(value), _PLAIN) else position)
        for position, value in enumerate(collection)
    )


def _unwrapped(value: Any) -> Any:
    """Turn a string, number or truth value of numpy into Python's; return anything else as it is."""
    # Elements of numpy exist only once numpy is imported, and nobody else should wait for its import.
    numpy = sys.modules.get("numpy")
    is_plain = numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _PLAIN_KINDS
    return value.item() if is_plain else value
