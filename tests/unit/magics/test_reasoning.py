"""Reasoning is told from the answer, wherever a stream is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.magics.conversations.reasoning import TAGS, Answer, split_reasoning, tag_opened_by


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_tags_at_the_beginning_hold_reasoning(opening: str, closing: str) -> None:
    written = f"\n{opening}\nlet me see\n{closing}\n\nForty-two."
    assert split_reasoning(written) == Answer("Forty-two.", "let me see")
    assert tag_opened_by(f"<user>hi<assistant>{opening}\n") == closing
    assert split_reasoning(f"let me see{closing}Yes", closing) == Answer("Yes", "let me see")


@pytest.mark.parametrize(
    "text", ["Use <think> and </think>.", "", "<thin air>", "</think> alone", "  leading"]
)
def test_anything_else_is_the_answer_to_the_letter(text: str) -> None:
    assert split_reasoning(text) == Answer(text)


def test_a_prompt_that_closes_its_own_tag_has_begun_nothing() -> None:
    assert tag_opened_by("<assistant><think>\n\n</think>\n\n") is None
    assert tag_opened_by("say <think> twice<assistant>") is None


def test_a_tag_repeated_after_the_prompts_is_not_part_of_the_reasoning() -> None:
    assert split_reasoning("<think>a</think>b", "</think>") == Answer("b", "a")


def test_what_may_be_a_tag_is_held_back_while_it_streams() -> None:
    assert split_reasoning("<think>x</th", complete=False) == Answer("", "x", is_reasoning=True)
    assert split_reasoning("<th", complete=False) == Answer("")
    assert split_reasoning("<th") == Answer("<th")


def test_reasoning_without_an_end_says_so() -> None:
    assert split_reasoning("<think>because") == Answer("", "because", is_reasoning=True)
    assert split_reasoning("<think>x</th") == Answer("", "x</th", is_reasoning=True)


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
    tag = closing if opened else None
    final = split_reasoning(written, tag)
    shown = [split_reasoning(written[:size], tag, complete=False) for size in range(len(written) + 1)]
    for before, after in itertools.pairwise(shown):
        assert after.text.startswith(before.text)
        assert not (before.text and after.is_reasoning)
    if closing not in reasoning and not (opened and reasoning.lstrip().startswith(tuple(o for o, _ in TAGS))):
        assert final == Answer(answer.lstrip(), reasoning.strip())
        for answered in shown:
            assert final.reasoning.startswith(answered.reasoning) or answered.reasoning.startswith(
                final.reasoning
            )
    assert shown[-1].text == final.text
