"""Server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
_MARK = b"\x00"
"""A byte that JSON cannot have."""
HOLE: Any = msgspec.Raw(_MARK)
"""It stands for a value in the data of a `Frame`."""

_encode = msgspec.json.Encoder().encode


def event(data: Any, name: str | None = None) -> bytes:
    """Encode an event; `data` is anything that msgspec makes JSON of, which has no line breaks."""
    if name is None:
        return b"data: %b\n\n" % _encode(data)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))


class Frame:
    """The events of a stream that differ in few values only: so do nearly all, and the rest of them is encoded once.

    The arguments are those of `event`, with `HOLE` in place of each value.
    """

    __slots__ = ("_template",)

    def __init__(self, data: Any, name: str | None = None) -> None:
        self._template = event(data, name).replace(b"%", b"%%").replace(_MARK, b"%b")

    def event(self, *values: Any) -> bytes:
        """Encode an event with these values, in the order of the holes."""
        return self._template % tuple(map(_encode, values))
