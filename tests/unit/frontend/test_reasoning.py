"""The marks around reasoning: which a template has, where a prompt leaves them, and their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.parsing.answer_parser import AnswerParser, ParsedAnswer
from nbengine.frontend.parsing.formats import REASONING_PARSERS, AnswerFormat
from nbengine.frontend.parsing.harmony import HarmonyReasoningParser
from nbengine.frontend.parsing.reading import answer_reading
from nbengine.frontend.parsing.reasoning.base import ReasoningParser
from nbengine.frontend.parsing.reasoning.families import (
    GraniteReasoningParser,
    Qwen3ReasoningParser,
    TagsReasoningParser,
)
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.frontend.requests.reasoning import ReasoningInputs, ReasoningMarks, reasoning_marks
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams

MARKS = ReasoningMarks(endings=("</think>",), closing="\n</think>\n\n", openings=("<think>",))
GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))


def tokenizer(*added: str) -> Tokenizer:
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token, normalized=False) for token in added])
    return made


def inputs(*added: str) -> tuple[ReasoningInputs, Tokenizer]:
    made = tokenizer(*added)
    return ReasoningInputs(made, TextEncoder(made)), made


def test_marks_are_those_of_a_family_of_models() -> None:
    assert reasoning_marks(Qwen3ReasoningParser, "") == MARKS
    assert reasoning_marks(TagsReasoningParser, "... </thought> ...") == ReasoningMarks(
        endings=("</thought>",), closing="\n</thought>\n\n", openings=("<thought>",)
    )
    # Of a template that only opens reasoning, the tag that closes it is known all the same.
    assert reasoning_marks(TagsReasoningParser, "... <thought> ...") == reasoning_marks(
        TagsReasoningParser, "... </thought> ..."
    )
    assert reasoning_marks(GraniteReasoningParser, "</think>").introductions[0] == "<response>"


@pytest.mark.parametrize(
    ("prompt", "parser", "found"),
    [
        ("user: hello\nassistant:<think>\n", "auto", "tags"),
        ("user: hello\nassistant:<thought>", "auto", "tags"),
        ("user: <think>\nassistant:", "auto", None),
        ("user: hello\nassistant:<think>\n", "none", None),
    ],
)
def test_a_prompt_that_opens_reasoning_tells_of_it_where_its_template_does_not(
    prompt: str, parser: str, found: str | None
) -> None:
    reading = answer_reading("{{ messages }}<think>\n", prompt, (), frozenset(), reasoning_parser=parser)
    assert (None if reading is None else reading.format.reasoning) == found
    assert reading is None or reading.prompt_opens_reasoning


@pytest.mark.parametrize("family", REASONING_PARSERS.values())
def test_the_closing_of_every_family_ends_its_reasoning(family: type[ReasoningParser]) -> None:
    marks = reasoning_marks(family, "")
    assert any(ending in marks.closing for ending in marks.endings)
    answer = AnswerParser(AnswerFormat(next(n for n, f in REASONING_PARSERS.items() if f is family)))
    opening = family.tags[0][0]
    deltas = [*answer.feed(f"{opening}thoughts{marks.closing}{{}}"), *answer.finish()]
    found = ParsedAnswer(deltas)
    assert (found.reasoning, found.content) == ("thoughts", "{}")


def test_every_answer_in_harmony_stands_behind_a_mark_and_a_call_may_end_the_output_before_it() -> None:
    marks = reasoning_marks(HarmonyReasoningParser, "").behind("<|start|>assistant")
    assert marks is not None
    assert marks.openings == ()
    assert marks.final == ("<|call|>",)


@pytest.mark.parametrize(
    ("prompt", "openings"),
    [
        ("user: hello\nassistant:", ("<think>",)),
        ("user: </think> <think> hello\nassistant:", ("<think>",)),
        ("assistant:<think>\n", ()),
        ("assistant:<think>", ()),
        ("assistant:<think>\n\n</think>\n\n", None),
        ("assistant:</think>", None),
    ],
)
def test_the_end_of_a_prompt_says_whether_reasoning_has_begun(
    prompt: str, openings: tuple[str, ...] | None
) -> None:
    marks = MARKS.behind(prompt)
    assert (None if marks is None else marks.openings) == openings


def test_reasoning_does_not_begin_in_the_middle_of_a_message() -> None:
    assert MARKS.behind("assistant: as I said", may_begin=False) is None
    opened = MARKS.behind("assistant: <think>", may_begin=False)
    assert opened is not None
    assert opened.openings == ()


def test_an_added_token_is_a_fixed_mark_and_anything_else_a_text() -> None:
    made, encoder = inputs("<think>", "</think>")
    found = made.tokens_for(MARKS, GRAMMAR)
    assert found is not None
    newline, opening, ending = (encoder.encode(text).ids for text in ("\n", "<think>", "</think>"))
    assert (found.endings, found.ending_texts) == ([ending], [])
    assert found.openings == [opening, newline + opening]
    assert found.closing == newline + ending + newline * 2
    assert found.gaps == [newline * 2, newline]

    made, _ = inputs()
    found = made.tokens_for(MARKS, GRAMMAR)
    assert found is not None
    assert (found.endings, found.ending_texts) == ([], ["</think>"])


def test_a_mark_between_two_added_tokens_is_fixed() -> None:
    made, encoder = inputs("<|channel|>", "<|message|>", "<|call|>")
    final = "<|channel|>final<|message|>"
    marks = ReasoningMarks(endings=(final,), closing=f"x{final}", final=("<|call|>", "<|unknown|>"))
    found = made.tokens_for(marks, GRAMMAR)
    assert found is not None
    assert found.endings == [encoder.encode(final).ids]
    assert found.gaps == []
    assert found.final_token_ids == [encoder.token_to_id("<|call|>")]


def test_requests_without_a_grammar_or_a_budget_carry_no_marks() -> None:
    made, _ = inputs()
    assert made.tokens_for(MARKS, SamplingParams()) is None
    assert made.tokens_for(MARKS, SamplingParams(thinking_budget=0)) is not None
    assert made.tokens_for(None, SamplingParams(thinking_budget=0)) is None
    assert made.tokens_for(None, GRAMMAR, is_known=False) is None


@pytest.mark.parametrize(
    ("marks", "params", "is_known", "reason"),
    [
        (None, {}, False, "thinking_budget.*not known where reasoning ends"),
        (MARKS, {"allowed_token_ids": [1]}, True, "thinking_budget.*allowed_token_ids with"),
        (MARKS, {"bad_words_token_ids": [[31, 31]]}, True, "bad_words"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    marks: ReasoningMarks | None, params: dict[str, Any], is_known: bool, reason: str
) -> None:
    made, encoder = inputs()
    if "bad_words_token_ids" in params:
        params = {"bad_words_token_ids": [encoder.encode("\n\n").ids]}
    with pytest.raises(InvalidArgumentError, match=reason):
        made.tokens_for(marks, SamplingParams(thinking_budget=4, **params), is_known=is_known)


@pytest.mark.parametrize("marks", ["</think>", {"endings": ["</think>"]}])
def test_something_else_than_marks_is_refused(marks: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"reasoning.*ReasoningMarks, or None"):
        inputs()[0].tokens_for(marks, GRAMMAR)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"endings": ()}, "endings"),
        ({"endings": ("",)}, "endings"),
        ({"openings": ("",)}, "openings"),
        ({"closing": "\n"}, "closing"),
    ],
)
def test_marks_that_end_nothing_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"reasoning.{name}"):
        ReasoningMarks(**{"endings": ("</t>",), "closing": "</t>", **fields})
