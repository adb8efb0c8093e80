"""Where reasoning ends and the answer begins, token by token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.scheduler.reasoning import ReasoningPhase, ReasoningTracker

OPEN, END, NEWLINE, WORD, BLANK = 1, 2, 3, 4, 5
PIECES = {6: "<", 7: "/t", 8: "h>", 9: ".<", 10: "h>\n", 11: "h>{", WORD: "word ", NEWLINE: "\n"}
"""Tokens of a model that has no token of its own for `</th>`."""
CLOSING = [NEWLINE, END, BLANK]


def marks(**changes: Any) -> ReasoningTokens:
    return ReasoningTokens(**{"endings": [[END]], "closing": CLOSING, **changes})


def spelled(**changes: Any) -> ReasoningTokens:
    return ReasoningTokens(ending_texts=["</th>"], closing=[NEWLINE, 6, 7, 8], **changes)


def decode(token_ids: Any) -> str:
    return "".join(PIECES.get(token_id, "?") for token_id in token_ids)


def answer_of(tracker: ReasoningTracker, output: list[int]) -> list[int]:
    return [token_id for token_id in output if tracker.take(token_id)]


def closed(tracker: ReasoningTracker, wish: int = WORD, most: int = 50) -> list[int]:
    """Return the output of a model that always writes `wish` if it may, until its answer has begun."""
    output: list[int] = []
    while tracker.phase is not ReasoningPhase.ANSWER and len(output) < most:
        output.append(wish if tracker.is_free(0) else tracker.next_tokens[0])
        tracker.take(output[-1])
    return output


def test_the_answer_begins_behind_the_closing_mark_of_a_prompt_that_has_opened_reasoning() -> None:
    tracker = ReasoningTracker(marks(), None)
    assert answer_of(tracker, [WORD, NEWLINE, END, WORD, END]) == [WORD, END]
    assert tracker.num_reasoning_tokens == 3


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ([OPEN, WORD, END, WORD], [WORD]),
        ([NEWLINE, OPEN, WORD, END, WORD], [WORD]),
        ([WORD, OPEN, WORD, END], [WORD, OPEN, WORD, END]),
        # The line break looked like the beginning of an opening, and was part of the answer.
        ([NEWLINE, WORD, OPEN], [WORD, OPEN]),
    ],
)
def test_a_model_that_may_open_reasoning_does_so_at_the_very_beginning(
    output: list[int], answer: list[int]
) -> None:
    tracker = ReasoningTracker(marks(openings=[[OPEN], [NEWLINE, OPEN]]), None)
    assert tracker.phase is ReasoningPhase.BEFORE
    assert tracker.next_tokens == [OPEN, NEWLINE]
    assert answer_of(tracker, output) == answer


@pytest.mark.parametrize(
    ("output", "rest"),
    [
        ([WORD, 6, 7, 8], ""),
        ([WORD, 9, 7, 8], ""),
        ([6, 6, 7, 10], ""),
        ([WORD, 6, 7, 11], "{"),
    ],
)
def test_a_mark_of_several_tokens_is_found_however_they_are_cut(output: list[int], rest: str) -> None:
    tracker = ReasoningTracker(spelled(), None, decode)
    for token_id in output:
        assert tracker.phase is ReasoningPhase.REASONING
        assert not tracker.take(token_id)
    assert (tracker.phase, tracker.rest) == (ReasoningPhase.ANSWER, rest)


def test_a_mark_is_found_behind_any_length_of_reasoning() -> None:
    tracker = ReasoningTracker(spelled(), None, decode)
    assert answer_of(tracker, [WORD, 6, 7] * 100) == []
    assert answer_of(tracker, [6, 7, 8, WORD]) == [WORD]


def test_white_space_may_stand_before_the_answer() -> None:
    gap = marks(gaps=[[BLANK], [NEWLINE]])
    tracker = ReasoningTracker(gap, None)
    assert answer_of(tracker, [END]) == []
    assert (tracker.phase, tracker.next_tokens) == (ReasoningPhase.GAP, [BLANK, NEWLINE])
    assert answer_of(tracker, [BLANK, BLANK, WORD]) == [BLANK, WORD]
    assert answer_of(ReasoningTracker(gap, None), [END, WORD]) == [WORD]


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("openings", [[], [[OPEN]]])
def test_a_spent_budget_closes_reasoning(budget: int, openings: list[list[int]]) -> None:
    tracker = ReasoningTracker(marks(openings=openings), budget)
    opening = [OPEN] if openings else []
    for token_id in opening:
        assert tracker.is_free(0)
        tracker.take(token_id)
    assert closed(tracker) == [WORD] * budget + CLOSING
    assert tracker.num_reasoning_tokens == budget


def test_reasoning_that_ends_by_itself_in_time_is_not_closed_again() -> None:
    tracker = ReasoningTracker(marks(), 3)
    assert answer_of(tracker, [WORD, WORD, END, WORD]) == [WORD]
    assert tracker.is_free(0)


def test_a_closing_that_the_model_has_begun_is_completed() -> None:
    tracker = ReasoningTracker(marks(), 2)
    assert answer_of(tracker, [WORD, NEWLINE]) == []
    assert closed(tracker) == CLOSING[1:]


def test_an_answer_that_comes_without_reasoning_has_no_budget() -> None:
    tracker = ReasoningTracker(marks(openings=[[OPEN]]), 0)
    assert answer_of(tracker, [WORD, OPEN, WORD]) == [WORD, OPEN, WORD]
    assert tracker.is_free(0)


def test_another_token_in_the_closing_is_an_error_that_names_it_and_more_reasoning_to_be_closed() -> None:
    tracker = ReasoningTracker(marks(), 0)
    assert answer_of(tracker, [NEWLINE, WORD]) == []
    assert f"the token {WORD} came where the reasoning had to be closed" in tracker.error
    assert closed(tracker) == CLOSING


@given(
    budget=st.one_of(st.none(), st.integers(0, 6)),
    openings=st.sampled_from([[], [[OPEN]], [[OPEN], [NEWLINE, OPEN]]]),
    wishes=st.lists(st.sampled_from([OPEN, END, NEWLINE, WORD]), max_size=14),
    ahead=st.integers(0, 5),
)
def test_a_place_that_is_free_however_the_tokens_before_it_turn_out_is_free_in_the_end(
    budget: int | None, openings: list[list[int]], wishes: list[int], ahead: int
) -> None:
    tracker = ReasoningTracker(marks(openings=openings), budget)
    promised: list[bool] = []
    for place, wish in enumerate(wishes):
        is_free = tracker.is_free(0)
        promised.append(tracker.is_free(ahead))
        assert is_free or place < ahead or not promised[place - ahead]
        tracker.take(wish if is_free else tracker.next_tokens[0])
        assert not tracker.error
    assert budget is None or tracker.num_reasoning_tokens <= budget
