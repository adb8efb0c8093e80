"""The bodies of Anthropic's `/v1/messages` become bodies of `/v1/chat/completions` that ask for the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.translate.messages_request import chat_body, prompt_body

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]


def body_of(**fields: Any) -> dict[str, Any]:
    text = json.dumps({"model": "m", "max_tokens": 5, "messages": HI, **fields})
    return chat_body(msgspec.json.decode(text, type=MessagesRequest))


def messages_of(*messages: dict[str, Any], **fields: Any) -> Any:
    return body_of(messages=messages, **fields)["messages"]


def test_a_request_of_one_message_asks_for_no_thoughts_and_nothing_else_is_made_up() -> None:
    assert body_of() == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_fields_keep_their_meaning_under_their_other_names() -> None:
    body = body_of(
        stop_sequences=["END"],
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
        seed=3,
        priority=1,
    )
    assert {
        name: body[name] for name in body if name not in ("model", "messages", "max_completion_tokens")
    } == {
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_budget": 1024,
        "reasoning_effort": "xhigh",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        "seed": 3,
        "priority": 1,
    }


def test_a_template_argument_of_the_caller_wins() -> None:
    body = body_of(chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "a": 1}


def test_the_system_prompt_comes_first_and_its_blocks_are_one_message() -> None:
    system = [
        {"type": "text", "text": "Be short."},
        {"type": "text", "text": "Be kind.", "cache_control": None},
    ]
    assert messages_of(*HI, system=system)[0] == {"role": "system", "content": "Be short.\n\nBe kind."}
    assert messages_of(*HI, system="Be kind.")[0] == {"role": "system", "content": "Be kind."}


def test_calls_thoughts_and_results_become_messages_of_chat_completions() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "hot"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
        {"type": "text", "text": "And now?"},
    ]
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        call,
    ]
    assert messages_of(
        {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "text", "text": "hot?"}]},
        {"role": "assistant", "content": thoughts},
        {"role": "user", "content": results},
    ) == [
        {"role": "user", "content": "Is it\nhot?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "hot", "name": "weather"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "And now?"},
    ]


def test_documents_and_search_results_are_text() -> None:
    document = {
        "type": "document",
        "title": "Rome",
        "source": {"type": "text", "media_type": "text/plain", "data": "A city."},
    }
    found = {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]}
    [message] = messages_of({"role": "user", "content": [document, found]})
    assert message["content"] == "Rome\nA city.\nT (s)\nx"


def test_an_instruction_in_the_middle_is_a_system_message_in_its_place() -> None:
    block = {"type": "mid_conv_system", "content": [{"type": "text", "text": "Be kind."}]}
    content = [{"type": "text", "text": "Hi"}, block, {"type": "text", "text": "Bye"}]
    assert [message["role"] for message in messages_of({"role": "user", "content": content})] == [
        "user",
        "system",
        "user",
    ]


def test_an_answer_goes_on_where_the_last_message_of_the_assistant_ends() -> None:
    body = body_of(messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in body_of()


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_the_choice_of_a_tool_keeps_its_meaning(choice: dict[str, Any], wanted: dict[str, Any]) -> None:
    body = body_of(tools=[{**TOOL, "strict": True}], tool_choice=choice)
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == wanted
    [tool] = body["tools"]
    assert tool["function"] == {
        "name": "weather",
        "description": "Tell the weather.",
        "strict": True,
        "parameters": SCHEMA,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
                ]
            },
            "messages[1].content[0]",
        ),
    ],
)
def test_what_is_misplaced_or_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        body_of(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)
def test_a_body_of_the_wrong_form_is_refused_where_it_is_wrong(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=place):
        body_of(**fields)


def test_counting_asks_for_the_same_prompt_as_the_request() -> None:
    fields = {
        "model": "m",
        "messages": HI,
        "system": "Be kind.",
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
    }
    counted = prompt_body(msgspec.json.decode(json.dumps(fields), type=CountTokensRequest))
    asked = body_of(**fields)
    assert counted == {name: asked[name] for name in counted}
    assert set(asked) - set(counted) == {"max_completion_tokens"}
