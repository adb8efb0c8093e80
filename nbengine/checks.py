"""Checks of arguments: each raises an error that names the argument, its value and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from nbengine.errors import InvalidArgumentError, InvalidTypeError, UnknownArgumentError, quoted
from nbengine.grammar_schemas import looks_around
from nbengine.plain import is_ordered, plain, plain_list, plain_name

MAX_LINE = 4096
"""Most characters of an argument that is a name or a path."""
MAX_DEPTH = 64
"""Deepest nesting of lists and dicts in a value that the wire or a file carries."""
MAX_TIMEOUT = 10**9
"""Most seconds that a call may be given: clocks of threads and sockets end somewhere behind."""
_KEY_CHARACTERS = 40

MAX_FACTOR = 1e30
"""Largest number that may be added to float32 logits or multiply them; the largest float32 is 3.4e38."""


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raise `InvalidArgumentError` unless `ok`."""
    if not ok:
        raise InvalidArgumentError(name, value, allowed)


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `InvalidArgumentError` unless `value` is one of `allowed`."""
    require(name, value, value in allowed, "one of " + ", ".join(map(str, allowed)))


def require_count(name: str, value: int) -> None:
    """Raise `InvalidArgumentError` unless `value` is at least 1 and small enough to be an array's size."""
    require(name, value, value >= 1, "at least 1")
    require(name, value, value < 2**31, "below 2**31")


def require_number(name: str, value: object) -> float:
    """Return the number that `value` stands for (`plain`); raise unless it is a finite number and, if it is
    an integer, has at most 64 bits."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise InvalidTypeError(name, value, "a number")
    if isinstance(found, int):
        require(name, value, abs(found) < 2**63, "a number of at most 64 bits")
    elif not math.isfinite(found):
        raise InvalidArgumentError(name, value, "finite")
    return found


def checked_timeout(name: str, value: object) -> float | None:
    """Return the seconds that `value` stands for, None for None; raise unless something can wait as long as that."""
    if value is None:
        return None
    seconds = require_number(name, value)
    require(name, value, 0 <= seconds <= MAX_TIMEOUT, f"None, or a number of seconds in [0, {MAX_TIMEOUT:,}]")
    return seconds


def require_fits_logits(name: str, value: float) -> None:
    """Raise `InvalidArgumentError` if `value`, added or multiplied, could make float32 logits not finite."""
    require(name, value, abs(value) <= MAX_FACTOR, f"at most {MAX_FACTOR:g} in size")


def require_int(name: str, value: object) -> int:
    """Return the integer that `value` stands for (`plain`; a bool is not one); raise if there is none."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InvalidTypeError(name, value, "an integer")
    return found


def require_callback(name: str, value: object) -> None:
    """Raise `InvalidTypeError` unless `value` can be called or is None."""
    if value is not None and not callable(value):
        raise InvalidTypeError(name, value, "a function, or None")


def require_method(name: str, value: object, method: str) -> None:
    """Raise `InvalidTypeError` unless `value` has this method."""
    if not callable(getattr(value, method, None)):
        raise InvalidTypeError(name, value, f"an object with a method {method}")


