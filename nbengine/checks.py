"""Checks of arguments: each raises an error that names the argument, its value and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from nbengine.errors import InvalidArgumentError, InvalidTypeError


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raise `InvalidArgumentError` unless `ok`."""
    if not ok:
        raise InvalidArgumentError(name, value, allowed)


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `InvalidArgumentError` unless `value` is one of `allowed`."""
    require(name, value, value in allowed, "one of " + ", ".join(map(str, allowed)))


def require_count(name: str, value: int) -> None:
    """Raise `InvalidArgumentError` unless `value` is at least 1 and what an array may have of something."""
    require(name, value, value >= 1, "at least 1")
    require(name, value, value < 2**31, "below 2**31")


def require_number(name: str, value: object) -> None:
    """Raise unless `value` is a finite number, which has at most 64 bits if it is an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(name, value, "a number")
    if isinstance(value, int):
        require(name, value, abs(value) < 2**63, "a number of at most 64 bits")
    elif not math.isfinite(value):
        raise InvalidArgumentError(name, value, "finite")


def require_int(name: str, value: object) -> None:
    """Raise unless `value` is an integer (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(name, value, "an integer")


def check_logit_bias(logit_bias: object) -> None:
    """Raise unless it is None, or a dict from token ids to finite numbers."""
    if logit_bias is None:
        return
    if not isinstance(logit_bias, dict):
        raise InvalidTypeError("logit_bias", logit_bias, "a dict from token ids to numbers, or None")
    for token_id, bias in logit_bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidTypeError("logit_bias", token_id, "a dict whose keys are token ids")
        require_number(f"logit_bias[{token_id}]", bias)


def check_extra_args(extra_args: object) -> None:
    """Raise unless it is None, or a dict of plain values that the wire can carry."""
    if extra_args is None:
        return
    if not isinstance(extra_args, dict) or not all(isinstance(name, str) for name in extra_args):
        raise InvalidTypeError("extra_args", extra_args, "a dict with names as keys, or None")
    for name, value in extra_args.items():
        _check_plain(f"extra_args[{name!r}]", value)


def _check_plain(name: str, value: object) -> None:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return
    if isinstance(value, int):
        require(name, value, -(2**63) <= value < 2**64, "an integer of 64 bits")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidTypeError(f"{name}", key, "a dict with strings as keys")
            _check_plain(f"{name}[{key!r}]", item)
    else:
        raise InvalidTypeError(name, value, "None, True, False, a number, a string, bytes, a list or a dict")


def require_list(name: str, value: object, kind: type, allowed: str) -> None:
    """Raise unless `value` is a list of `kind`."""
    ok = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not ok:
        raise InvalidTypeError(name, value, allowed)


def require_text(name: str, value: object) -> None:
    """Raise unless `value` is a string, not empty, that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidTypeError(name, value, "a string")
    require(name, value, bool(value), "not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(name, value, f"text that can be written as UTF-8 ({error})") from error


def require_json_schema(name: str, value: object) -> None:
    """Raise unless `value` is a JSON object or the text of one."""
    allowed = "a JSON schema: a dictionary, its text, or a pydantic model class"
    if not isinstance(value, (str, dict)):
        raise InvalidTypeError(name, value, allowed)
    try:
        if isinstance(value, str):
            value.encode()
            value = json.loads(value)
        else:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(name, value, f"{allowed} ({error})") from error
    require(name, value, isinstance(value, dict), allowed)


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
