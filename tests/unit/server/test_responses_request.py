"""The bodies of `/v1/responses` become bodies of `/v1/chat/completions` that ask for the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.engine_fields import EngineFields
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.responses import ResponsesRequest
from nbengine.server.translate.conversation import renamed
from nbengine.server.translate.responses_request import CHAT_NAMES, chat_body, input_messages

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "description": "Tell the weather."}


def _allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": "auto", "tools": tools}


def body_of(**fields: Any) -> dict[str, Any]:
    request = msgspec.json.decode(json.dumps({"input": "Hi", **fields}), type=ResponsesRequest)
    return chat_body(request, input_messages(request.input))


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body_of(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_text_is_one_message_of_the_user_and_nothing_else_is_made_up() -> None:
    assert body_of() == {"messages": [{"role": "user", "content": "Hi"}]}


def test_fields_keep_their_meaning_under_their_other_names() -> None:
    body = body_of(
        model="m",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        parallel_tool_calls=False,
        seed=3,
        cache_salt="s",
        chat_template_kwargs={"a": 1},
        thinking_budget=9,
    )
    del body["messages"]
    assert body == {
        "model": "m",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "reasoning_effort": "low",
        "truncate_prompt_tokens": -1,
        "parallel_tool_calls": False,
        "seed": 3,
        "cache_salt": "s",
        "chat_template_kwargs": {"a": 1},
        "thinking_budget": 9,
    }


def test_instructions_and_leading_system_messages_are_one_message() -> None:
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    messages = body_of(instructions="Be short.", input=items)["messages"]
    assert messages == [
        {"role": "system", "content": "Be short.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_reasoning_text_and_calls_are_one_message_of_the_assistant() -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Is it"}, {"type": "input_text", "text": "hot?"}],
        },
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "noon"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "hot"}]},
    ]
    assert body_of(input=items)["messages"] == [
        {"role": "user", "content": "Is it\nhot?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "noon", "name": "clock"},
        {"role": "tool", "tool_call_id": "a", "content": "hot", "name": "weather"},
    ]


def test_two_answers_of_the_assistant_stay_two_messages() -> None:
    items = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert [message["content"] for message in body_of(input=items)["messages"]] == ["One.", "Two."]


def test_a_result_names_the_function_of_a_call_in_an_earlier_response() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    earlier = input_messages([call])
    [result] = input_messages([{"type": "function_call_output", "call_id": "a", "output": "hot"}], earlier)
    assert result["name"] == "weather"


def test_a_tool_is_strict_unless_it_says_otherwise() -> None:
    json_format = {"format": {"type": "json_object"}}
    assert body_of(tools=[TOOL], text=json_format)["tools"][0]["function"]["strict"]
    tools = body_of(tools=[TOOL, {**TOOL, "strict": False}])["tools"]
    assert [tool["function"]["strict"] for tool in tools] == [True, False]
    assert tools[0]["function"] == {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": WEATHER,
        "strict": True,
    }


def test_a_named_function_is_chosen_in_the_words_of_chat_completions() -> None:
    body = body_of(tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_allowed_tools_leave_out_the_others() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    body = body_of(tools=[TOOL, {**TOOL, "name": "clock"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["clock"]
    assert body["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}},
        ),
    ],
)
def test_a_format_of_text_is_a_response_format(given: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert body_of(text={"format": given}).get("response_format") == wanted


@pytest.mark.parametrize("fields", [{"top_logprobs": 3}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_are_asked_for(fields: dict[str, Any]) -> None:
    body = body_of(**fields)
    assert (body["logprobs"], body["top_logprobs"]) == (True, fields.get("top_logprobs", 0))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": _allowed("wether")}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": _allowed("weather", "clock")}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": _allowed()}, "tool_choice.tools"),
        ({"tool_choice": _allowed("weather")}, "tool_choice.tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "Hi"}, {"role": "king", "content": "Hi"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": 7}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = error_of(**fields)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


@pytest.mark.parametrize("name", EngineFields.__struct_fields__)
def test_a_field_of_the_engine_is_one_of_chat_completions_too(name: str) -> None:
    assert name in ChatCompletionRequest.__struct_fields__


def test_an_error_about_the_translated_body_names_the_callers_field() -> None:
    error = ApiError(
        400, "t", "c", "max_completion_tokens", "max_completion_tokens must be at least 1, got 0"
    )
    own = renamed(error, CHAT_NAMES)
    assert (own.param, own.message) == ("max_output_tokens", "max_output_tokens must be at least 1, got 0")
    other = ApiError(400, "t", "c", "temperature", "temperature must be …")
    assert renamed(other, CHAT_NAMES) is other
