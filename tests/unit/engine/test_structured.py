"""Grammars: masks against brute force, where an output may end, the cache, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nbengine.config import ModelConfig
from nbengine.engine import grammar_check, structured
from nbengine.engine.structured import GuidanceGrammar, StructuredOutputManager
from nbengine.errors import RequestError
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMAS = json.loads((Path(__file__).parents[2] / "data" / "json_schemas.json").read_text(encoding="utf-8"))
MERGED = ["ab", "bc", "aa", "abc", "cab", '":', "true"]
"""Tokens of several bytes beside the 256 of one byte."""
EOS, END = 256 + len(MERGED), 257 + len(MERGED)
VOCAB_SIZE = 300
"""More than the tokenizer has."""

Make = Callable[..., GuidanceGrammar]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(MERGED)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", "<end>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}))
    return ModelConfig("tiny", directory=str(directory))


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> Tokenizer:
    return Tokenizer.from_file(str(Path(model.directory) / "tokenizer.json"))


class InThisProcess(grammar_check.GrammarChecker):
    """Checks without a process of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def _exchange(self, question: bytes) -> bytes:
        self.texts.append(msgspec.json.decode(question, type=grammar_check.GrammarSource).text)
        return msgspec.json.encode(grammar_check._checked(question))


@pytest.fixture
def manager(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    monkeypatch.setattr(structured, "GrammarChecker", InThisProcess)
    return StructuredOutputManager(model, VOCAB_SIZE, max_num_seqs=8)


@pytest.fixture
def make(manager: StructuredOutputManager) -> Make:
    def compile_(params: dict[str, Any] | None = None, **constraint: Any) -> GuidanceGrammar:
        asked = {"eos_token_id": EOS, "max_tokens": 100} | (params or {})
        outputs = StructuredOutputsParams(**constraint)
        grammar = manager.compile(SamplingParams(structured_outputs=outputs, **asked))
        assert grammar is not None
        return grammar

    return compile_


def allowed(manager: StructuredOutputManager, grammar: GuidanceGrammar) -> set[int]:
    (row,) = manager.fill_bitmasks([grammar])
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follows(manager: StructuredOutputManager, grammar: GuidanceGrammar, token_ids: list[int]) -> bool:
    """Whether a text is accepted, and may end there."""
    return grammar.accept_tokens(token_ids) and EOS in allowed(manager, grammar)


# Masks against brute force.

Regex = tuple[str, int]
"""A pattern, and how many characters the shortest completion of any of its beginnings may need."""


def _joined(parts: list[Regex]) -> Regex:
    return "".join(f"(?:{pattern})" for pattern, _ in parts), sum(needed for _, needed in parts)


def _either(parts: list[Regex]) -> Regex:
    return "|".join(pattern for pattern, _ in parts), max(needed for _, needed in parts)


def _repeated(inner: Regex, times: str) -> Regex:
    return f"(?:{inner[0]}){times}", inner[1] * (2 if times in ("{2}", "{1,2}") else 1)


regexes = st.recursive(
    st.sampled_from([(atom, 1) for atom in ("a", "b", "c", "[ab]", "[^a]", "[b-c]")]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(_joined),
        st.lists(inner, min_size=2, max_size=3).map(_either),
        st.builds(_repeated, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(regex=regexes, walk=st.lists(st.integers(0, 1_000), max_size=2))
def test_a_token_is_allowed_exactly_if_some_text_completes_it(
    model: ModelConfig, tokenizer: Tokenizer, regex: Regex, walk: list[int]
) -> None:
    pattern, needed = regex
    assume(needed <= 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structured, "GrammarChecker", InThisProcess)
        manager = StructuredOutputManager(model, VOCAB_SIZE, max_num_seqs=1)
    outputs = StructuredOutputsParams(regex=pattern)
    grammar = manager.compile(SamplingParams(structured_outputs=outputs, eos_token_id=EOS))
    assert grammar is not None
    ends = ["".join(letters) for n in range(needed + 1) for letters in itertools.product("abc", repeat=n)]
    tokens = {i: text for i in range(EOS) if set(text := tokenizer.decode([i])) <= set("abc")}
    written = ""
    for choice in [*walk, None]:
        expected = {
            i
            for i, text in tokens.items()
            if any(re.fullmatch(pattern, written + text + end) for end in ends)
        }
        if re.fullmatch(pattern, written):
            expected.add(EOS)
        found = allowed(manager, grammar) & (tokens.keys() | {EOS})
        if len({tokens[i][0] if i in tokens else "" for i in expected}) == 1:
            # What can only begin with one character is written in the tokenizer's own tokens.
            assert found
            assert found <= expected
        else:
            assert found == expected
        extensions = sorted(expected - {EOS})
        if choice is None or not extensions:
            break
        token_id = extensions[choice % len(extensions)]
        assert grammar.accept_tokens([token_id])
        written += tokens[token_id]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_way_to_write_an_instance_is_allowed(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer, name: str
) -> None:
    schema, example = SCHEMAS[name]["schema"], SCHEMAS[name]["example"]
    layouts: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 4}]
    for layout in layouts:
        text = json.dumps(example, ensure_ascii=False, **layout)
        for same in (schema, json.dumps(schema)):
            assert follows(manager, make(json=same), encode(tokenizer, text)), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flat", '{"name": "a"}'),
        ("flat", '{"name": "a", "age": 121}'),
        ("flat", '{"name": "a", "age": 1, "x": 0}'),
        ("flat", '{"name": "a b c d e f g h i j k l", "age": 1}'),
        ("enum_of_strings", '{"colour": "pink", "size": "S"}'),
        ("array_bounds", "[1, 2]"),
        ("array_bounds", "[1, 2, 3, 4, 5, 6, 7]"),
        ("patterns", '{"phone": "5555-123", "hex": "#000000", "slug": "aa"}'),
        ("formats", '{"day": "2024-13-01", "at": "2024-01-01T00:00:00Z", "time": "00:00:00Z"}'),
        ("integer_bounds", '{"a": 16, "b": -1, "c": 0}'),
        ("one_of_tagged", '{"type": "circle", "width": 1}'),
        ("scalar_boolean", "True"),
        ("scalar_integer", "1.5"),
    ],
)
def test_what_a_schema_forbids_is_not_allowed(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer, name: str, text: str
) -> None:
    assert not follows(manager, make(json=SCHEMAS[name]["schema"]), encode(tokenizer, text))


