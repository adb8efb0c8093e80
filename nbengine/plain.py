"""Plain Python values of what stands for one: NumPy's and torch's numbers, fractions, subclasses of str."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sized
from collections.abc import Set as AbstractSet
from dataclasses import asdict, is_dataclass
from os import PathLike, fsdecode
from typing import Any, TypeGuard

_PLAIN = frozenset((int, float, str, bool, bytes, type(None)))
_REGEX_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def plain(value: object) -> object:
    """Return the int, float, bool or str that `value` stands for; return anything else as it is.

    Whatever has `__index__` is an integer, whatever has `__float__` a number: NumPy's and torch's scalars,
    arrays and tensors without dimensions, `Decimal`, `Fraction`. Their truth values become bool, which is
    no integer. An array with dimensions is not one number, even if it has a single element.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, complex)) or getattr(value, "ndim", 0) != 0:
        return value
    dtype = str(getattr(value, "dtype", ""))
    if dtype.removeprefix("torch.") == "bool":
        return bool(value)
    if "complex" in dtype:
        return value
    return _number(value)


def _number(value: object) -> object:
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:
            # Arrays and tensors have the method, whatever they hold.
            pass
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            # The check that follows says what is wanted, and shows the value.
            pass
    return value


def plain_name(value: object) -> object:
    """Return the text of a path or of torch's name of a type, else what `plain` returns."""
    if isinstance(value, PathLike):
        return fsdecode(value)
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    return plain(value)


def plain_regex(value: object) -> object:
    """Return the text of a compiled regular expression, with its flags written inside, else what `plain` returns."""
    if not isinstance(value, re.Pattern) or not isinstance(value.pattern, str) or value.flags & re.ASCII:
        return plain(value)
    flags = "".join(letter for letter, flag in _REGEX_FLAGS.items() if value.flags & flag)
    return f"(?{flags}){value.pattern}" if flags else value.pattern


def plain_list(value: object) -> object:
    """Return a list of the plain values in a list, a tuple, an array or another collection with an order or
    without; return anything else, texts and mappings among it, as it is."""
    if type(value) is list and all(type(item) in _PLAIN for item in value):
        return value
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return value
    if getattr(value, "ndim", 1) == 0:
        return value
    return [plain(item) for item in value]


def is_ordered(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether `value` has elements in an order that it keeps: a list, a tuple, a range, an array, a
    column of a table, but no text, no mapping, no set and nothing that can be read only once."""
    if isinstance(value, (list, tuple)):
        return True
    if isinstance(value, (str, bytes, bytearray, Mapping, AbstractSet)) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Iterable) and isinstance(value, Sized) and hasattr(value, "__getitem__")


def as_mapping(value: object) -> Any:
    """Return the dict of a value of a class that describes one, without what is None: pydantic's models (messages and
    calls of OpenAI's client among them) and dataclasses; return anything else as it is."""
    if not isinstance(value, type) and callable(dump := getattr(value, "model_dump", None)):
        return dump(exclude_none=True)
    if is_dataclass(value) and not isinstance(value, type):
        return {key: item for key, item in asdict(value).items() if item is not None}
    return value
