"""The tokens that a grammar allows are those that brute force finds."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nbengine.config import ModelConfig
from nbengine.engine.core import structured
from nbengine.engine.core.structured import GuidanceGrammar, StructuredOutputManager
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.thorough import amount
from tests.unit.engine.structured.grammar_rig import (
    END,
    EOS,
    SCHEMAS,
    VOCAB_SIZE,
    InThisProcess,
    Make,
    allowed,
    encode,
    follows,
)

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


@settings(max_examples=amount(15, thorough=1200), deadline=None)
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
def test_grammars_in_lark_and_in_gbnf_are_followed(
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
