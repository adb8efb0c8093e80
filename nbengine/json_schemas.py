"""JSON schemas as their usual writers write them: made of classes, and walked through for what no grammar
can enforce.

JSON Schema says that an unknown format is an annotation. What a grammar cannot keep (`uniqueItems`, `not`,
patterns with look-around) is left to the reader of the answer, and named in a warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import InvalidTypeError, UnenforcedSchemaWarning, quoted
from nbengine.grammar_schemas import LISTS, MAPS, ONE, distinct_members, left_out, list_at, looks_around

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


def unenforced(schema: object) -> list[str]:
    """Name what a grammar cannot keep of a schema, each with its path ("#/properties/tags: uniqueItems")."""
    return [f"{path}: {what}" for path, part in parts_of(schema) for what in _unenforced_in(part, schema)]


def parts_of(schema: object, path: str = "#", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Go through a schema and the schemas within it, with their paths; what is data (`const`, `enum`,
    `default`) is left out."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield path, schema
    for key in dict.fromkeys((*ONE, *LISTS, *MAPS)):
        value = schema.get(key)
        if isinstance(value, list) and key in LISTS:
            for index, item in enumerate(value):
                yield from parts_of(item, f"{path}/{key}/{index}", depth + 1)
        elif isinstance(value, Mapping) and key in MAPS:
            for name, item in value.items():
                yield from parts_of(item, f"{path}/{key}/{name}", depth + 1)
        elif key in ONE:
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


def _unenforced_in(schema: Mapping[str, Any], whole: Any) -> Iterator[str]:
    form, kinds = schema.get("format"), schema.get("type", "string")
    about_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    is_free = isinstance(form, str) and about_strings and form not in ENFORCED_FORMATS | FREE_FORMATS
    if is_free and not _says_by_pattern(schema):
        yield f"format {quoted(form)}"
    yield from (key for key in UNENFORCED if _is_unenforced(schema, key))
    yield from left_out(schema)
    members = schema.get("oneOf")
    told_apart = "discriminator" in schema
    if isinstance(members, list) and not told_apart and not distinct_members(members, whole):
        yield "oneOf, which is taken as anyOf"


def _is_unenforced(schema: Mapping[str, Any], key: str) -> bool:
    value = schema.get(key)
    if key == "not" and value in ({}, True):
        # Nothing fits it, which a grammar keeps.
        return False
    return value not in (None, False) or _forbids(schema, key)


def _says_by_pattern(schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar keeps a pattern beside the format: what the format means is said by it, as zod does."""
    parts = [schema, *(part for part in list_at(schema, "allOf") if isinstance(part, Mapping))]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    return bool(patterns) and not any(map(looks_around, patterns))


def _forbids(schema: Mapping[str, Any], key: str) -> bool:
    return key in ("unevaluatedProperties", "unevaluatedItems") and schema.get(key) is False
