"""Masks and ends of requests that think before they answer in a grammar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nbengine.config import ModelConfig
from nbengine.engine.core import structured
from nbengine.engine.core.structured import StructuredOutputManager
from nbengine.engine.core.thinking import ThinkingGrammar
from nbengine.errors import RequestError
from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.scheduler.grammar import Grammar
from tests.support.thorough import amount
from tests.unit.engine.structured.grammar_rig import END, EOS, VOCAB_SIZE, InThisProcess, allowed, encode

Encode = Callable[[str], list[int]]
Start = Callable[..., ThinkingGrammar]


@pytest.fixture
def tokens(tokenizer: Tokenizer) -> Encode:
    return lambda text: encode(tokenizer, text)


@pytest.fixture
def start(manager: StructuredOutputManager, tokens: Encode) -> Start:
    """Begin a request whose reasoning ends with `</t>` and is closed with a line break before it."""

    def begin(
        params: dict[str, Any] | None = None,
        openings: Sequence[str] = (),
        gaps: Sequence[str] = (),
        **constraint: Any,
    ) -> ThinkingGrammar:
        marks = ReasoningTokens(
            openings=[tokens(text) for text in openings],
            ending_texts=["</t>"],
            closing=tokens("\n</t>"),
            gaps=[tokens(text) for text in gaps],
        )
        outputs = StructuredOutputsParams(**constraint) if constraint else None
        asked = {"eos_token_id": EOS, "max_tokens": 100} | (params or {})
        grammar = manager.compile(SamplingParams(structured_outputs=outputs, **asked), marks)
        assert isinstance(grammar, ThinkingGrammar)
        return grammar

    return begin


def test_reasoning_is_free_but_for_its_end_and_the_answer_follows_the_grammar(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    grammar = start({"stop_token_ids": [END]}, regex="[0-9]{2}")
    for token_id in tokens("a{7</t>"):
        assert allowed(manager, grammar) >= set(range(VOCAB_SIZE)) - {EOS, END}
        assert not allowed(manager, grammar) & {EOS, END}
        assert grammar.accept_tokens([token_id])
    digits = {token_id for digit in "0123456789" for token_id in tokens(digit)}
    assert allowed(manager, grammar) == digits
    assert grammar.accept_tokens(tokens("42"))
    assert allowed(manager, grammar) == {EOS, END}
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([EOS])
    assert grammar.is_terminated()


def test_a_model_chooses_between_reasoning_and_the_answer(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    grammar = start(openings=["<t>"], json_object=True)
    assert allowed(manager, grammar) == {*tokens("<"), *tokens("{")}
    assert grammar.accept_tokens(tokens("{"))
    assert tokens('"')[0] in allowed(manager, grammar)
    assert tokens("<")[0] not in allowed(manager, grammar)

    grammar = start(openings=["<t>"], json_object=True)
    assert grammar.accept_tokens(tokens("<"))
    assert allowed(manager, grammar) == {*tokens("t")}
    assert grammar.accept_tokens(tokens("t>{ ] </t>"))
    assert allowed(manager, grammar) == {*tokens("{")}


@pytest.mark.parametrize(
    ("text", "follows"), [("<", "tx"), ("<x", ">"), ("<t>", ""), ("<t><x></t>", "<"), ("<t></t><t", "")]
)
def test_an_answer_may_begin_like_an_opening(
    manager: StructuredOutputManager, start: Start, tokens: Encode, text: str, follows: str
) -> None:
    grammar = start(openings=["<t>"], regex="<x>")
    accepted = all(
        token_id in allowed(manager, grammar) and grammar.accept_tokens([token_id])
        for token_id in tokens(text)
    )
    assert accepted == (text != "<t></t><t")
    if accepted and text != "<t>":
        assert allowed(manager, grammar) == {token_id for letter in follows for token_id in tokens(letter)}


def test_white_space_may_stand_between_reasoning_and_answer(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    for answer in ("yes", "\n\nyes"):
        grammar = start(gaps=["\n\n"], choice=["yes", "no"])
        assert grammar.accept_tokens(tokens("</t>"))
        for token_id in tokens(answer):
            assert token_id in allowed(manager, grammar)
            assert grammar.accept_tokens([token_id])
        assert allowed(manager, grammar) == {EOS}


def test_a_token_that_ends_reasoning_and_begins_the_answer_counts_for_both(
    start: Start, manager: StructuredOutputManager, tokens: Encode
) -> None:
    grammar = start(choice=["abc", "b"])
    # The vocabulary has no token with a bracket and a letter: the rest is handed over as such a token would.
    tracker = grammar._tracker
    assert grammar.accept_tokens(tokens("</t"))
    decode = tracker._decode
    assert decode is not None
    tracker._decode = lambda token_ids: decode(token_ids) + "ab"
    assert grammar.accept_tokens(tokens(">"))
    assert allowed(manager, grammar) == set(tokens("c"))


def test_a_budget_closes_reasoning_and_the_grammar_follows(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    for budget in (0, 3):
        grammar = start({"thinking_budget": budget}, choice=["yes"])
        assert grammar.accept_tokens(tokens("xxx")[:budget])
        for token_id in tokens("\n</t>"):
            assert allowed(manager, grammar) == {token_id}
            assert grammar.accept_tokens([token_id])
        assert tokens("y")[0] in allowed(manager, grammar)


def test_a_budget_alone_needs_no_library_and_leaves_the_answer_free(
    manager: StructuredOutputManager, start: Start, tokens: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar = start({"thinking_budget": 2})
    assert grammar.is_free(1)
    assert not grammar.is_free(2)
    assert grammar.accept_tokens(tokens("xx"))
    assert allowed(manager, grammar) == set(tokens("\n"))
    assert not grammar.is_over
    assert grammar.accept_tokens(tokens("\n</t>"))
    assert grammar.is_over


def test_a_token_that_interrupts_the_closing_is_refused(start: Start, tokens: Encode) -> None:
    grammar = start({"thinking_budget": 0})
    assert not grammar.accept_tokens(tokens("x"))
    assert "had to be closed" in grammar.error


def test_min_tokens_count_the_reasoning(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    for min_tokens in (6, 7):
        grammar = start({"min_tokens": min_tokens}, regex="a*")
        assert grammar.accept_tokens(tokens("x</t>a"))
        assert (EOS in allowed(manager, grammar)) == (min_tokens == 6)


def test_masks_of_thinking_and_other_requests_are_built_together(
    manager: StructuredOutputManager, start: Start, tokens: Encode
) -> None:
    def plain() -> Grammar:
        outputs = StructuredOutputsParams(choice=["b"])
        grammar = manager.compile(SamplingParams(structured_outputs=outputs, eos_token_id=EOS))
        assert grammar is not None
        return grammar

    def thinking() -> Grammar:
        grammar = start({"thinking_budget": 1}, choice=["a"])
        assert grammar.accept_tokens(tokens("x"))
        return grammar

    masks = manager.fill_bitmasks([(thinking, plain)[number % 2]() for number in range(40)])
    for number, row in enumerate(masks):
        expected = tokens("\n") if number % 2 == 0 else tokens("b")
        assert [
            word * 32 + bit for word in range(len(row)) for bit in range(32) if row[word] >> bit & 1
        ] == expected


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        (None, "thinking_budget needs to know"),
        (ReasoningTokens(endings=[[3]]), "no tokens close"),
        (ReasoningTokens(closing=[3]), "nothing ends it"),
        (ReasoningTokens(endings=[[]], closing=[3]), "a mark is empty"),
        (ReasoningTokens(endings=[[3]], openings=[[]], closing=[3]), "a mark is empty"),
        (ReasoningTokens(ending_texts=[""], closing=[3]), "a mark is empty"),
        (ReasoningTokens(ending_texts=["x" * 257], closing=[3]), "length of 257, at most 256"),
        (ReasoningTokens(endings=[[3]], closing=[3] * 257), "length of 257, at most 256"),
    ],
)
def test_marks_that_make_no_sense_are_refused(
    manager: StructuredOutputManager, marks: ReasoningTokens | None, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        manager.compile(SamplingParams(thinking_budget=4), marks)


def test_marks_without_a_grammar_or_a_budget_cost_nothing(manager: StructuredOutputManager) -> None:
    assert manager.compile(SamplingParams(), ReasoningTokens(endings=[[3]])) is None


@settings(max_examples=amount(12, thorough=800), deadline=None)
@given(wishes=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=40, max_size=40), data=st.data())
def test_whatever_a_model_draws_it_ends_with_an_answer_in_the_grammar(
    model: ModelConfig, tokenizer: Tokenizer, wishes: list[int], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structured, "GrammarChecker", InThisProcess)
        manager = StructuredOutputManager(model, VOCAB_SIZE, max_num_seqs=1)
    budget = data.draw(st.integers(0, 8))
    openings = data.draw(st.sampled_from([[], ["<t>"], ["<t>", "\n<t>"]]))
    marks = ReasoningTokens(
        openings=[encode(tokenizer, text) for text in openings],
        ending_texts=["</t>"],
        closing=encode(tokenizer, "\n</t>\n"),
    )
    outputs = StructuredOutputsParams(choice=["<abc", "bca", "\n<t"])
    params = SamplingParams(structured_outputs=outputs, thinking_budget=budget, eos_token_id=EOS)
    grammar = manager.compile(params, marks)
    assert grammar is not None
    written: list[int] = []
    for wish in [*wishes, *range(60)]:
        may = sorted(allowed(manager, grammar) - set(range(EOS + 2, VOCAB_SIZE)))
        assert may
        written.append(wish if wish in may else may[wish % len(may)])
        assert grammar.accept_tokens(written[-1:]), grammar.error
        if grammar.is_terminated():
            break
    text = tokenizer.decode(written)
    assert text.partition("</t>")[2].strip() in ("<abc", "bca", "<t") or text in ("<abc", "bca", "\n<t")
