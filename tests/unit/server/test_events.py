"""Events that are encoded around a few values are those that are encoded as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine.server.events import HOLE, Frame, event

STRANGE = ["", "a", "\x00", "%b %% %d", '"\\\n', "é\u2028😀", "data: x\n\n"]


@pytest.mark.parametrize("name", [None, "a.name"])
@pytest.mark.parametrize("around", STRANGE)
@pytest.mark.parametrize("text", STRANGE)
def test_a_frame_with_values_is_the_event_with_them(name: str | None, around: str, text: str) -> None:
    def data(number: Any, text: Any, entries: Any) -> dict[str, Any]:
        return {"id": around, "number": number, "delta": {"text": text, around: 1}, "entries": entries}

    frame = Frame(data(HOLE, HOLE, HOLE), name)
    for number, entries in ((0, []), (12_345, [{"token": text}])):
        assert frame.event(number, text, entries) == event(data(number, text, entries), name)


def test_a_frame_takes_as_many_values_as_it_has_holes() -> None:
    frame = Frame({"a": HOLE, "b": HOLE})
    for values in ((), (1,), (1, 2, 3)):
        with pytest.raises(TypeError):
            frame.event(*values)
