"""An answer is divided into the same segments, however its parts come."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.server.translate.segments import Logprobs, Segment, Segmenter


class Seen:
    """A listener that writes down what it hears, and checks that one segment is open at a time."""

    def __init__(self) -> None:
        self.segments: list[tuple[str, str]] = []
        self.open: Segment | None = None
        self.text = ""

    def opened(self, segment: Segment) -> None:
        assert self.open is None
        assert segment.index == len(self.segments)
        self.open, self.text = segment, ""

    def grown(self, segment: Segment, text: str, _logprobs: Logprobs, /) -> None:
        assert self.open is segment
        self.text += text

    def closed(self, segment: Segment) -> None:
        assert self.open is segment
        assert segment.text == self.text
        self.segments.append((segment.kind, self.text))
        self.open = None

    def voided(self, segment: Segment) -> None:
        assert self.open is segment
        self.segments.append(("void", self.text))
        self.open = None


def segments_of(deltas: list[AnswerDelta]) -> list[tuple[str, str]]:
    seen = Seen()
    segmenter = Segmenter(seen)
    for delta in deltas:
        segmenter.feed([delta])
    segmenter.finish()
    assert seen.open is None
    return seen.segments


CALL: list[AnswerDelta] = [ToolCallStarted(0, "a", "f"), ArgumentsDelta(0, "{}"), ToolCallEnded(0)]
BLANK = ContentDelta("\n")
LINES = st.lists(st.sampled_from(["a", "b ", "\n", " ", ""]), min_size=1, max_size=6)


@st.composite
def stretches(draw: st.DrawFn) -> list[AnswerDelta]:
    match draw(st.sampled_from(["reasoning", "content", "call"])):
        case "reasoning":
            return [ReasoningDelta(text) for text in draw(LINES)]
        case "content":
            return [ContentDelta(text) for text in draw(LINES)]
        case _:
            return CALL


@given(st.lists(stretches(), max_size=5))
def test_pieces_of_any_size_give_the_same_segments(answer: list[list[AnswerDelta]]) -> None:
    pieces = [delta for stretch in answer for delta in stretch]
    whole: list[AnswerDelta] = []
    for delta in pieces:
        last: Any = whole[-1] if whole else None
        if type(last) is type(delta) and isinstance(delta, ReasoningDelta | ContentDelta):
            whole[-1] = type(delta)(last.text + delta.text)
        else:
            whole.append(delta)
    assert segments_of(pieces) == segments_of(whole)


@given(st.lists(stretches(), max_size=5))
def test_no_text_is_lost_but_white_space_between_other_segments(answer: list[list[AnswerDelta]]) -> None:
    deltas = [delta for stretch in answer for delta in stretch]
    given_text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    found = "".join(text for kind, text in segments_of(deltas) if kind == "text")
    assert "".join(found.split()) == "".join(given_text.split())


def test_white_space_before_a_call_is_no_segment() -> None:
    assert segments_of([ReasoningDelta("r"), BLANK, *CALL, BLANK, *CALL, BLANK]) == [
        ("reasoning", "r"),
        ("call", "{}"),
        ("call", "{}"),
    ]


def test_white_space_before_text_belongs_to_it() -> None:
    assert segments_of([BLANK, ContentDelta("a"), BLANK, ContentDelta("b")]) == [("text", "\na\nb")]


def test_a_call_that_turns_out_malformed_is_void_and_its_text_follows() -> None:
    deltas = [ToolCallStarted(0, "a", "f"), ArgumentsDelta(0, "{"), MalformedCall("<call>{", "cut off", 0)]
    assert segments_of(deltas) == [("void", "{"), ("text", "<call>{")]
    assert segments_of([MalformedCall("<call>", "cut off")]) == [("text", "<call>")]


def test_a_call_without_an_end_is_void() -> None:
    assert segments_of([ToolCallStarted(0, "a", "f"), ArgumentsDelta(0, "{")]) == [("void", "{")]
