"""Reasoning is told from the answer, wherever a stream is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import REASONING_PARSERS, AnswerFormat
from nbengine.frontend.parsing.reasoning.families import TagsReasoningParser
from nbengine.magics.conversations.answer import Answer, answer_in, reading_of

ANY = AnswerReading(AnswerFormat("tags"))
OPENED = AnswerReading(AnswerFormat("tags"), prompt_opens_reasoning=True)
TAGS = TagsReasoningParser.tags


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_tags_at_the_beginning_hold_reasoning(opening: str, closing: str) -> None:
    written = f"\n{opening}\nlet me see\n{closing}\n\nForty-two."
    assert answer_in(written, ANY) == Answer("Forty-two.", "let me see")
    reading = reading_of({"prompt": f"<user>hi<assistant>{opening}\n"})
    assert answer_in(f"let me see{closing}Yes", reading) == Answer("Yes", "let me see")


@pytest.mark.parametrize(
    "text", ["Use <think> and </think>.", "", "<thin air>", "</think> alone", "  leading", " \n"]
)
def test_anything_else_is_the_answer_to_the_letter(text: str) -> None:
    assert answer_in(text, ANY) == Answer(text)


def test_a_prompt_that_closes_its_own_tag_has_begun_nothing() -> None:
    assert not reading_of({"prompt": "<assistant><think>\n\n</think>\n\n"}).prompt_opens_reasoning
    assert not reading_of({"prompt": "say <think> twice<assistant>"}).prompt_opens_reasoning


def test_a_prompt_may_say_itself_how_its_answer_is_read() -> None:
    own = AnswerReading(AnswerFormat("granite"))
    assert reading_of({"prompt": "", "answer": own}) is own
    without_reasoning = AnswerReading(AnswerFormat(None, "hermes"))
    found = reading_of({"prompt": "", "answer": without_reasoning})
    assert found.format == AnswerFormat(ANY.format.reasoning, "hermes")


def test_a_tag_repeated_after_the_prompts_is_not_part_of_the_reasoning() -> None:
    assert answer_in("<think>a</think>b", OPENED) == Answer("b", "a")


def test_only_the_tag_of_the_opening_one_closes_reasoning() -> None:
    assert answer_in("<thinking>a</think>b</thinking>c", ANY) == Answer("c", "a</think>b")


def test_what_may_be_a_tag_is_held_back_while_it_streams() -> None:
    assert answer_in("<think>x</th", ANY, complete=False) == Answer("", "x", is_reasoning=True)
    assert answer_in("<th", ANY, complete=False) == Answer("")
    assert answer_in("<th", ANY) == Answer("<th")


def test_reasoning_without_an_end_says_so() -> None:
    assert answer_in("<think>because", ANY) == Answer("", "because", is_reasoning=True)
    assert answer_in("<think>x</th", ANY) == Answer("", "x</th", is_reasoning=True)


def test_an_introduction_and_the_end_of_an_answer_are_left_out() -> None:
    granite = AnswerReading(AnswerFormat("granite"))
    assert answer_in("<think>a</think>\n<response>b </response>c</response> \n", granite) == Answer(
        "b </response>c", "a"
    )
    assert answer_in("<think>a</think>b</response>", granite) == Answer("b</response>", "a")


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_the_text_that_closes_reasoning_does_so(name: str) -> None:
    family = REASONING_PARSERS[name]
    assert family.closing_marker() in family.closing_text()
    reading = AnswerReading(AnswerFormat(name), prompt_opens_reasoning=True)
    assert answer_in(f"hm{family.closing_text()}Yes", reading) == Answer("Yes", "hm")
    opening = family.tags[0][0]
    assert answer_in(f"{opening}hm{family.closing_text()}Yes", AnswerReading(AnswerFormat(name))) == Answer(
        "Yes", "hm"
    )


@given(
    pair=st.sampled_from(TAGS),
    opened=st.booleans(),
    reasoning=st.text("ab <>/think\n", max_size=30),
    answer=st.text("ab <>/think\n", max_size=30),
)
def test_while_it_streams_nothing_is_shown_that_is_taken_back(
    pair: tuple[str, str], opened: bool, reasoning: str, answer: str
) -> None:
    opening, closing = pair
    written = f"{'' if opened else opening}{reasoning}{closing}{answer}"
    reading = OPENED if opened else ANY
    final = answer_in(written, reading)
    shown = [answer_in(written[:size], reading, complete=False) for size in range(len(written) + 1)]
    for before, after in itertools.pairwise(shown):
        assert after.text.startswith(before.text)
        assert after.reasoning.startswith(before.reasoning)
        assert not (before.text and after.is_reasoning)
    is_plain = not any(end in reasoning for _, end in TAGS)
    if is_plain and not (opened and reasoning.lstrip().startswith(tuple(begin for begin, _ in TAGS))):
        assert final == Answer(answer.lstrip(), reasoning.strip())
    assert shown[-1].text == final.text
