"""Grammars of calls: what they allow is what the parsers read, and arguments follow the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from nbengine.errors import InvalidArgumentError, NotSupportedError
from nbengine.frontend.parsing.answer_parser import AnswerParser, ParsedAnswer
from nbengine.frontend.parsing.formats import TOOL_PARSERS, AnswerFormat
from nbengine.frontend.parsing.reading import added_token_ids_of
from nbengine.frontend.parsing.tool_grammar import tool_grammar
from nbengine.sampling_params import StructuredOutputsParams
from tests.unit.frontend.conftest import byte_level_tokenizer

llguidance = pytest.importorskip("llguidance")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "spot": {"$ref": "#/$defs/Spot"},
                },
                "required": ["place"],
                "$defs": {
                    "Spot": {
                        "type": "object",
                        "properties": {
                            "near": {"type": "array", "items": {"type": "number"}},
                            "in": {"type": "boolean"},
                        },
                        "required": ["near", "in"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FULL = {"place": 'Zü"rich', "days": 3, "unit": "C", "spot": {"near": [1.5, -2], "in": True}}
_SEP = "<｜tool▁sep｜>"


def _json(arguments: dict[str, Any], key: str = "arguments", name: str = "weather") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(own)}" for key, own in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def written(tools: str, arguments: dict[str, Any]) -> str:
    """Write a call of `weather` as a family does."""
    text = json.dumps(arguments, ensure_ascii=False)
    items = {key: own if isinstance(own, str) else json.dumps(own) for key, own in arguments.items()}
    match tools:
        case "hermes":
            return f"<tool_call>\n{_json(arguments)}\n</tool_call>"
        case "qwen3_coder":
            inner = "".join(f"<parameter={key}>\n{own}\n</parameter>\n" for key, own in items.items())
            return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"
        case "llama3_json":
            return _json(arguments, "parameters")
        case "mistral":
            return f"[TOOL_CALLS]weather[ARGS]{text}"
        case "pythonic":
            return "[weather(" + ", ".join(f"{key}={own!r}" for key, own in arguments.items()) + ")]"
        case "deepseek":
            begin, end = (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            )
            return f"{begin}weather{_SEP}{text}{end}"
        case "glm":
            inner = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{own}</arg_value>\n" for key, own in items.items()
            )
            return f"<tool_call>weather\n{inner}</tool_call>"
        case "gpt_oss":
            return f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{text}"
        case "gemma":
            return f"<|tool_call>call:weather{_gemma(arguments)}<tool_call|>"
        case _:
            return f"<|tool_call|>[{_json(arguments)}]"


def allows(grammar: str, text: str) -> bool:
    """Tell whether a text may come, to its end."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(tools: str, choice: Any, **options: Any) -> str:
    found = tool_grammar(AnswerFormat(None, tools), TOOLS, choice, **options)
    assert found is not None
    assert found.grammar is not None
    return found.grammar


def calls_in(tools: str, text: str) -> list[tuple[str, Any]]:
    parser = AnswerParser(AnswerFormat(None, tools), tools=TOOLS)
    answer = ParsedAnswer(parser.feed(text) + parser.finish())
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_a_required_call_has_arguments_that_follow_the_schema(tools: str) -> None:
    grammar = grammar_of(tools, "required", strict=True)
    for arguments in (FULL, {"place": "x"}, {"place": "", "unit": "F"}):
        text = written(tools, arguments)
        assert calls_in(tools, text) == [("weather", arguments)]
        assert allows(grammar, text)
    for wrong in ({}, {"place": "x", "days": 1.5}, {"place": "x", "unit": "K"}, {"place": "x", "other": 1}):
        assert not allows(grammar, written(tools, wrong))
    assert not allows(grammar, "")
    assert not allows(grammar, "Just text.")
    assert not allows(grammar, written(tools, FULL).replace("weather", "wether"))


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_a_tool_that_is_not_strict_takes_any_object(tools: str) -> None:
    grammar = grammar_of(tools, "required")
    text = written(tools, {"place": "x", "other": 1})
    assert allows(grammar, text)
    assert calls_in(tools, text) == [("weather", {"place": "x", "other": 1})]


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_a_named_tool_is_called_once_and_no_other_is(tools: str) -> None:
    grammar = grammar_of(tools, {"type": "function", "function": {"name": "weather"}}, strict=True)
    text = written(tools, FULL)
    assert allows(grammar, text)
    assert not allows(grammar, text + text)
    other = grammar_of(tools, {"type": "function", "function": {"name": "now"}}, strict=True)
    assert not allows(other, text)


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_with_auto_the_text_is_free_until_a_strict_call_begins(tools: str) -> None:
    grammar = grammar_of(tools, "auto", strict=True)
    plain = "<|channel|>final<|message|>Just <b>text</b>." if tools == "gpt_oss" else "Just <b>text</b>."
    assert allows(grammar, plain)
    assert allows(grammar, written(tools, FULL))
    assert not allows(grammar, written(tools, {"place": "x", "days": 1.5}))
    if tools not in ("llama3_json", "pythonic", "gpt_oss"):
        assert allows(grammar, "I look. " + written(tools, FULL))
        assert not allows(grammar, "I look. " + written(tools, {}))


