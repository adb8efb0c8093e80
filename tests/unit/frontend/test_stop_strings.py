"""Stop strings: the answer must not depend on how the text is cut into pieces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.text.stop_strings import StopStringMatcher
from tests.support.thorough import some
from tests.unit.frontend.stop_reference import chunkings, first_stop


def feed(pieces: list[str], stops: list[str]) -> tuple[tuple[str, int] | None, str]:
    """Feed pieces; return the stop with its start, and the text that was released before it or before the end."""
    matcher = StopStringMatcher(stops)
    text = ""
    released = 0
    for piece in pieces:
        text += piece
        match = matcher.feed(piece)
        if match is not None:
            start = len(text) - match.start_from_end
            assert text[start : len(text) - match.end_from_end] == match.stop
            return (match.stop, start), text[:released]
        released = max(released, len(text) - matcher.held())
    return None, text[:released]


@pytest.mark.parametrize("seed", some(range(60), ordinary=12))
def test_every_chunking_of_a_text_gives_the_first_stop_and_releases_nothing_of_it(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=10))
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
    expected = first_stop(text, stops)
    for pieces in chunkings(text):
        found, released = feed(pieces, stops)
        assert found == expected
        if found is not None:
            assert len(released) <= found[1], (pieces, stops)


@given(
    text=st.text("abcé\n", max_size=60),
    stops=st.lists(st.text("abcé\n", min_size=1, max_size=6), min_size=1, max_size=4),
    data=st.data(),
)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    matcher = StopStringMatcher(stops)
    if matcher.feed(text[:cut]) or matcher.feed(text[cut:]):
        return
    beginnings = [
        len(stop[:length]) for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    ]
    assert matcher.held() == max(beginnings, default=0)


def test_a_stop_string_that_ends_where_stopping_is_not_allowed_is_passed_over() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.feed("xab", may_stop=False) is None
    assert matcher.feed("xa", may_stop=False) is None
    match = matcher.feed("b!")
    assert match is not None
    assert (match.start_from_end, match.end_from_end) == (3, 1)
