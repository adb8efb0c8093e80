"""Ways to compare an answer with an expected value."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import regex

from nbengine.errors import InvalidArgumentError
from nbengine.magics.generation.markdown import unfenced
from nbengine.plain import plain

Matcher = Callable[[str], bool]
"""A function that takes the text of an answer, without reasoning."""

_AROUND = "\"'“”‘’«»`*_ "
"""Quotation marks and emphasis, which do not matter around a normalised text."""
_BEHIND = ".,;:!?… "
_SEARCH_SECONDS = 2.0
"""Seconds after which a search is given up: some patterns take longer than anybody lives."""
_MISSING = ("NAType", "NaTType")
"""The types of what stands in tables of pandas where there is no value, besides None and NaN."""


def normalised(text: str) -> str:
    """Return a text without what mostly does not matter.

    That is: case, the form of its Unicode (NFKC), the kind and amount of white space, quotation marks and
    emphasis around it, and punctuation at its end.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text, before = " ".join(text.split()), ""
    while text != before:
        before, text = text, text.strip(_AROUND).rstrip(_BEHIND)
    return text


def contains(found: object, expected: object) -> bool:
    """Return whether JSON has all fields of `expected`, at any depth, with equal values; other fields may be there.

    Lists are equal where their elements are, one by one. A truth value is no number.
    """
    if isinstance(expected, Mapping):
        return isinstance(found, dict) and all(
            key in found and contains(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(contains, found, expected))
    return isinstance(found, bool) == isinstance(expected, bool) and found == expected


def matcher_of(match: str, expected: object) -> Matcher:
    """Make the function that compares answers with an expected value.

    Raises:
        InvalidArgumentError: the value is missing, or not of the form that `match` needs.
    """
    value = plain(expected)
    if value is None or type(value).__name__ in _MISSING or (isinstance(value, float) and math.isnan(value)):
        raise InvalidArgumentError("the expected value", expected, "a value: this row has none")
    return MATCHERS[match](value)


def _exact(expected: object) -> Matcher:
    wanted = str(expected)
    return lambda text: text == wanted


def _normalised(expected: object) -> Matcher:
    wanted = normalised(str(expected))
    return lambda text: normalised(text) == wanted


def _regex(expected: object) -> Matcher:
    try:
        pattern = regex.compile(str(expected))
    except (regex.error, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(
            "the expected value", expected, f"a regular expression ({error})"
        ) from None

    def is_in(text: str) -> bool:
        try:
            # The interpreter is free meanwhile: answers go on streaming.
            return pattern.search(text, timeout=_SEARCH_SECONDS, concurrent=True) is not None
        except TimeoutError:
            wanted = f"a regular expression that is looked for within {_SEARCH_SECONDS:g} s"
            raise InvalidArgumentError("the expected value", expected, wanted) from None

    return is_in


def _json(expected: object) -> Matcher:
    fields: Any = expected
    if isinstance(expected, str):
        try:
            fields = json.loads(expected)
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, Mapping):
        raise InvalidArgumentError("the expected value", expected, "a dict of fields, or JSON of an object")
    return partial(_has_fields, fields)


def _has_fields(fields: Mapping[str, Any], text: str) -> bool:
    try:
        found = json.loads(unfenced(text)[0])
    except (ValueError, RecursionError):
        return False
    return contains(found, fields)


MATCHERS: Mapping[str, Callable[[object], Matcher]] = {
    "exact": _exact,
    "normalised": _normalised,
    "regex": _regex,
    "json": _json,
}
"""The ways to compare, by the names that `--match` takes."""