def require_headers(name: str, value: object) -> None:
    """Raise unless `value` is None or maps texts to texts."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for item in value.items() for part in item
    ):
        raise InvalidTypeError(name, value, "None, or names of headers and their texts")


def require_bool(name: str, value: object, allowed: str = "True or False") -> bool:
    """Return the truth value that `value` stands for (`plain`); raise if it is anything else."""
    found = plain(value)
    if not isinstance(found, bool):
        raise InvalidTypeError(name, value, allowed)
    return found


def checked_logit_bias(logit_bias: object) -> dict[int, float] | None:
    """Return `logit_bias` with plain numbers; raise unless it is None, or a dict from token ids to finite
    numbers."""
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, dict):
        raise InvalidTypeError("logit_bias", logit_bias, "a dict from token ids to numbers, or None")
    checked = {}
    for key, bias in logit_bias.items():
        token_id = plain(key)
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidTypeError("logit_bias", key, "a dict whose keys are token ids")
        name = f"logit_bias[{quoted(token_id, _KEY_CHARACTERS)}]"
        checked[token_id] = require_number(name, bias)
        require_fits_logits(name, checked[token_id])
    return checked


def checked_extra_args(extra_args: object) -> dict[str, Any] | None:
    """Return `extra_args` with plain values; raise unless it is None, or a dict of values that the wire can
    carry."""
    if extra_args is None:
        return None
    if not isinstance(extra_args, dict) or not all(isinstance(name, str) for name in extra_args):
        raise InvalidTypeError("extra_args", extra_args, "a dict with names as keys, or None")
    return cast("dict[str, Any]", _plain_copy("extra_args", extra_args))


def checked_json_object(name: str, value: object) -> dict[str, Any]:
    """Return `value` with plain values; raise unless it is a dict that JSON can write, so that a file can
    carry it."""
    if not isinstance(value, dict):
        raise InvalidTypeError(name, value, "a dict with strings as keys")
    return cast("dict[str, Any]", _plain_copy(name, value, in_json=True))


def _plain_copy(name: str, value: object, depth: int = 0, *, in_json: bool = False) -> object:
    value = plain(value)
    if isinstance(value, str):
        require_utf8(name, value)
    elif isinstance(value, float):
        require(name, value, not in_json or math.isfinite(value), "finite")
    elif value is None or isinstance(value, bool) or (isinstance(value, bytes) and not in_json):
        return value
    elif isinstance(value, int):
        require(name, value, -(2**63) <= value < 2**64, "an integer of 64 bits")
    elif isinstance(value, (list, tuple, dict)) and depth == MAX_DEPTH:
        raise InvalidArgumentError(name.partition("[")[0], value, f"at most {MAX_DEPTH} lists and dicts deep")
    elif isinstance(value, (list, tuple)):
        return [
            _plain_copy(f"{name}[{index}]", item, depth + 1, in_json=in_json)
            for index, item in enumerate(value)
        ]
    elif isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidTypeError(name, key, "a dict with strings as keys")
            require_utf8(name, key)
            inner = f"{name}[{quoted(key, _KEY_CHARACTERS)}]"
            copy[str.__str__(key)] = _plain_copy(inner, item, depth + 1, in_json=in_json)
        return copy
    else:
        kinds = (
            "None, True, False, a number, a string, " + ("" if in_json else "bytes, ") + "a list or a dict"
        )
        raise InvalidTypeError(name, value, kinds)
    return value


def checked_token_ids(name: str, value: object) -> list[int]:
    """Return a list of plain integers; raise unless `value` is a collection of integers."""
    listed = plain_list(value)
    if not isinstance(listed, list):
        raise InvalidTypeError(name, value, "a list of token ids")
    for token_id in listed:
        if type(token_id) is not int:
            raise InvalidTypeError(name, token_id, "a list of token ids")
    return listed


def checked_texts(name: str, value: object, allowed: str) -> list[str]:
    """Return a list of plain strings; raise unless `value` is a collection of strings that can be written as
    UTF-8."""
    listed = plain_list(value)
    if not isinstance(listed, list):
        raise InvalidTypeError(name, value, allowed)
    for text in listed:
        if not isinstance(text, str):
            raise InvalidTypeError(name, value, allowed)
        require_utf8(name, text)
    return listed


def require_text(name: str, value: object) -> None:
    """Raise unless `value` is a string, not empty, that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidTypeError(name, value, "a string")
    require(name, value, bool(value), "not empty")
    require_utf8(name, value)


def require_regex(name: str, value: object) -> None:
    """Raise unless `value` is a regular expression as far as it can be told without the library that reads it."""
    require_text(name, value)
    allowed = "without look-around, back references, word boundaries, atomic groups and the flag m, which no grammar has"
    require(name, value, not looks_around(value), allowed)


