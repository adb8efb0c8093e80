"""JSON schemas as their usual writers write them: made of classes, and walked through for what no grammar
can enforce.

JSON Schema says that an unknown format is an annotation. What a grammar cannot keep (`uniqueItems`, `not`,
patterns with look-around) is left to the reader of the answer, and named in a warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import InvalidTypeError, UnenforcedSchemaWarning, quoted

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""The formats of strings that the grammar library knows."""
FREE_FORMATS = frozenset(("binary", "password", "path"))
"""The formats that any string has."""
UNENFORCED = (
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that the grammar library leaves out of account."""
MAX_NAMED = 8
"""The most places that a warning names."""
_DEEPEST = 256
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\(\?P=")
"""The parts of a pattern that no regular grammar has: look-around and back references."""


def schema_of(value: object) -> object:
    """Return the JSON schema of a class (pydantic, dataclass, attrs, msgspec, TypedDict, enum), of a type
    such as `list[int]` or of pydantic's `TypeAdapter`; return anything else as it is.

    Raises:
        InvalidTypeError: the class has no JSON schema.
    """
    name = "structured_outputs.json"
    try:
        if callable(own := getattr(value, "model_json_schema", None)):
            return own()
        if type(value).__name__ == "TypeAdapter" and callable(own := getattr(value, "json_schema", None)):
            return own()
        if isinstance(value, type) or typing.get_origin(value) is not None:
            return _schema_of_type(value)
    except Exception as error:
        # Whatever the library that has made the class raises is about the class.
        raise InvalidTypeError(name, value, f"a class that has a JSON schema ({error})") from error
    return value


def _schema_of_type(value: Any) -> object:
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and not hasattr(value, "__attrs_attrs__"):
        # It knows its own classes, and what is annotated with its fields; msgspec knows some that it does not.
        with contextlib.suppress(pydantic.errors.PydanticErrorMixin):
            return pydantic.TypeAdapter(value).json_schema()
    import msgspec

    return msgspec.json.schema(value)


def for_grammar(schema: Any) -> Any:
    """Return a copy of a schema without the patterns that the grammar library cannot read."""
    if isinstance(schema, Mapping):
        kept = {key: value for key, value in schema.items() if not _is_unreadable(key, value)}
        if isinstance(named := kept.get("patternProperties"), Mapping):
            kept["patternProperties"] = {key: own for key, own in named.items() if not _looks_around(key)}
        return kept | {key: _mapped(key, kept[key]) for key in (*_ONE, *_LISTS, *_MAPS) if key in kept}
    return schema


def _mapped(key: str, value: object) -> object:
    if isinstance(value, list) and key in _LISTS:
        return [for_grammar(item) for item in value]
    if isinstance(value, Mapping) and key in _MAPS:
        return {name: for_grammar(item) for name, item in value.items()}
    return for_grammar(value)


def unenforced(schema: object) -> list[str]:
    """Name what a grammar cannot keep of a schema, each with its path ("#/properties/tags: uniqueItems")."""
    return [f"{path}: {what}" for path, part in parts_of(schema) for what in _unenforced_in(part)]


def parts_of(schema: object, path: str = "#", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Go through a schema and the schemas within it, with their paths; what is data (`const`, `enum`,
    `default`) is left out."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield path, schema
    for key in dict.fromkeys((*_ONE, *_LISTS, *_MAPS)):
        value = schema.get(key)
        if isinstance(value, list) and key in _LISTS:
            for index, item in enumerate(value):
                yield from parts_of(item, f"{path}/{key}/{index}", depth + 1)
        elif isinstance(value, Mapping) and key in _MAPS:
            for name, item in value.items():
                yield from parts_of(item, f"{path}/{key}/{name}", depth + 1)
        elif key in _ONE:
            yield from parts_of(value, f"{path}/{key}", depth + 1)


def warn_of_unenforced(name: str, schema: object) -> None:
    """Warn (`UnenforcedSchemaWarning`) if the argument `name` is a schema, or the text of one, of which
    something cannot be kept."""
    found = _unenforced_in_text(schema) if isinstance(schema, str) else unenforced(schema)
    if found:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        warnings.warn(
            f"{name}: answers may break these rules, which no grammar can keep: "
            f"{'; '.join(found[:MAX_NAMED])}{more}. Check them in the answer",
            UnenforcedSchemaWarning,
            stacklevel=2,
        )


@functools.lru_cache(maxsize=256)
def _unenforced_in_text(text: str) -> tuple[str, ...]:
    return tuple(unenforced(json.loads(text)))


def _unenforced_in(schema: Mapping[str, Any]) -> Iterator[str]:
    form, kinds = schema.get("format"), schema.get("type", "string")
    about_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    if isinstance(form, str) and about_strings and form not in ENFORCED_FORMATS | FREE_FORMATS:
        yield f"format {quoted(form)}"
    yield from (key for key in UNENFORCED if schema.get(key) not in (None, False) or _forbids(schema, key))
    for pattern in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
        if _looks_around(pattern):
            yield f"pattern {quoted(pattern)}, which looks around or back"
    members = schema.get("oneOf")
    if isinstance(members, list) and not _are_distinct(members):
        yield "oneOf, which is taken as anyOf"


def _forbids(schema: Mapping[str, Any], key: str) -> bool:
    return key in ("unevaluatedProperties", "unevaluatedItems") and schema.get(key) is False


def _is_unreadable(key: str, value: object) -> bool:
    return key == "pattern" and _looks_around(value)


def _looks_around(pattern: object) -> bool:
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _are_distinct(members: list[Any]) -> bool:
    """Return whether no value can fit two of these schemas, as far as that is seen at once: they are of
    different types, refer to named schemas by a discriminator, or have a property that tells them apart."""
    if len(members) < 2 or not all(isinstance(member, Mapping) for member in members):
        return len(members) < 2
    if all("$ref" in member for member in members):
        return True
    kinds = [member.get("type") for member in members]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return not {"integer", "number"} <= set(kinds)
    constants = [member.get("const", member.get("enum")) for member in members]
    if None not in constants:
        return len({json.dumps(value, default=repr) for value in constants}) == len(constants)
    return any(_tells_apart(members, name) for name in members[0].get("required") or ())


def _tells_apart(members: list[Any], name: str) -> bool:
    values = []
    for member in members:
        own = (member.get("properties") or {}).get(name)
        if name not in (member.get("required") or ()) or not isinstance(own, Mapping) or "const" not in own:
            return False
        values.append(json.dumps(own["const"], default=repr))
    return len(set(values)) == len(values)
