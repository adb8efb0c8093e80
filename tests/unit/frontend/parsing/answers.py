"""Answers as the families write them, with what is to be found in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from nbengine.frontend.parsing.answer_parser import AnswerParser, ParsedAnswer
from nbengine.frontend.parsing.deltas import AnswerDelta, ToolCallStarted
from nbengine.frontend.parsing.formats import AnswerFormat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say what the weather is like.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "days": {"type": "integer"},
                    "fine": {"type": "boolean"},
                    "near": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Example:
    """An answer with its parts; `calls` are names and arguments."""

    name: str
    format: AnswerFormat
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    opened: bool = False


def parser_of(example: Example) -> AnswerParser:
    return AnswerParser(example.format, tools=TOOLS, prompt_opens_reasoning=example.opened)


def deltas_of(parser: AnswerParser, pieces: list[str]) -> list[AnswerDelta]:
    """Feed a parser and return all that it has found."""
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def parts_of(deltas: list[AnswerDelta]) -> list[tuple[str, ...]]:
    """Join neighbours of one kind: what is left does not depend on the pieces of the text, nor on random ids."""
    parts: list[tuple[str, ...]] = []
    for delta in deltas:
        kind = type(delta).__name__
        if isinstance(delta, ToolCallStarted):
            part = (kind, str(delta.index), delta.name)
        else:
            index, text = getattr(delta, "index", ""), getattr(delta, "text", "")
            part = (kind, f"{index} {getattr(delta, 'reason', '')}", text)
        if parts and part[2] and parts[-1][:2] == part[:2] and kind.endswith("Delta"):
            part = (*part[:2], parts.pop()[2] + part[2])
        parts.append(part)
    return parts


def found_in(example: Example) -> tuple[str, str, list[tuple[str, Any]], list[str]]:
    """Parse an answer in one piece and return its content, its reasoning, its calls and what is malformed."""
    answer = ParsedAnswer(deltas_of(parser_of(example), [example.text]))
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return answer.content, answer.reasoning, calls, [bad.text for bad in answer.malformed]


def wanted_of(example: Example) -> tuple[str, str, list[tuple[str, Any]], list[str]]:
    return example.content, example.reasoning, example.calls, example.malformed


PARIS = ("weather", {"place": "Paris", "days": 3})
ODD = (
    "weather",
    {"place": 'a "b" \\ {c} </tool_call>\n[d] é 😀', "options": {"x": [1, {"y": None}], "z": {}}},
)
NOW: tuple[str, dict[str, Any]] = ("now", {})


def _json(call: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _args(call: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(call[1], ensure_ascii=False)


HERMES = AnswerFormat("qwen3", "hermes")
CODER = AnswerFormat(None, "qwen3_coder")
LLAMA = AnswerFormat(None, "llama3_json")
MISTRAL = AnswerFormat("mistral", "mistral")
PYTHONIC = AnswerFormat(None, "pythonic")
DEEPSEEK = AnswerFormat("deepseek_r1", "deepseek")
GLM = AnswerFormat("glm", "glm")
HARMONY = AnswerFormat("gpt_oss", "gpt_oss")
GEMMA = AnswerFormat("gemma", "gemma")
GRANITE = AnswerFormat("granite", "granite")

_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_END, _ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

EXAMPLES = [
    Example("plain", HERMES, "  No calls, <b>only</b> text. \n", content="  No calls, <b>only</b> text. \n"),
    Example(
        "hermes",
        HERMES,
        f"<think>\nLet me\n\nsee.\n</think>\n\nI look.\n<tool_call>\n{_json(PARIS)}\n</tool_call>\n"
        f"<tool_call>{_json(ODD)}</tool_call>",
        content="I look.",
        reasoning="Let me\n\nsee.",
        calls=[PARIS, ODD],
    ),
    Example("hermes opened", HERMES, "so\n</think>\nYes", content="Yes", reasoning="so", opened=True),
    Example(
        "hermes other orders",
        HERMES,
        '<tool_call>{"arguments": {"place": "Rome"}, "name": "weather"}</tool_call>'
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{}"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>\nDone.',
        content="Done.",
        calls=[("weather", {"place": "Rome"}), NOW, NOW],
    ),
    Example(
        "hermes malformed",
        HERMES,
        f"One <tool_call>{{'name': 1}}\n</tool_call> two <tool_call>{_json(PARIS)}</tool_call> three",
        content="One <tool_call>{'name': 1}\n</tool_call> two  three",
        calls=[PARIS],
        malformed=["<tool_call>{'name': 1}\n</tool_call>"],
    ),
    Example(
        "hermes unterminated string",
        HERMES,
        f'<tool_call>{{"name": "now", "arguments": {{"a": "x}}}}</tool_call> then '
        f"<tool_call>{_json(PARIS)}</tool_call>",
        content='<tool_call>{"name": "now", "arguments": {"a": "x}}</tool_call> then',
        calls=[PARIS],
        malformed=['<tool_call>{"name": "now", "arguments": {"a": "x}}</tool_call>'],
    ),
    Example(
        "hermes cut off",
        HERMES,
        'I <tool_call>{"name": "weather", "arguments": {"place": "Pa',
        content='I <tool_call>{"name": "weather", "arguments": {"place": "Pa',
        malformed=['<tool_call>{"name": "weather", "arguments": {"place": "Pa'],
    ),
    Example("hermes no closing tag", HERMES, f"<tool_call>\n{_json(PARIS)}", calls=[PARIS]),
    Example(
        "qwen3_coder",
        CODER,
        'I look.\n<tool_call>\n<function=weather>\n<parameter=place>\nline 1\n  "line" 2\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=fine>\nTrue\n</parameter>\n"
        '<parameter=near>\n[\'a\', "b"]\n</parameter>\n<parameter=options>\n{"x": [1, 2]}\n</parameter>\n'
        "<parameter=odd>\n1.5\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>",
        content="I look.",
        calls=[
            (
                "weather",
                {
                    "place": 'line 1\n  "line" 2',
                    "days": 3,
                    "fine": True,
                    "near": ["a", "b"],
                    "options": {"x": [1, 2]},
                    "odd": 1.5,
                },
            ),
            NOW,
        ],
    ),
    Example(
        "qwen3_coder without outer tags",
        CODER,
        "<function=weather><parameter=place>\n</parameter></function> and",
        content="and",
        calls=[("weather", {"place": ""})],
    ),
    Example(
        "qwen3_coder malformed",
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</tool_call> x",
        content="<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</tool_call> x",
        malformed=["<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</tool_call>"],
    ),
    Example("llama3", LLAMA, f"{_json(PARIS, 'parameters')}; {_json(ODD, 'parameters')}", calls=[PARIS, ODD]),
    Example("llama3 tag", LLAMA, f"<|python_tag|>{_json(NOW, 'parameters')}", calls=[NOW]),
    Example("llama3 json answer", LLAMA, '{"answer": {"name": 5}} is', content='{"answer": {"name": 5}} is'),
    Example(
        "llama3 of a person",
        LLAMA,
        '{"name": "Bob", "parameters": {"age": 5}}',
        content='{"name": "Bob", "parameters": {"age": 5}}',
    ),
    Example("llama3 behind text", LLAMA, f"Say {_json(NOW)}", content=f"Say {_json(NOW)}"),
    Example(
        "llama3 broken",
        LLAMA,
        "<|python_tag|>print(1)",
        content="<|python_tag|>print(1)",
        malformed=["<|python_tag|>"],
    ),
    Example("mistral list", MISTRAL, f"[TOOL_CALLS] [{_json(PARIS)}, {_json(ODD)}]", calls=[PARIS, ODD]),
    Example(
        "mistral names",
        MISTRAL,
        f"[THINK]hm[/THINK]Ok [TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{_args(ODD)}[TOOL_CALLS]now{{}}",
        content="Ok",
        reasoning="hm",
        calls=[ODD, NOW],
    ),
    Example(
        "mistral malformed",
        MISTRAL,
        f"[TOOL_CALLS][{_json(PARIS)} {_json(NOW)}]",
        content=f" {{{_json(NOW)[1:]}]",
        calls=[PARIS],
        malformed=[" {"],
    ),
    Example(
        "pythonic",
        PYTHONIC,
        "[weather(place='a \"b\", (c) \\n', days=3, near=['x', \"y\"], fine=True, options={'k': None}), now()]",
        calls=[
            (
                "weather",
                {
                    "place": 'a "b", (c) \n',
                    "days": 3,
                    "near": ["x", "y"],
                    "fine": True,
                    "options": {"k": None},
                },
            ),
            NOW,
        ],
    ),
    Example("pythonic marked", PYTHONIC, "<|python_start|>[now()]<|python_end|>", calls=[NOW]),
    Example("pythonic list", PYTHONIC, "[1, 2] are numbers", content="[1, 2] are numbers"),
    Example("pythonic other function", PYTHONIC, "[f(x) for x in y]", content="[f(x) for x in y]"),
    Example(
        "pythonic malformed",
        PYTHONIC,
        "[now(), weather(f(x))] ok",
        content=", weather(f(x))] ok",
        calls=[NOW],
        malformed=[", weather(f(x))] ok"],
    ),
    Example(
        "deepseek v3",
        DEEPSEEK,
        f"Ok{_CALLS}{_CALL}function{_SEP}weather\n```json\n{_args(PARIS)}\n```{_END}\n"
        f"{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END}{_ENDS}",
        content="Ok",
        calls=[PARIS, NOW],
    ),
    Example(
        "deepseek v3.1",
        DEEPSEEK,
        f"thought</think>{_CALLS}{_CALL}weather{_SEP}{_args(ODD)}{_END}{_CALL}now{_SEP}{{}}{_END}{_ENDS}",
        reasoning="thought",
        calls=[ODD, NOW],
        opened=True,
    ),
    Example(
        "glm",
        GLM,
        '<think>hm</think>\nI look.\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Bei "jing"</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>near</arg_key>\n<arg_value>["a"]</arg_value>\n'
        "</tool_call>\n<tool_call>now</tool_call>",
        content="I look.",
        reasoning="hm",
        calls=[("weather", {"place": 'Bei "jing"', "days": 3, "near": ["a"]}), NOW],
    ),
    Example(
        "glm malformed",
        GLM,
        "<tool_call>weather\n<arg_key>place</arg_key>oops</tool_call>",
        content="<tool_call>weather\n<arg_key>place</arg_key>oops</tool_call>",
        malformed=["<tool_call>weather\n<arg_key>place</arg_key>oops</tool_call>"],
    ),
    Example(
        "harmony",
        HARMONY,
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{_args(ODD)}<|call|>",
        content="I look.",
        reasoning="Need it.",
        calls=[ODD],
    ),
    Example(
        "harmony recipient first",
        HARMONY,
        f" to=functions.weather<|channel|>commentary json<|message|>{_args(PARIS)}",
        calls=[PARIS],
    ),
    Example(
        "harmony final",
        HARMONY,
        "one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.\n<|return|>",
        content="Yes.\n",
        reasoning="one\ntwo",
        opened=True,
    ),
    Example(
        "harmony malformed",
        HARMONY,
        "<|channel|>commentary to=functions.now<|message|>{oops<|call|>",
        content="<|channel|>commentary to=functions.now<|message|>{oops<|call|>",
        malformed=["<|channel|>commentary to=functions.now<|message|>{oops<|call|>"],
    ),
    Example("harmony plain", HARMONY, " total <nonsense>", content=" total <nonsense>"),
    Example(
        "gemma",
        GEMMA,
        '<|channel>thought\nhm\n<channel|>Ok<|tool_call>call:weather{place:<|"|>a "b", {c}\n<|"|>,days:3,'
        'near:[<|"|>x<|"|>,<|"|>y<|"|>],options:{k:null,l:{m:-1.5}},fine:true}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        content="Ok",
        reasoning="hm",
        calls=[
            (
                "weather",
                {
                    "place": 'a "b", {c}\n',
                    "days": 3,
                    "near": ["x", "y"],
                    "options": {"k": None, "l": {"m": -1.5}},
                    "fine": True,
                },
            ),
            NOW,
        ],
    ),
    Example(
        "functiongemma",
        GEMMA,
        "<start_function_call>call:weather{place:<escape>Paris<escape>, days:3}<end_function_call>",
        calls=[PARIS],
    ),
    Example(
        "gemma json",
        GEMMA,
        f"<|tool_call>call:weather{_args(ODD)}<tool_call|>",
        calls=[ODD],
    ),
    Example(
        "gemma malformed",
        GEMMA,
        "<|tool_call>call:weather{place}<tool_call|> x",
        content="<|tool_call>call:weather{place}<tool_call|> x",
        malformed=["<|tool_call>call:weather{place}<tool_call|>"],
    ),
    Example(
        "granite",
        GRANITE,
        "<think>hm</think><response>Yes</response>\n",
        content="Yes",
        reasoning="hm",
    ),
    Example(
        "granite sentences",
        GRANITE,
        "Here is my thought process: a b\n\nHere is my response:\n\nThe answer.",
        content="The answer.",
        reasoning="a b",
    ),
    Example("granite calls", GRANITE, f"<|tool_call|>[{_json(PARIS)}, {_json(NOW)}]", calls=[PARIS, NOW]),
    Example("granite 4 calls", GRANITE, f"<tool_call>\n{_json(PARIS)}\n</tool_call>", calls=[PARIS]),
]
