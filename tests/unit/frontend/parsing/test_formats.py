"""The format of a model's answers is chosen by the markers in its chat template."""

from __future__ import annotations

import pytest

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.parsing.formats import REASONING_PARSERS, TOOL_PARSERS, AnswerFormat, answer_format

TEMPLATES = {
    "qwen3": (
        (
            "<|im_start|>{{ role }}{% if tools %}<tools></tools> return <tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}<think>\n\n</think>'
        ),
        AnswerFormat("qwen3", "hermes", True),
    ),
    "qwen2.5": ("<|im_start|>{{ role }}<tool_call>{}</tool_call>", AnswerFormat(None, "hermes", True)),
    "qwen3-coder": (
        "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        AnswerFormat(None, "qwen3_coder", False),
    ),
    "llama3.1": (
        (
            "<|start_header_id|>system<|end_header_id|>Environment: ipython <|python_tag|> "
            '{"name": function name, "parameters": dictionary}<|eot_id|>'
        ),
        AnswerFormat(None, "llama3_json", True),
    ),
    "llama4": ("<|header_start|>[func_name1(params_name1=1)]<|eot|>", AnswerFormat(None, "pythonic", True)),
    "mistral": ("[AVAILABLE_TOOLS][/AVAILABLE_TOOLS][INST][TOOL_CALLS]", AnswerFormat(None, "mistral", True)),
    "magistral": ("[SYSTEM_PROMPT][THINK][/THINK][TOOL_CALLS]", AnswerFormat("mistral", "mistral", True)),
    "deepseek": (
        "<｜Assistant｜><think>\n</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        AnswerFormat("deepseek_r1", "deepseek", True),
    ),
    "glm": (
        (
            "[gMASK]<sop><|observation|><tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
            "<think></think>"
        ),
        AnswerFormat("glm", "glm", False),
    ),
    "gpt-oss": (
        "<|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
        AnswerFormat("gpt_oss", "gpt_oss", True),
    ),
    "gemma4": (
        '<|turn>model<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|><|channel>thought\n<channel|>',
        AnswerFormat("gemma", "gemma", True),
    ),
    "functiongemma": ("<start_of_turn>model<start_function_call>call:", AnswerFormat(None, "gemma", True)),
    "granite3.2": (
        "<|start_of_role|>Write 'Here is my thought process:' <|tool_call|>",
        AnswerFormat("granite", "granite", True),
    ),
    "granite3.3": ("<think></think><response></response>", AnswerFormat("granite", None, False)),
    "gemma3": ("<start_of_turn>{{ role }}\n{{ content }}<end_of_turn>", AnswerFormat()),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    template, wanted = TEMPLATES[name]
    assert answer_format(template) == wanted


def test_a_name_goes_before_the_template() -> None:
    template = TEMPLATES["qwen3"][0]
    assert answer_format(template, "none", "none") == AnswerFormat()
    assert not answer_format(template, "none", "none")
    assert answer_format(template, tools="mistral") == AnswerFormat("qwen3", "mistral", True)
    assert answer_format("", "granite", "glm") == AnswerFormat("granite", "glm", False)


@pytest.mark.parametrize(("argument", "parsers"), [("reasoning", REASONING_PARSERS), ("tools", TOOL_PARSERS)])
def test_a_wrong_name_is_refused_with_all_names(argument: str, parsers: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="hermse") as caught:
        answer_format("", **{argument: "hermse"})
    assert all(name in str(caught.value) for name in ("auto", "none", *parsers))


def test_special_tokens_are_kept_only_where_a_marker_is_one() -> None:
    template = TEMPLATES["qwen2.5"][0]
    assert not answer_format(template, special_tokens=frozenset({"<|im_end|>"})).keeps_special_tokens
    assert answer_format(template, special_tokens=frozenset({"<tool_call>"})).keeps_special_tokens


def test_a_request_without_tools_has_the_format_of_reasoning_alone() -> None:
    assert answer_format(TEMPLATES["magistral"][0]).without_tools() == AnswerFormat("mistral", None, True)
    assert answer_format(TEMPLATES["mistral"][0]).without_tools() == AnswerFormat()


@pytest.mark.parametrize(
    ("name", "prompt", "opened"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "say <think> twice<assistant>", False),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("gpt_oss", "<|start|>assistant", False),
        ("gemma", "<|turn>model\n<|channel>thought\n", True),
        ("mistral", "[/INST][THINK]", True),
    ],
)
def test_the_end_of_a_prompt_may_open_the_reasoning(name: str, prompt: str, opened: bool) -> None:
    assert AnswerFormat(name).is_opened_by(prompt) is opened
