"""Templates of the usual families, with tools and tool calls: against transformers, template by template."""

from __future__ import annotations

import enum
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.text.chat import render_chat
from nbengine.frontend.text.tools import tool_schemas

CHATML = """
{%- if tools %}<|im_start|>system
{{ messages[0].content ~ '\n' if messages[0].role == 'system' }}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{% for message in messages %}
{%- if message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """
{{- '<|begin|>' }}
{%- macro body(content) %}{% if content is string %}{{ content | trim }}{% else %}
{%- for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|start|>ipython<|/start|>' ~ body(message.content) ~ '<|eot|>' }}
{%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start|>assistant<|/start|>' }}
    {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}<|eot|>' }}
{%- else %}{{- '<|start|>' ~ message.role ~ '<|/start|>' ~ body(message.content) }}
    {%- if loop.first and tools %}{% for tool in tools %}{{- '\n' ~ tool | tojson(indent=4) }}{% endfor %}{% endif %}
    {{- '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|/start|>' }}{% endif %}"""
MISTRAL = """
{{- '<s>' }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
    {%- if loop.last and tools is defined and tools %}{{ '[TOOLS]' ~ tools | tojson ~ '[/TOOLS]' }}{% endif %}
    {{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'tool' %}{{- '[RESULT]' + message['content'] + '[/RESULT]' }}
{%- elif message['tool_calls'] %}{{- '[CALLS]' + message['tool_calls'][0]['function'] | tojson + '</s>' }}
{%- elif message['role'] == 'assistant' %}{% generation %}{{- message['content'] + '</s>' }}{% endgeneration %}
{%- else %}{{ raise_exception('roles are user, assistant and tool') }}
{%- endif %}
{%- endfor %}"""
PARTS = """
{%- for message in messages %}{% set content = message['content'] %}
{{- message.role ~ ':' }}
{%- for part in content %}{{ '<' ~ part['type'] ~ '>' ~ part['text'] }}{% endfor %}
{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "Is it raining in Bern?"}]
CALL = {"id": "abc123456", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
ANSWERED = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc123456", "content": "rain"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]
OPEN = [*QUESTION, {"role": "assistant", "content": "Yes, it"}]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [], [WEATHER], [WEATHER, WEATHER]], ids=["none", "no", "one", "two"])
@pytest.mark.parametrize("messages", [QUESTION, ANSWERED], ids=["question", "tool calls"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_with_tools_are_rendered_as_by_transformers(
    tokenizer: PreTrainedTokenizerFast, template: str, tools: Any, messages: Any, add_generation_prompt: bool
) -> None:
    options = {
        "chat_template": TEMPLATES[template],
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
    }
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    prompt = render_chat(tokenizer, messages, **options)
    assert prompt["prompt"] == expected
    assert prompt["prompt_token_ids"] == tokenizer.encode(expected, add_special_tokens=False)
    if tools:
        assert prompt["prompt"].count('"The weather somewhere"') == len(tools)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_last_message_is_continued_as_by_transformers(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    options: dict[str, Any] = {"chat_template": TEMPLATES[template], "continue_final_message": True}
    expected = tokenizer.apply_chat_template(OPEN, tokenize=False, **options)
    prompt = render_chat(tokenizer, OPEN, add_generation_prompt=False, **options)["prompt"]
    assert prompt == expected
    assert prompt.endswith("Yes, it")


@pytest.mark.parametrize("template", TEMPLATES)
def test_arguments_of_tool_calls_may_be_json(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    def rendered(arguments: Any) -> str:
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
        return render_chat(tokenizer, messages, chat_template=TEMPLATES[template])["prompt"]

    assert rendered('{"city": "Bern"}') == rendered({"city": "Bern"})
    assert '{"city": "Bern"}' in rendered('{"city": "Bern"}')


def test_the_default_model_renders_chats_and_tools_as_transformers_does() -> None:
    from nbengine.config import ModelConfig
    from nbengine.frontend.text.tokenizer import load_tokenizer
    from nbengine.models.checkpoints.files import resolve_model

    tokenizer = load_tokenizer(resolve_model(ModelConfig("smollm2-135m")))
    for messages in (QUESTION, ANSWERED):
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, tools=[WEATHER], add_generation_prompt=True
        )
        assert render_chat(tokenizer, messages, tools=[WEATHER])["prompt"] == expected


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        (PARTS, "auto", "user:<text>one<text>two"),
        (PARTS, "openai", "user:<text>one<text>two"),
        (LLAMA, "auto", "<|begin|><|start|>user<|/start|>onetwo<|eot|>"),
        (LLAMA, "string", "<|begin|><|start|>user<|/start|>one\ntwo<|eot|>"),
        (MISTRAL, "auto", "<s>[INST]one\ntwo[/INST]"),
    ],
)
def test_text_parts_reach_templates_that_know_them_and_are_joined_for_others(
    tokenizer: PreTrainedTokenizerFast, template: str, content_format: str, expected: str
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = render_chat(
        tokenizer,
        [{"role": "user", "content": parts}],
        chat_template=template,
        chat_template_content_format=content_format,
        add_generation_prompt=False,
    )
    assert prompt["prompt"] == expected


def test_openai_format_makes_parts_of_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = render_chat(tokenizer, QUESTION, chat_template=PARTS, chat_template_content_format="openai")
    assert prompt["prompt"] == "user:<text>Is it raining in Bern?"


def test_a_template_is_chosen_by_its_name_or_by_there_being_tools(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    several = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    several.chat_template = {"default": "plain", "tool_use": "tools", "other": "other"}
    assert render_chat(several, QUESTION)["prompt"] == "plain"
    assert render_chat(several, QUESTION, tools=[WEATHER])["prompt"] == "tools"
    assert render_chat(several, QUESTION, chat_template="other")["prompt"] == "other"


def test_a_template_that_refuses_says_why(tokenizer: PreTrainedTokenizerFast) -> None:
    twice = [*QUESTION, {"role": "assistant", "tool_calls": [CALL, CALL]}]
    with pytest.raises(InvalidArgumentError, match="one tool call at a time"):
        render_chat(tokenizer, twice, chat_template=LLAMA)


# Functions as tools.


class Unit(enum.Enum):
    """Of temperature."""

    CELSIUS = "c"
    KELVIN = "k"


def temperature(city: str, unit: Unit, days: list[int] | None = None, exact: bool = False) -> float:
    """The temperature of a city.

    On several days.

    Args:
        city: name of the city, for example:
            Bern
        unit: what to measure in
        days: which days
        exact: whether to round

    Returns:
        Degrees.

    Raises:
        KeyError: no such city.
    """
    raise NotImplementedError


def many(
    anything: Any,
    word: Literal["a", "b", 3],
    pair: tuple[int, str],
    table: dict[str, list[float]],
    either: int | str,
    mixed: list[int] | dict[str, int] | None,
    nothing: None,
    bare: list,
    unknown: dict,
):
    """Everything there is.

    Args:
        anything: 1
        word: 2
        pair: 3
        table: 4
        either: 5
        mixed: 6
        nothing: 7
        bare: 8
        unknown: 9
    """


def no_arguments() -> None:
    """It takes nothing."""


class Station:
    """Has a method."""

    def measure(self, count: int) -> str:
        """Measure.

        Args:
            count: how often
        """
        raise NotImplementedError


@pytest.mark.parametrize(
    "function", [temperature, many, no_arguments, Station().measure], ids=lambda f: f.__name__
)
def test_a_functions_schema_is_that_of_transformers(function: Any) -> None:
    assert tool_schemas([function]) == [get_json_schema(function)]


def undocumented(x: int) -> int: ...


def untyped(x) -> int:
    """Docs.

    Args:
        x: something
    """


def odd(x: Unit | Station) -> int:
    """Docs.

    Args:
        x: something
    """


def forward(x: Missing) -> int:  # noqa: F821
    """Docs.

    Args:
        x: something
    """


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "tools must be a list"),
        (WEATHER, "tools must be a list"),
        ([3], r"tools\[0\] must be"),
        ([WEATHER, {"name": "weather"}], r'tools\[1\] must be {"type": "function"'),
        ([{"type": "function", "function": {}}], r"tools\[0\]"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\]"),
        ([len], r"tools\[0\]"),
        ([undocumented], "it has no docstring"),
        ([untyped], "argument 'x' has no type hint"),
        ([odd], "no JSON type for .*Station"),
        ([forward], "Missing"),
    ],
)
def test_what_is_no_tool_is_named(tokenizer: PreTrainedTokenizerFast, tools: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        render_chat(tokenizer, QUESTION, tools=tools)