def require_line(name: str, value: object) -> None:
    """Raise unless `value` is a string that may be a name or a path."""
    if not isinstance(value, str):
        raise InvalidTypeError(name, value, "a string")
    require(name, value, len(value) <= MAX_LINE, f"at most {MAX_LINE} characters long")
    require(name, value, "\0" not in value, "without null characters")
    require_utf8(name, value)


def require_path(name: str, value: object) -> str:
    """Return the text of a path; raise unless `value` is one, or a string that may be one."""
    found = plain_name(value)
    require_line(name, found)
    return cast("str", found)


def check_session(session: object) -> None:
    """Raise unless `session` is None, or a name that a client may keep across restarts of its process."""
    if session is not None:
        require_line("session", session)


def require_utf8(name: str, value: str) -> None:
    """Raise unless `value` is text that tokenizers and the wire take: without halves of surrogate pairs,
    which broken JSON and cut emojis leave."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!r} at position {error.start} is half of a surrogate pair"
        raise InvalidArgumentError(name, value, f"text that can be written as UTF-8 ({half})") from error


def require_utf8_within(name: str, value: object, depth: int = 0) -> None:
    """Raise unless `require_utf8` takes every text within lists and dicts; the error says which does not.

    What is neither a text nor a list nor a dict is left to others.
    """
    if isinstance(value, str):
        require_utf8(name, value)
    elif isinstance(value, (Mapping, list, tuple)):
        require(name.partition("[")[0], value, depth < MAX_DEPTH, f"at most {MAX_DEPTH} lists and dicts deep")
        if isinstance(value, Mapping):
            for key, item in value.items():
                require_utf8_within(name, key, depth + 1)
                require_utf8_within(f"{name}[{quoted(key, _KEY_CHARACTERS)}]", item, depth + 1)
        else:
            for index, item in enumerate(value):
                require_utf8_within(f"{name}[{index}]", item, depth + 1)


def checked_json_schema(name: str, value: object) -> str | dict[str, Any]:
    """Return a JSON schema with plain values, or as text; raise unless `value` is a JSON object or the text of one."""
    allowed = "a JSON schema: a dictionary, its text, or a class that has one"
    value = plain(value)
    if not isinstance(value, (str, dict)):
        raise InvalidTypeError(name, value, allowed)
    checked = value
    try:
        if isinstance(value, str):
            require_utf8(name, value)
            value = json.loads(value)
        else:
            require_utf8_within(name, value)
            text = json.dumps(value, allow_nan=False, default=_plain_in_json)
            checked = value = json.loads(text)
            try:
                msgspec.msgpack.encode(value)
            except OverflowError:
                # JSON can carry integers of more than 64 bits, the wire cannot.
                checked = text
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(name, value, f"{allowed} ({error})") from error
    require(name, value, isinstance(value, dict), allowed)
    return checked


def _plain_in_json(value: object) -> object:
    found = plain(value)
    if found is not value:
        return found
    if is_ordered(value):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def require_choices(name: str, value: object) -> None:
    """Raise unless `value` is a list of strings, none of them empty."""
    allowed = "a list of strings, none of them empty"
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InvalidTypeError(name, value, allowed)
    require(name, value, bool(value) and all(value), allowed)
    for choice in value:
        require_text(name, choice)


def require_true(name: str, value: object) -> None:
    """Raise unless `value` is True."""
    if value is not True:
        raise InvalidTypeError(name, value, "True, or None")


class SuggestingMeta(msgspec.StructMeta):
    """The metaclass of structs that people make with keyword arguments.

    The error about an unknown argument names the one that was probably meant.
    """

    if not TYPE_CHECKING:
        # Type checkers must not see this method, so that they take the fields for the arguments.
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                for name in kwargs:
                    if name not in cls.__struct_fields__:
                        known = cls.__struct_fields__
                        raise UnknownArgumentError.among(cls.__name__, name, known) from None
                raise
