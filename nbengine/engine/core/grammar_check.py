"""The check of a grammar's source, in a small process that may not take long or grow large.

llguidance bounds the work of a step, but not what it does to find out whether a schema makes sense: fourteen
intersected patterns, 400 bytes of schema, take seconds and hundreds of megabytes, and each further pattern
takes four times as much. So every new text is first compiled in this process (`python -m
nbengine.engine.core.grammar_check`), whose time and memory are limited by the kernel, and which is started
again when a text has ended it.
"""

from __future__ import annotations

import itertools
import json
import re
import sys

import msgspec

from nbengine.errors import RequestError
from nbengine.grammar_schemas import for_grammar, regular
from nbengine.json_schemas import parts_of
from nbengine.runtime.limited_process import LimitedProcess, serve

CHECK_SECONDS = 2.0
"""Processor time that a check may take; a realistic schema takes less than a millisecond."""
CHECK_BYTES = 1 << 30
"""Address space of the checking process."""
MAX_SOURCE_BYTES = 64 * 1024
MAX_REASON_LENGTH = 1000
WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""White space between the parts of a JSON text: a space, or a line break and an indentation. Without a limit
a small model that has begun with white space often never ends it."""

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_MOST_PLACES = 200
"""The most parts of a schema that are tried to find out which of them is wrong."""
_JSON_OBJECT = '{"type": "object"}'


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as the library takes it; `kind` is the field of `StructuredOutputsParams`."""

    kind: str
    text: str
    """A JSON schema, a regular expression, a JSON list of choices, or a grammar."""
    whitespace: str | None = WHITESPACE
    """Regular expression of the white space in JSON; None allows none."""


class CheckedGrammar(msgspec.Struct, array_like=True):
    """The result of a check: the grammar in the library's own form, or the reason why there is none."""

    grammar: str = ""
    error: str = ""


class GrammarChecker(LimitedProcess):
    """The client of the checking process, which starts when it is first needed. For one thread at a time."""

    def __init__(self, max_seconds: float = CHECK_SECONDS, max_bytes: int = CHECK_BYTES) -> None:
        super().__init__(__name__, "checks grammars", "to compile", max_seconds, max_bytes)

    def check(self, source: GrammarSource) -> str:
        """Return the grammar in the library's own form.

        Raises:
            RequestError: the text is too long, not valid, or takes too long or too much memory to compile.
            NBEngineError: the process cannot be used.
        """
        num_bytes = len(source.text.encode())
        if num_bytes > MAX_SOURCE_BYTES:
            raise RequestError(f"it has {num_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed")
        checked = msgspec.json.decode(self._ask(msgspec.json.encode(source)), type=CheckedGrammar)
        if checked.error:
            raise RequestError(checked.error)
        return checked.grammar


def guidance_grammar(source: GrammarSource) -> str:
    """Translate a constraint into llguidance's own form.

    Raises:
        Exception: the library cannot read it; the message says why.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match source.kind:
        case "json" | "json_object":
            spaces = source.whitespace
            options: dict[str, str | bool] = (
                {"whitespace_flexible": False} if spaces is None else {"whitespace_pattern": spaces}
            )
            # The library would refuse what it cannot enforce; the frontend has warned of that.
            options["lenient"] = True
            schema = (
                json.dumps(for_grammar(json.loads(source.text))) if source.kind == "json" else _JSON_OBJECT
            )
            grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=options)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(regular(source.text))
        case "choice":
            grammar = LLMatcher.grammar_from_lark(
                "start: " + " | ".join(map(_literal, json.loads(source.text)))
            )
        case _:
            text = gbnf_to_lark(source.text) if _GBNF_RULE.search(source.text) else source.text
            grammar = LLMatcher.grammar_from_lark(text)
    return grammar


def parser_limits() -> object:
    """Return the library's limits: its own, but for the number of states that it keeps (2 KiB each)."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _literal(choice: str) -> str:
    """Write a string of the library's Lark dialect: with JSON's escapes, and no control characters."""
    return json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(question: bytes) -> CheckedGrammar:
    source = msgspec.json.decode(question, type=GrammarSource)
    grammar, error = _compiled(source)
    if error and source.kind == "json":
        error = _placed(source, error)
    return CheckedGrammar(error=error) if error else CheckedGrammar(grammar)


def _compiled(source: GrammarSource) -> tuple[str, str]:
    """Return the grammar in the library's own form, and what is wrong with it."""
    from llguidance import LLMatcher

    try:
        grammar = guidance_grammar(source)
        error = LLMatcher.validate_grammar(grammar, limits=parser_limits())
    except Exception as failure:  # noqa: BLE001 (whatever the library raises is about the text)
        return "", str(failure).strip()[:MAX_REASON_LENGTH] or type(failure).__name__
    return grammar, "" if error.startswith("WARNING") else error.strip()[:MAX_REASON_LENGTH]


def _placed(source: GrammarSource, error: str) -> str:
    """Put the path of the smallest schema that cannot be used, within the whole, before the error."""
    whole = json.loads(source.text)
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    deepest, found = "#", error
    for path, part in itertools.islice(parts_of(whole), 1, _MOST_PLACES):
        if not path.startswith(f"{deepest}/"):
            continue
        alone = {**part, **shared}
        _, own = _compiled(msgspec.structs.replace(source, text=json.dumps(alone)))
        if own:
            deepest, found = path, own
    return found if deepest == "#" else f"{deepest}: {found}"


if __name__ == "__main__":
    sys.exit(
        serve(lambda question: msgspec.json.encode(_checked(question)), float(sys.argv[1]), int(sys.argv[2]))
    )
