"""The decoding of bodies: strict about types, tolerant of fields that nobody here knows, which are logged."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from nbengine.checks import require_utf8, require_utf8_within
from nbengine.errors import shown
from nbengine.server.protocol.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MOST_NOTED = 1000
"""Unknown fields that are logged: each once, so that nobody fills the log."""
_LONGEST_NAME = 64
_PLACE = re.compile(r" - at `(?P<key>key in )?\$\.?(?P<path>[^`]*)`$")

_fields_of: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyDecoder(Generic[T]):
    """A decoder of the bodies of one route."""

    def __init__(self, body_type: type[T], route: str) -> None:
        self._decoder = msgspec.json.Decoder(body_type)
        self._route = route
        self._noted: set[str] = set()

    def decode(self, body: bytes) -> T:
        """Return the decoded body, and log the names of fields that are not known.

        Raises:
            ApiError: the body is no JSON, or a field has the wrong type; the error names it.
            InvalidArgumentError: a text has half of a surrogate pair.
        """
        try:
            decoded = self._decoder.decode(body)
            unknown = set(_unknown_fields(body, decoded))
        except msgspec.ValidationError as error:
            raise wrong_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _check_surrogates(body)
            raise bad_request(f"the body is not JSON in UTF-8: {error}", None, "invalid_json") from None
        except RecursionError:
            raise bad_request("the body is nested too deeply", None, "invalid_json") from None
        if unknown:
            self._note(unknown)
        return decoded

    def _note(self, unknown: set[str]) -> None:
        new = sorted(unknown - self._noted)[: MOST_NOTED - len(self._noted)]
        if not new:
            return
        # A long name is kept cut, and logged whenever it comes: it is no client's field.
        self._noted.update(name for name in new if len(name) <= _LONGEST_NAME)
        names = ", ".join(shown(name, _LONGEST_NAME) for name in new[:20])
        logger.warning("%s: unknown fields are ignored: %s", self._route, names)


def _unknown_fields(encoded: bytes | msgspec.Raw, decoded: msgspec.Struct, place: str = "") -> Iterator[str]:
    """Yield the names of fields that are not known, also of objects within: `stream_options.include_usge`. Those of
    lists, which may be long, are left out."""
    known = decoded.__struct_encode_fields__
    tag = decoded.__struct_config__.tag_field
    for name, value in _fields_of.decode(encoded).items():
        if name not in known:
            if name != tag:
                yield place + name
            continue
        inner = getattr(decoded, name, None)
        if isinstance(inner, msgspec.Struct):
            yield from _unknown_fields(value, inner, f"{place}{name}.")


def _check_surrogates(body: bytes) -> None:
    r"""Name the text of a refused body that has half of a surrogate pair: JSON can write that ("\ud83d"), and those who
    cut texts in the middle of an emoji send it."""
    if b"\\u" not in body:
        return
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name, value in fields.items() if isinstance(fields, dict) else ():
        require_utf8("a name of the body", name)
        require_utf8_within(name, value)


def wrong_field(error: msgspec.ValidationError) -> ApiError:
    """Make the error about a field of a wrong type, as msgspec describes it."""
    text = str(error)
    place = _PLACE.search(text)
    what = text if place is None else text[: place.start()]
    path = None if place is None else place["path"] or None
    missing = re.match(r"Object missing required field `([^`]+)`", what)
    if missing is not None:
        path = missing[1] if path is None else f"{path}.{missing[1]}"
        return bad_request(f"{path} is missing", path, "missing_required_parameter")
    name = "the body" if path is None else path
    return bad_request(f"{name}: {what[:1].lower()}{what[1:]}", path, "invalid_type")