@pytest.mark.parametrize(
    ("tools", "between"),
    [("hermes", "\n"), ("llama3_json", "; "), ("mistral", ""), ("glm", "\n"), ("gemma", "")],
)
def test_several_calls_come_only_if_they_may(tools: str, between: str) -> None:
    text = between.join([written(tools, FULL), written(tools, {"place": "x"})])
    assert len(calls_in(tools, text)) == 2
    assert allows(grammar_of(tools, "required", strict=True), text)
    assert not allows(grammar_of(tools, "required", strict=True, parallel=False), text)


@pytest.mark.parametrize("tools", [name for name in TOOL_PARSERS if name != "gpt_oss"])
def test_with_auto_one_call_is_the_last_where_several_are_not_wanted(tools: str) -> None:
    grammar = grammar_of(tools, "auto", parallel=False)
    call = written(tools, {"place": "x", "other": 1})
    assert allows(grammar, "Just text.")
    assert allows(grammar, call)
    for between in ("\n", "; ", ""):
        assert not allows(grammar, between.join([call, call]))


def test_the_reasoning_of_gpt_oss_may_come_in_front_of_its_call() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + written("gpt_oss", FULL)
    assert allows(grammar_of("gpt_oss", "required", strict=True), text)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("tools", ["hermes", "mistral", "glm", "gemma", "deepseek", "gpt_oss", "qwen3_coder"])
def test_markers_that_are_tokens_of_their_own_may_come(tools: str, choice: str, special: bool) -> None:
    tokenizer = byte_level_tokenizer()
    chosen = AnswerFormat(None, tools)
    markers = [AddedToken(marker, special=special) for marker in sorted(chosen.markers)]
    added = [*markers, AddedToken("\n", special=False)]
    tokenizer.add_tokens(added)
    ids = added_token_ids_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    found = tool_grammar(chosen, TOOLS, choice, strict=True, added_token_ids=ids)
    assert found is not None
    own = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=0)
    matcher = llguidance.LLMatcher(own, llguidance.LLMatcher.grammar_from_lark(found.grammar or ""))
    tokens = tokenizer.encode(written(tools, {"place": "x"})).ids
    assert set(tokens) & {ids[marker.content] for marker in markers}
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("choice", "tools"), [("none", TOOLS), ("auto", TOOLS), ("auto", []), ("none", [])])
def test_without_anything_to_enforce_there_is_no_grammar(choice: str, tools: list[dict[str, Any]]) -> None:
    assert tool_grammar(AnswerFormat(None, "hermes"), tools, choice) is None


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_an_answer_of_a_form_is_calls_or_has_the_form(tools: str, strict: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "people": {"$ref": "#/$defs/Count"}},
        "required": ["name", "people"],
        "additionalProperties": False,
        "$defs": {"Count": {"type": "integer"}},
    }
    grammar = grammar_of(tools, "auto", strict=strict, answer=StructuredOutputsParams(json=schema))
    header = "<|channel|>final<|message|>" if tools == "gpt_oss" else ""
    assert allows(grammar, written(tools, FULL))
    assert allows(grammar, header + '{"name": "Bern", "people": 3}')
    for wrong in ('{"name": "Bern", "people": "3"}', '{"name": "Bern"}', "Just text.", ""):
        assert not allows(grammar, header + wrong)
    assert allows(grammar, written(tools, {"place": "x", "other": 1})) == (not strict)


def test_an_answer_of_a_form_may_be_any_object_or_have_no_white_space() -> None:
    for choice, is_bound in (("auto", True), ("required", False)):
        form = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
        grammar = grammar_of("hermes", choice, answer=form)
        assert allows(grammar, '{"a":[1]}') == is_bound
        assert not allows(grammar, '{"a": [1]}')
    with pytest.raises(InvalidArgumentError, match="regex"):
        grammar_of("hermes", "auto", answer=StructuredOutputsParams(regex="a+"))
    assert tool_grammar(AnswerFormat(), TOOLS, "auto", answer=form) is None


def test_no_grammar_keeps_calls_apart_that_are_never_read() -> None:
    assert tool_grammar(AnswerFormat(), TOOLS, "auto", parallel=False) is None
    assert tool_grammar(AnswerFormat(None, "hermes"), [], "auto", parallel=False) is None
    # A call of this format ends the answer.
    assert tool_grammar(AnswerFormat(None, "gpt_oss"), TOOLS, "auto", parallel=False) is None


def test_one_strict_tool_is_enough_for_a_grammar_with_auto() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    found = tool_grammar(AnswerFormat(None, "hermes"), [strict, TOOLS[1]], "auto")
    assert found is not None
    assert not allows(found.grammar or "", written("hermes", {}))


def test_a_wrong_choice_is_refused() -> None:
    chosen = AnswerFormat(None, "hermes")
    with pytest.raises(InvalidArgumentError, match="required"):
        tool_grammar(chosen, TOOLS, "any")
    with pytest.raises(InvalidArgumentError, match="weather, now"):
        tool_grammar(chosen, TOOLS, {"type": "function", "function": {"name": "wether"}})
    with pytest.raises(InvalidArgumentError, match="function"):
        tool_grammar(chosen, TOOLS, {"name": "weather"})
    with pytest.raises(InvalidArgumentError, match="tools"):
        tool_grammar(chosen, [], "required")
    with pytest.raises(NotSupportedError, match="tool_parser"):
        tool_grammar(AnswerFormat(), TOOLS, "required")
