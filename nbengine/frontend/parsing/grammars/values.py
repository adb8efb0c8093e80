"""Grammars of values that are written otherwise than in JSON: those of Gemma and of Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.frontend.parsing.grammars.lark import Lark, Tool, either
from nbengine.frontend.parsing.json_text import quoted
from nbengine.frontend.parsing.schemas import resolved
from nbengine.frontend.parsing.tools.gemma import GEMMA4_QUOTE

_MOST_DEPTH = 16
_NUMBERS = {"integer": r"/-?(0|[1-9][0-9]*)/", "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"}
_PYTHON_STRING = r"""/"([^"\\\n]|\\[nrt"'\\])*"/ | /'([^'\\\n]|\\[nrt"'\\])*'/"""


@dataclass(frozen=True, slots=True)
class Writing:
    """A way of writing values: `quote` stands on both sides of a string, None: strings are Python's."""

    words: tuple[str, str, str]
    quote: str | None
    arguments: tuple[str, str, str]
    """The brackets around the arguments of a call, and the sign between a name and its value."""
    has_bare_keys: bool


GEMMA = Writing(("true", "false", "null"), GEMMA4_QUOTE, ("{", "}", ":"), has_bare_keys=True)
PYTHON = Writing(("True", "False", "None"), None, ("(", ")", "="), has_bare_keys=False)


class Written:
    """The rules of values in one way of writing. Schemas without a known type allow any value."""

    def __init__(self, lark: Lark, writing: Writing) -> None:
        self._lark = lark
        self._writing = writing

    def object_of(self, name: str, tool: Tool) -> str:
        """Add the rules of a tool's arguments with their brackets; return the name of the first."""
        opening, closing, sign = self._writing.arguments
        schema = tool.schema
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            inner = self._members(name, schema, tool.parameters, 0, sign, bare=True)
        elif tool.is_strict:
            inner = ""
        else:
            inner = self._any_members(sign, bare=True)
        return self._lark.rule(name, f"{quoted(opening)} {inner} {quoted(closing)}")

    def _members(
        self,
        name: str,
        schema: Mapping[str, Any],
        root: Mapping[str, Any],
        depth: int,
        sign: str,
        *,
        bare: bool,
    ) -> str:
        """Write members in the order of the schema; commas stand between those that are there."""
        lark = self._lark
        required = schema.get("required") or ()
        properties = list(schema["properties"].items())
        # From the last member to the first: `first` is the rest without a comma in front of it, `more` with one.
        first = more = lark.rule(f"{name}_end", '""')
        for number, (key, own) in reversed(list(enumerate(properties))):
            value = self._value(f"{name}_{number}", own, root, depth + 1)
            member = lark.rule(
                f"{name}_member_{number}", f"{self._key(key, bare=bare)} {quoted(sign)} {self._gap()} {value}"
            )
            skipped = "" if key in required else f" | {first}"
            first_body = f"{member} {more}{skipped}"
            skipped = "" if key in required else f" | {more}"
            more = lark.rule(f"{name}_more_{number}", f'"," {self._gap()} {member} {more}{skipped}')
            first = lark.rule(f"{name}_first_{number}", first_body)
        return first

    def _any_members(self, sign: str, *, bare: bool) -> str:
        key = self._lark.rule("bare_key", r"/[A-Za-z_]\w*/") if bare else self._string()
        member = f"{key} {quoted(sign)} {self._gap()} {self._any()}"
        return f'({member} ("," {self._gap()} {member})*)?'

    def _value(self, name: str, schema: object, root: Mapping[str, Any], depth: int) -> str:
        """Return a rule, or a body in brackets, of the values that a schema allows."""
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(name, resolved(reference, root), root, depth + 1)
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return either(*(self._constant(value) for value in schema["enum"]))
        if "const" in schema:
            return self._constant(schema["const"])
        for key in ("anyOf", "oneOf"):
            members = schema.get(key)
            if isinstance(members, list) and members:
                several = enumerate(members)
                return either(
                    *(self._value(f"{name}_{key.lower()}_{i}", one, root, depth + 1) for i, one in several)
                )
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            return self._any()
        bodies = [self._of_kind(f"{name}_{kind}", kind, schema, root, depth) for kind in kinds]
        if schema.get("nullable") is True:
            bodies.append(quoted(self._writing.words[2]))
        return either(*bodies)

    def _of_kind(
        self, name: str, kind: object, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> str:
        true, false, null = self._writing.words
        if kind in _NUMBERS:
            return self._lark.rule(str(kind), _NUMBERS[str(kind)])
        if kind == "boolean":
            return either(quoted(true), quoted(false))
        if kind == "null":
            return quoted(null)
        if kind == "string":
            return self._string()
        if kind == "array":
            item = self._value(f"{name}_item", schema.get("items"), root, depth + 1)
            return self._lark.rule(name, f'"[" ({item} ("," {self._gap()} {item})*)? "]"')
        if kind == "object":
            if isinstance(schema.get("properties"), Mapping):
                inner = self._members(name, schema, root, depth, ":", bare=self._writing.has_bare_keys)
            else:
                inner = self._any_members(":", bare=self._writing.has_bare_keys)
            return self._lark.rule(name, f'"{{" {inner} "}}"')
        return self._any()

    def _any(self) -> str:
        if not self._lark.has("any"):
            self._lark.rule("any", '""')  # the members of lists and objects refer to it
            kinds = ("number", "boolean", "null", "string", "array", "object")
            self._lark.rule(
                "any", " | ".join(self._of_kind(f"any_{kind}", kind, {}, {}, 0) for kind in kinds)
            )
        return "any"

    def _string(self) -> str:
        quote = self._writing.quote
        if quote is None:
            return self._lark.rule("string", _PYTHON_STRING)
        return self._lark.rule(
            "string", f"{self._lark.literal(quote)} {self._lark.text_up_to('string_end', quote)}"
        )

    def _key(self, key: str, *, bare: bool) -> str:
        return self._lark.literal(key) if bare else self._constant(key)

    def _constant(self, value: object) -> str:
        true, false, null = self._writing.words
        if isinstance(value, str):
            quote = self._writing.quote
            forms = [f"{quote}{value}{quote}"] if quote else dict.fromkeys((quoted(value), repr(value)))
            return either(*map(self._lark.literal, forms))
        words = {True: true, False: false, None: null}
        if value is None or isinstance(value, bool):
            return quoted(words[value])
        return quoted(str(value)) if isinstance(value, (int, float)) else self._any()

    def _gap(self) -> str:
        return self._lark.rule("space", '" "?')
