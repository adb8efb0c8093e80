"""The events and bodies of `/v1/responses` are what OpenAI's client expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from api_answers import events_in, openai_client
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.responses import ResponsesRequest, TextConfig
from nbengine.server.translate.responses_events import ResponseBuilder, new_response_id
from nbengine.server.translate.responses_request import input_messages
from nbengine.server.translate.usage import Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=11, cached_tokens=4, output_tokens=7, reasoning_tokens=2)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
WHOLE: list[AnswerDelta] = [
    ReasoningDelta("Let me"),
    ReasoningDelta(" think."),
    ContentDelta("\n\n"),
    ContentDelta("I will"),
    ContentDelta(" look."),
    ContentDelta("\n"),
    ToolCallStarted(0, "call_a", "weather"),
    ArgumentsDelta(0, '{"city": '),
    ArgumentsDelta(0, '"Rome"}'),
    ToolCallEnded(0),
    ContentDelta("\n"),
    ToolCallStarted(1, "call_b", "weather"),
    ArgumentsDelta(1, '{"city":"Oslo"}'),
    ToolCallEnded(1),
]


class City(BaseModel):
    """An answer of a given form."""

    name: str
    people: int


def builder(**fields: Any) -> ResponseBuilder:
    return ResponseBuilder(ResponsesRequest(input="Hi", **fields), "tiny", new_response_id(), 1_700_000_000)


def events_of(
    deltas: Sequence[AnswerDelta], finish_reason: str = "stop", **fields: Any
) -> list[dict[str, Any]]:
    made = builder(**fields)
    events = made.start()
    for delta in deltas:
        events += made.add([delta])
    return events_in(events + made.finish(finish_reason, USAGE))


def test_an_answer_with_everything_is_the_whole_sequence_of_events() -> None:
    events = events_of(WHOLE, tools=[WEATHER])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *["output_text.delta"] * 3),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)


def test_openais_stream_helper_puts_the_answer_together() -> None:
    client = openai_client(events_of(WHOLE, tools=[WEATHER]))
    with client.responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "\n\nI will look.\n"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert [call.call_id for call in calls] == ["call_a", "call_b"]
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == 4
    assert final.usage.output_tokens_details.reasoning_tokens == 2
    assert final.usage.total_tokens == 18


def test_the_stream_helper_parses_an_answer_of_a_given_form() -> None:
    text = '{"name": "Rome", "people": 3}'
    client = openai_client(events_of([ContentDelta(text[:9]), ContentDelta(text[9:])]))
    with client.responses.stream(model="tiny", input="Hi", text_format=City) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == City(name="Rome", people=3)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [WEATHER], "tool_choice": "required", "instructions": "Be kind."}]
)
def test_the_body_is_a_response_of_openais_types(fields: dict[str, Any]) -> None:
    made = builder(text=TextConfig(), temperature=0.5, metadata={"a": "b"}, **fields)
    made.add(WHOLE)
    made.finish("stop", USAGE)
    parsed = Response.model_validate(made.response)
    assert parsed.status == "completed"
    assert (
        openai_client(made.response).responses.create(model="tiny", input="Hi").output_text
        == parsed.output_text
    )


def test_a_body_and_a_stream_say_the_same() -> None:
    made = builder()
    made.add(WHOLE)
    made.finish("stop", USAGE)
    streamed = events_of(WHOLE)[-1]["response"]
    items = [{**item, "id": ""} for item in made.response["output"]]
    assert items == [{**item, "id": ""} for item in streamed["output"]]


def test_the_output_can_be_sent_back_as_input() -> None:
    final = events_of(WHOLE)[-1]["response"]
    [message] = input_messages([Response.model_validate(final).output[0].model_dump(), *final["output"][1:]])
    assert message["reasoning_content"] == "Let me think."
    assert message["content"].strip() == "I will look."
    assert [call["id"] for call in message["tool_calls"]] == ["call_a", "call_b"]


def test_an_answer_that_was_cut_off_is_incomplete_and_its_last_item_too() -> None:
    events = events_of([ReasoningDelta("Hm."), ContentDelta("I w")], "length")
    final = events[-1]
    EVENT.validate_python(final)
    assert final["type"] == "response.incomplete"
    assert final["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in final["response"]["output"]] == ["completed", "incomplete"]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["completed", "incomplete"]


def test_an_error_in_the_middle_ends_the_stream_as_failed_with_what_there_is() -> None:
    made = builder()
    made.start()
    made.add([ContentDelta("I w")])
    end = made.fail(ApiError(503, "server_error", "engine_dead", None, "the engine has ended"))
    events = events_in(end)
    EVENT.validate_python(events[-1])
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine has ended"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "I w"


def test_an_error_before_anything_else_is_a_whole_stream_for_the_client() -> None:
    # The status of a stream does not wait for ever: by then an error has to be an event.
    end = builder().fail(ApiError(400, "invalid_request_error", None, None, "the text is too strange"))
    events = events_in(end)
    EVENT.validate_python(events[-1])
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
    with openai_client(events).responses.stream(model="tiny", input="Hi") as stream:
        kinds = [event.type for event in stream]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


def test_a_call_that_cannot_be_read_is_never_begun_and_its_text_is_kept() -> None:
    raw = '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>'
    deltas = [
        ToolCallStarted(0, "call_a", "weather"),
        ArgumentsDelta(0, '{"city": '),
        MalformedCall(raw, "the arguments are no JSON", 0),
    ]
    events = events_of(deltas)
    for kind in ("added", "done"):
        items = [
            (event["output_index"], event["item"]["type"])
            for event in events
            if event["type"] == f"response.output_item.{kind}"
        ]
        assert items == [(0, "message")]
    with openai_client(events).responses.stream(model="tiny", input="Hi") as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message"]
    assert final.output_text == raw
    assert final.model_dump()["unreadable_tool_calls"] == [
        {"text": raw, "reason": "the arguments are no JSON"}
    ]
    assert "unreadable_tool_calls" not in events_of(WHOLE)[-1]["response"]


def test_white_space_alone_is_an_item_only_where_there_is_nothing_else() -> None:
    assert (
        events_of([ContentDelta("\n"), ContentDelta("\n")])[-1]["response"]["output"][0]["content"][0]["text"]
        == "\n\n"
    )
    assert [
        item["type"]
        for item in events_of([ReasoningDelta("Hm."), ContentDelta("\n")])[-1]["response"]["output"]
    ] == ["reasoning"]
    assert events_of([])[-1]["response"]["output"] == []


def test_log_probabilities_go_with_the_text_that_they_belong_to() -> None:
    entries = [
        {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}
        for token in "abc"
    ]
    made = builder(top_logprobs=1)
    # White space waits for the text behind it, with its entry.
    deltas = [ReasoningDelta("r"), ContentDelta("\n"), ContentDelta("bc"), *WHOLE[6:10], ContentDelta("a")]
    a, b, c = entries
    shares = [[], [a], [b, c], *[[]] * 4, [a]]
    found = [event for event in events_in(made.add(deltas, shares)) if "logprobs" in event]
    assert [[entry["token"] for entry in event["logprobs"]] for event in found if "delta" in event] == [
        ["a", "b", "c"],
        ["a"],
    ]
    for event in found:
        EVENT.validate_python(event)
    made.finish("stop", USAGE)
    items = Response.model_validate(made.response).output
    texts = [part.logprobs for item in items if item.type == "message" for part in item.content]  # type: ignore[union-attr]
    assert [[entry.token for entry in own or ()] for own in texts] == [["a", "b", "c"], ["a"]]
