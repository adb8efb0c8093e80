"""Rules of a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.grammar_schemas import for_grammar

TEXT = "TEXT"
"""The terminal that is any text."""
GAP = "gap"
"""The rule of the white space that may stand between calls."""
WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""White space within JSON: a small model that may write any amount of it often never ends it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as a grammar needs it: with `is_strict` the arguments follow the schema `parameters`."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema that the arguments follow: if strict, without others than it names."""
        if not self.is_strict:
            return {"type": "object"}
        return {"type": "object", "additionalProperties": False, **self.parameters}


class Lark:
    """A grammar that grows by rules; markers that are single tokens are named by their ids."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self._ids = marker_ids
        tokens = sorted((token for token in marker_ids if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._rules: dict[str, str] = {TEXT: r"/(.|\n)*/", GAP: r"/[ \t\r\n]{0,8}/"}

    def text(self) -> str:
        """Return the whole grammar."""
        return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def rule(self, name: str, body: str) -> str:
        """Add a rule, and return its name without options in brackets."""
        self._rules[name] = body
        return name.partition("[")[0]

    def rule_body(self, name: str) -> str:
        """Return what a rule says."""
        return self._rules[name]

    def has(self, name: str) -> bool:
        """Tell whether there is a rule of that name."""
        return name in self._rules

    def literal(self, text: str) -> str:
        """Write a text that must come as it is."""
        parts, place = [], 0
        for match in self._special.finditer(text):
            parts += [_quoted(text[place : match.start()]), f"<[{self._ids[match[0]]}]>"]
            place = match.end()
        parts.append(_quoted(text[place:]))
        return " ".join(part for part in parts if part) or '""'

    def text_up_to(self, name: str, marker: str) -> str:
        """Add a rule for any text with `marker` at its end, where that comes first; return its name."""
        match = self._special.match(marker)
        if match is not None:
            return self.rule(name, f"{TEXT} {self.literal(marker)}")
        special = self._special.search(marker)
        end = special.start() if special else len(marker)
        rule = self.rule(f"{name}[lazy]", f"{TEXT} {_quoted(marker[:end])}")
        return f"{rule} {self.literal(marker[end:])}" if end < len(marker) else rule

    def json(self, name: str, schema: Mapping[str, Any], spaces: str | None = WHITESPACE) -> str:
        """Add a rule for JSON that follows a schema, with the white space `spaces`, None: without any; return its
        name."""
        readable = for_grammar(schema)
        space = {"whitespace_flexible": False} if spaces is None else {"whitespace_pattern": spaces}
        options = {"x-guidance": {**space, "lenient": True}}
        return self.rule(name, "%json " + json.dumps({**readable, **options}, ensure_ascii=True))


def either(*bodies: str) -> str:
    """Join alternatives."""
    return bodies[0] if len(bodies) == 1 else "(" + " | ".join(bodies) + ")"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
