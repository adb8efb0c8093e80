"""A grammar says where an output may end, and refuses tokens with a reason; compiled ones are kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nbengine.config import ModelConfig
from nbengine.engine.core import structured
from nbengine.engine.core.structured import StructuredOutputManager
from nbengine.errors import RequestError
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.unit.engine.structured.grammar_rig import (
    END,
    EOS,
    SCHEMAS,
    VOCAB_SIZE,
    InThisProcess,
    Make,
    allowed,
    encode,
)

# Where the output may end.


@pytest.mark.parametrize(
    ("params", "open_ends", "closed_ends"),
    [
        ({}, {EOS}, {EOS}),
        ({"stop_token_ids": [END]}, {EOS, END}, {EOS, END}),
        ({"ignore_eos": True}, set(), {EOS}),
        ({"ignore_eos": True, "stop_token_ids": [END]}, {END}, {END}),
        ({"eos_token_id": None, "stop_token_ids": [END]}, {END}, {END}),
        ({"min_tokens": 4}, set(), {EOS}),
        ({"min_tokens": 3}, {EOS}, {EOS}),
        ({"min_tokens": 4, "stop_token_ids": [END]}, set(), {EOS, END}),
        ({"min_tokens": 4, "ignore_eos": True}, set(), {EOS}),
    ],
)
def test_an_end_is_allowed_where_the_constraint_may_end(
    manager: StructuredOutputManager,
    make: Make,
    tokenizer: Tokenizer,
    params: dict[str, Any],
    open_ends: set[int],
    closed_ends: set[int],
) -> None:
    """After three tokens of a text that can go on, and of one that cannot."""
    for regex, ends in (("a+", open_ends), ("a{3}", closed_ends)):
        grammar = make(params, regex=regex)
        assert not allowed(manager, grammar) & {EOS, END}
        for letter in "aaa":
            assert grammar.accept_tokens(encode(tokenizer, letter))
        assert not grammar.is_terminated()
        found = allowed(manager, grammar)
        assert found & {EOS, END} == ends
        assert bool(found - {EOS, END}) is (regex == "a+")
        assert grammar.accept_tokens([EOS])
        assert grammar.is_terminated()


def test_the_end_of_sequence_terminates(manager: StructuredOutputManager, make: Make) -> None:
    grammar = make({"ignore_eos": True}, regex="a|ab")
    token = min(allowed(manager, grammar))
    assert grammar.accept_tokens([token])
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([EOS])
    assert grammar.is_terminated()


def test_a_token_that_is_not_allowed_is_refused_with_a_reason(make: Make, tokenizer: Tokenizer) -> None:
    grammar = make(regex="ab")
    assert grammar.error == ""
    assert not grammar.accept_tokens(encode(tokenizer, "b"))
    assert grammar.error


def test_when_the_library_gives_up_only_an_end_is_allowed_and_refused(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer
) -> None:
    grammar = make(regex="((((a{1,100}){1,100}){1,100}){1,100}){1,100}")
    for _ in range(50):
        if grammar.error:
            break
        assert grammar.accept_tokens(encode(tokenizer, "aaa"))
        found = allowed(manager, grammar)
    assert "too many expressions" in grammar.error
    assert found == {EOS}
    assert not grammar.accept_tokens([EOS])


# The cache.


def checked_texts(manager: StructuredOutputManager) -> list[str]:
    checker = manager._checker
    assert isinstance(checker, InThisProcess)
    return checker.texts


def test_equal_constraints_are_compiled_once_and_followed_apart(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer
) -> None:
    schema = SCHEMAS["flat"]["schema"]
    first, second = make(json=schema), make(json=dict(schema))
    make(json=schema, disable_any_whitespace=True)
    make(regex="a")
    make(choice=["a"])
    make({"temperature": 0.0, "seed": 3}, json=schema)
    assert len(checked_texts(manager)) == 4
    assert first.accept_tokens(encode(tokenizer, '{"name"'))
    assert allowed(manager, first) != allowed(manager, second)
    assert allowed(manager, second) == allowed(manager, make(json=schema))


def test_the_cache_keeps_the_latest_and_is_bounded(
    manager: StructuredOutputManager, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_CACHED_GRAMMARS", 3)
    for regex in ("a", "b", "c", "a", "d"):
        make(regex=regex)
    make(regex="a")
    assert checked_texts(manager) == ["a", "b", "c", "d"]
    make(regex="b")
    assert checked_texts(manager)[4:] == ["b"]
    monkeypatch.setattr(structured, "MAX_CACHED_BYTES", 10)
    make(regex="abcdefgh")
    assert [source.text for source in manager._cache] == ["a", "b", "abcdefgh"]


def test_what_was_refused_is_refused_again_without_another_look(
    manager: StructuredOutputManager, make: Make
) -> None:
    for _ in range(3):
        with pytest.raises(RequestError, match="unclosed group"):
            make(regex="(")
    assert len(checked_texts(manager)) == 1


def test_a_check_that_was_interrupted_is_not_remembered(
    manager: StructuredOutputManager, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(InThisProcess, "_exchange", lambda self, question: b"")
        with pytest.raises(RequestError, match="the process that checks grammars"):
            make(regex="a")
    make(regex="a")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"json": {"type": "strin"}}, r"structured_outputs\.json .*Invalid type: strin"),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
    "unknown reference": ({"json": {"$ref": "#/nope"}}, "'/nope' does not exist"),
    "remote reference": ({"json": {"$ref": "http://localhost/x"}}, "does not fetch"),
    "bad pattern": ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    "contradiction within": (
        {
            "json": {
                "properties": {"a": {"items": {"$ref": "#/$defs/A"}}},
                "$defs": {"A": {"type": "string", "minLength": 5, "maxLength": 2}},
            }
        },
        r"#/\$defs/A: .*greater than maxLength",
    ),
    "empty enum": ({"json": {"enum": []}}, "[Uu]nsatisfiable"),
    "properties is a list": ({"json": {"type": "object", "properties": []}}, "must be an object"),
    "bad regex": ({"regex": "a{5,2}"}, r"structured_outputs\.regex .*repetition"),
    "empty text only": ({"regex": "()"}, "only the empty text"),
    "no start rule": ({"grammar": 'begin: "a"'}, r"structured_outputs\.grammar .*no start rule"),
    "unknown rule": ({"grammar": "start: nothing"}, "unknown name"),
    "bad GBNF": ({"grammar": "root ::= ("}, r"Expected '\)'"),
    "bad whitespace": ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
    "too long": ({"choice": ["x" * 40_000, "y" * 40_000]}, "at most 65,536"),
    "too deep": ({"grammar": "root ::= " + "(" * 5000}, "recursion"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_constraints_are_refused_with_the_librarys_reason(make: Make, kind: str) -> None:
    constraint, reason = BAD[kind]
    with pytest.raises(RequestError, match=f"(?s){reason}"):
        make(**constraint)
    make(regex="ab")


def test_without_the_library_the_message_says_what_to_install(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install nbengine\[structured\]"):
        make(regex="a")


def test_a_tokenizer_that_does_not_fit_the_model_is_an_error_of_the_request(
    model: ModelConfig, tmp_path: Path
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for config, vocab_size, reason in (
        (model, 100, "vocab size too small"),
        (ModelConfig(), 300, "tokenizer.json"),
    ):
        manager = StructuredOutputManager(config, vocab_size, max_num_seqs=1)
        with pytest.raises(RequestError, match=reason):
            manager.compile(params)


def test_requests_without_a_constraint_load_nothing(model: ModelConfig) -> None:
    manager = StructuredOutputManager(model, VOCAB_SIZE, max_num_seqs=1)
    assert manager.compile(SamplingParams()) is None
    assert not manager._tokenizers
