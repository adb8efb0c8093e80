"""The arguments of a call, as JSON brings them, become what a Python function's hints ask for."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union

import msgspec

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.text.tools import is_record


def call_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with which `function` is to be called.

    JSON has neither tuples nor members of an enumeration nor objects of a class, and writes 2.0 as 2: where the
    function's hints name such types, values are converted. All else stays as it is.

    Raises:
        InvalidArgumentError: an argument is missing, is not one of the function's, is no member of its enumeration or
            lacks what its class wants; the message tells the model what is allowed.
    """
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in parameters:
            raise InvalidArgumentError(
                name, value, f"left out: the arguments are {', '.join(parameters) or 'none'}"
            )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise InvalidArgumentError(missing[0], None, "given: it has no default")
    hints = typing.get_type_hints(function)
    return {name: _converted(name, value, hints.get(name, Any)) for name, value in arguments.items()}


def _converted(name: str, value: Any, hint: Any) -> Any:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, types.UnionType):
        members = [member for member in inner if member is not type(None)]
        return _converted(name, value, members[0]) if len(members) == 1 and value is not None else value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise InvalidArgumentError(
                name, value, "one of " + ", ".join(repr(member.value) for member in hint)
            ) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list) and origin is list and inner:
        return [_converted(name, item, inner[0]) for item in value]
    if isinstance(value, list) and origin is tuple:
        kinds = inner if len(inner) == len(value) else (Any,) * len(value)
        return tuple(_converted(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    if isinstance(value, dict) and is_record(hint) and not typing.is_typeddict(hint):
        return _record(name, value, hint)
    if isinstance(value, dict) and origin is dict and inner:
        return {key: _converted(name, item, inner[1]) for key, item in value.items()}
    return value


def _record(name: str, value: dict[str, Any], hint: Any) -> Any:
    """Make an object of a class; those of pydantic make it themselves."""
    make = getattr(hint, "model_validate", None)
    try:
        return make(value) if callable(make) else msgspec.convert(value, hint)
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidArgumentError(name, value, f"as {hint.__name__} has it ({error})") from None
