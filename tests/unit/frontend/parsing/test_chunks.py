"""Any way of cutting a text gives the same parts, whatever the text is."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbengine.frontend.parsing.answer_parser import AnswerParser, ParsedAnswer
from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.frontend.parsing.formats import REASONING_PARSERS, TOOL_PARSERS, AnswerFormat
from nbengine.frontend.parsing.json_text import ObjectPrefix, read_object
from tests.unit.frontend.parsing.answers import EXAMPLES, TOOLS, deltas_of, parser_of, parts_of

FORMATS = [AnswerFormat("gpt_oss", "gpt_oss")] + [
    AnswerFormat(reasoning, tools)
    for reasoning, tools in itertools.zip_longest(
        [name for name in REASONING_PARSERS if name != "gpt_oss"],
        [name for name in TOOL_PARSERS if name != "gpt_oss"],
    )
]
SPECIAL = frozenset({"<|im_end|>", "<|eot_id|>", "<s>", "<|tool_call|>", "<|channel|>", "[TOOL_CALLS]"})
FRAGMENTS = [
    *'{}[]",:<>=\n \\()a1;',
    '"name": ',
    '"now"',
    '"arguments": {',
    '"parameters": {"a": "b"}',
    '{"name": "now", "arguments": {}}',
    "now(",
    "weather(place=",
    "'x'",
    "call:now{",
    "```json\n",
    "assistant",
    "analysis",
    "to=functions.now",
    "é😀",
    "<function=now>",
    "<parameter=place>",
]


def texts(chosen: AnswerFormat) -> st.SearchStrategy[str]:
    """Texts of a format's markers and of what stands between them, and examples with a piece of those in them."""
    markers = st.sampled_from(sorted(chosen.markers | SPECIAL))
    fragment = st.one_of(markers, markers, st.sampled_from(FRAGMENTS))
    return st.one_of(
        st.lists(fragment, max_size=14).map("".join),
        st.builds(
            lambda example, cut, extra: example.text[:cut] + extra + example.text[cut:],
            st.sampled_from([example for example in EXAMPLES if example.format.tools == chosen.tools]),
            st.integers(0, 200),
            fragment,
        ),
    )


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def parser(chosen: AnswerFormat, *, opened: bool, has_specials: bool) -> AnswerParser:
    return AnswerParser(
        chosen,
        tools=TOOLS,
        prompt_opens_reasoning=opened,
        special_tokens=SPECIAL if has_specials else frozenset(),
    )


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: f"{chosen.reasoning}-{chosen.tools}")
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 400), max_size=20),
    opened=st.booleans(),
    has_specials=st.booleans(),
)
def test_pieces_do_not_matter(
    chosen: AnswerFormat, data: st.DataObject, cuts: list[int], opened: bool, has_specials: bool
) -> None:
    text = data.draw(texts(chosen))
    whole = deltas_of(parser(chosen, opened=opened, has_specials=has_specials), [text])
    cut = deltas_of(parser(chosen, opened=opened, has_specials=has_specials), pieces(text, cuts))
    single = deltas_of(parser(chosen, opened=opened, has_specials=has_specials), list(text))
    assert parts_of(cut) == parts_of(single) == parts_of(whole)
    check_order(whole)
    check_order(single)


def check_order(deltas: list[AnswerDelta]) -> None:
    """Check that calls come one after the other, and each ends once, with a JSON object or as malformed."""
    open_index: int | None = None
    arguments = ""
    num_started = 0
    for delta in deltas:
        match delta:
            case ToolCallStarted(index=index):
                assert open_index is None
                assert index == num_started
                open_index, arguments = index, ""
                num_started += 1
            case ArgumentsDelta(index=index, text=text):
                assert index == open_index
                assert text
                arguments += text
            case ToolCallEnded(index=index):
                assert index == open_index
                assert isinstance(read_object(arguments), dict)
                open_index = None
            case MalformedCall(index=index, text=text):
                assert index == open_index
                assert text
                open_index = None
            case _:
                assert delta.text
    assert open_index is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(), VALUES, max_size=4),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    cuts=st.lists(st.integers(0, 400), max_size=20),
)
@example(value={"😀": ["\\", '"', -1.5e300]}, is_ascii=True, indent=None, cuts=list(range(40)))
def test_an_object_is_one_from_its_first_piece_to_its_last(
    value: dict[str, object], is_ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    prefix = ObjectPrefix()
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert all(prefix.take(piece) for piece in pieces(text, cuts))
    assert not prefix.take("{")


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_arguments_come_while_their_call_is_written(tools: str) -> None:
    early = [0]
    for answer in (answer for answer in EXAMPLES if answer.format.tools == tools):
        reader = parser_of(answer)
        num_pieces = 0
        for character in answer.text:
            kinds = {type(delta) for delta in reader.feed(character)}
            if ToolCallEnded in kinds:
                early.append(num_pieces)
                num_pieces = 0
            elif ArgumentsDelta in kinds:
                num_pieces += 1
    # Some ways of writing calls show a value only when it is whole, but none all of them.
    assert max(early) > 3


@pytest.mark.parametrize("tools", [name for name in TOOL_PARSERS if name != "gpt_oss"])
@given(text=st.text(max_size=60))
@example(text=" \n")
@example(text="  leading and trailing \n")
def test_text_without_markers_is_content_to_the_letter(tools: str, text: str) -> None:
    found = deltas_of(AnswerParser(AnswerFormat(None, tools)), [text[:7], text[7:]])
    if all(isinstance(delta, ContentDelta) for delta in found):
        assert ParsedAnswer(found).content == text
    else:
        # Only an answer that begins like a call, or has a marker in it, can be one.
        markers = TOOL_PARSERS[tools].markers()
        assert text.lstrip()[:1] in ("{", "[") or any(marker in text for marker in markers)


@given(text=texts(AnswerFormat(None, "hermes")))
def test_nothing_is_held_back_that_cannot_be_a_marker(text: str) -> None:
    reader = AnswerParser(AnswerFormat(None, "hermes"), tools=TOOLS)
    shown = ParsedAnswer(reader.feed(text.replace("<", "") + "x")).content
    assert shown == text.replace("<", "") + "x"


@pytest.mark.parametrize("tools", [name for name in TOOL_PARSERS if name != "gpt_oss"])
@given(data=st.data())
def test_nothing_is_lost_where_no_call_is_complete(tools: str, data: st.DataObject) -> None:
    text = data.draw(texts(AnswerFormat(None, tools)))
    found = deltas_of(AnswerParser(AnswerFormat(None, tools), tools=TOOLS), [text])
    if not any(isinstance(delta, ToolCallEnded) for delta in found):
        assert ParsedAnswer(found).content.split() == text.split()
