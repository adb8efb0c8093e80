"""Tools for chat templates: JSON schemas are taken as they are, Python functions are described by their hints
and docstring.

The form of a function's schema is a convention of transformers, for which chat templates were written; its
own `get_json_schema` imports torch.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, cast

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.json_schemas import schema_of

Tool = Mapping[str, Any] | Callable[..., Any]

_ALLOWED = '{"type": "function", "function": {"name": ..., ...}} or a Python function'
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_CONTAINERS = {list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")


class _Undescribed(Exception):
    """The error of a function that lacks something that its schema needs."""


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the JSON schemas of `tools`, as chat templates take them.

    Raises:
        InvalidArgumentError: a tool is neither a schema of a function nor a function that can be described.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidTypeError("tools", tools, f"a list, each {_ALLOWED}")
    return [_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _schema(tool: object, name: str) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        function = tool.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
        if tool.get("type") != "function" or not named:
            raise InvalidArgumentError(name, dict(tool), _ALLOWED)
        return dict(tool)
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise InvalidTypeError(name, tool, _ALLOWED)
    try:
        return {"type": "function", "function": _describe(tool)}
    except _Undescribed as error:
        raise InvalidArgumentError(name, tool, f"a function that can be described: {error}") from None


def _describe(function: Callable[..., Any]) -> dict[str, Any]:
    description, arguments, returns = _parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise _Undescribed("it has no docstring")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise _Undescribed(str(error)) from None
    definitions: dict[str, Any] = {}
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise _Undescribed(f"argument {parameter.name!r} has no type hint")
        properties[parameter.name] = _of_hint(hints[parameter.name], definitions)
        if parameter.name in arguments:
            properties[parameter.name] |= {"description": arguments[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    if definitions:
        parameters["$defs"] = definitions
    schema: dict[str, Any] = {
        "name": function.__name__,
        "description": description,
        "parameters": parameters,
    }
    if "return" in hints:
        schema["return"] = _of_hint(hints["return"], {}) | ({"description": returns} if returns else {})
    return schema


def is_record(hint: Any) -> bool:
    """Tell whether a type is a class with named fields: a TypedDict, a dataclass, or one of pydantic, msgspec or
    attrs."""
    marks = ("__dataclass_fields__", "__struct_fields__", "__attrs_attrs__", "model_json_schema")
    return typing.is_typeddict(hint) or (
        isinstance(hint, type) and any(hasattr(hint, mark) for mark in marks)
    )


def _of_record(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a class, and add those that it refers to."""
    schema = cast("dict[str, Any]", schema_of(hint))
    for name, own in schema.pop("$defs", {}).items():
        if definitions.setdefault(name, own) != own:
            raise _Undescribed(f"two classes have the name {name}")
    return schema


def _of_hint(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type; `definitions` gets those of the classes that it refers to."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        return _of_values(list(arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _of_values([member.value for member in hint])
    if origin in (Union, types.UnionType):
        return _of_union(arguments, definitions)
    if is_record(hint):
        return _of_record(hint, definitions)
    if origin not in _CONTAINERS or ... in arguments:
        raise _Undescribed(f"there is no JSON type for {hint}")
    schema: dict[str, Any] = {"type": _CONTAINERS[origin]}
    if origin is tuple and arguments:
        schema["prefixItems"] = [_of_hint(item, definitions) for item in arguments]
    elif origin is list and arguments:
        schema["items"] = _of_hint(arguments[0], definitions)
    elif origin is dict and arguments:
        schema["additionalProperties"] = _of_hint(arguments[1], definitions)
    return schema


def _of_union(members: Sequence[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    schemas = [_of_hint(member, definitions) for member in members if member is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(list(schema) == ["type"] for schema in schemas):
        schema = {"type": sorted({schema["type"] for schema in schemas})}
    else:
        schema = {"anyOf": schemas}
    return schema | {"nullable": True} if type(None) in members else schema


def _of_values(values: list[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_SCALARS.get(type(value), "") for value in values))
    if not all(kinds):
        raise _Undescribed(f"{values} are not all strings, numbers, booleans or None")
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _parse_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """Split a docstring in Google's style into description, arguments and return value."""
    description, *sections = _SECTION.split(text)
    content = dict(zip(sections[::2], sections[1::2], strict=True))
    arguments: dict[str, str] = {}
    name, indent = "", None
    for line in content.get("Args", "").splitlines():
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if stripped and indent is None:
            indent = depth
        start = _ARGUMENT.fullmatch(stripped) if depth == indent else None
        if start is not None:
            name = start[1]
            arguments[name] = start[2]
        elif stripped and name:
            arguments[name] = f"{arguments[name]} {stripped}".strip()
    return description.strip(), arguments, content.get("Returns", "").strip()