LOOSE, INDENTED, TIGHT = '{"a": 1}', '{\n    "a": 1\n}', '{"a":1}'


@pytest.mark.parametrize(
    ("options", "fine", "not_fine"),
    [
        (
            {},
            [LOOSE, INDENTED, TIGHT],
            ['{  "a":1}', "{\n\n}", '{"a":1}\n', ' {"a":1}', "{\n" + " " * 33 + "}"],
        ),
        ({"disable_any_whitespace": True}, [TIGHT], [LOOSE, INDENTED]),
        ({"whitespace_pattern": "_?"}, [TIGHT, '{_"a":_1_}'], [LOOSE, INDENTED]),
    ],
)
def test_white_space_is_bounded(
    manager: StructuredOutputManager,
    make: Make,
    tokenizer: Tokenizer,
    options: dict[str, Any],
    fine: list[str],
    not_fine: list[str],
) -> None:
    for text in fine + not_fine:
        grammar = make(json_object=True, **options)
        assert follows(manager, grammar, encode(tokenizer, text)) == (text in fine), text


def test_choices_are_taken_literally(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer
) -> None:
    choices = [
        "yes",
        "yes, but",
        'a"b',
        "back\\slash",
        "new\nline",
        "\t",
        "ünï🙂",
        "/x/",
        "<y>",
        "$(^.*",
        "\x00\x7f",
    ]
    for choice in choices:
        assert follows(manager, make(choice=choices), encode(tokenizer, choice))
    for text in ("no", "ye", "yes ", "$", "Xx"):
        assert not follows(manager, make(choice=choices), encode(tokenizer, text))


LARK = 'start: "(" start ")" | /[0-9]+/\n'
GBNF = 'root ::= "(" root ")" | [0-9]+\n'


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_grammars_in_lark_and_in_gbnf(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer, grammar: str
) -> None:
    for text, fine in (("((12))", True), ("7", True), ("((12)", False), ("()", False), ("(1))", False)):
        assert follows(manager, make(grammar=grammar), encode(tokenizer, text)) is fine


def test_many_masks_at_once_are_those_of_each_alone(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer
) -> None:
    def grammars() -> list[GuidanceGrammar]:
        made = []
        for position, case in enumerate(SCHEMAS.values()):
            grammar = make({"stop_token_ids": [END]} if position % 2 else None, json=case["schema"])
            grammar.accept_tokens(
                encode(tokenizer, json.dumps(case["example"], ensure_ascii=False))[:position]
            )
            made.append(grammar)
        return made

    assert len(SCHEMAS) >= max(structured.PARALLEL_FROM, 30)
    alone = [manager.fill_bitmasks([grammar]).copy() for grammar in grammars()]
    assert np.array_equal(manager.fill_bitmasks(grammars()), np.concatenate(alone))


def test_a_step_allocates_no_masks(manager: StructuredOutputManager, make: Make) -> None:
    grammars = [make(regex="[ab]*") for _ in range(8)]
    first = manager.fill_bitmasks(grammars)
    assert first.shape == (8, -(-VOCAB_SIZE // 32))
    assert first.dtype == np.int32
    for count in (8, 1, 5):
        assert np.shares_memory(manager.fill_bitmasks(grammars[:count])[0], first[0])


def test_tokens_that_no_text_has_are_never_allowed(manager: StructuredOutputManager, make: Make) -> None:
    free = allowed(manager, make(regex="(?s:.*)"))
    assert max(free) == EOS
    assert EOS in free
    assert END not in free


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
def test_where_the_request_may_end(
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


# Refusals.

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"json": {"type": "strin"}}, r"structured_outputs\.json .*Invalid type: strin"),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
    "unknown reference": ({"json": {"$ref": "#/nope"}}, "'/nope' does not exist"),
    "remote reference": ({"json": {"$ref": "http://localhost/x"}}, "does not fetch"),
    "unknown format": ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
    "not implemented": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "bad pattern": ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    "look-ahead": ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    "empty enum": ({"json": {"enum": []}}, "[Uu]nsatisfiable"),
    "properties is a list": ({"json": {"type": "object", "properties": []}}, "must be an object"),
    "bad regex": ({"regex": "a{5,2}"}, r"structured_outputs\.regex .*repetition"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
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
    assert manager._tokenizer is None
