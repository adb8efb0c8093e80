"""The events and bodies of `/v1/messages` are what Anthropic's client expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from api_answers import anthropic_client, events_in
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json
from pydantic import TypeAdapter

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.frontend.parsing.json_text import ObjectPrefix, read_object
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.messages import InputMessage, MessagesRequest, Thinking
from nbengine.server.translate.messages_events import MessageBuilder, new_message_id
from nbengine.server.translate.usage import Usage

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(prompt_tokens=11, cached_tokens=4, output_tokens=7)
HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hi"}]
WHOLE: list[AnswerDelta] = [
    ReasoningDelta("Let me"),
    ReasoningDelta(" think."),
    ContentDelta("I will"),
    ContentDelta(" look."),
    ToolCallStarted(0, "call_a", "weather"),
    ArgumentsDelta(0, '{"city": '),
    ArgumentsDelta(0, '"Rome"}'),
    ToolCallEnded(0),
    ContentDelta("\n"),
    ToolCallStarted(1, "call_b", "clock"),
    ArgumentsDelta(1, "{}"),
    ToolCallEnded(1),
]


def builder(**fields: Any) -> MessageBuilder:
    fields = {"max_tokens": 100, **fields}
    request = MessagesRequest(model="tiny", messages=[InputMessage("user", "Hi")], **fields)
    return MessageBuilder(request, "tiny", new_message_id())


def events_of(
    deltas: Sequence[AnswerDelta],
    finish_reason: str = "stop",
    stop_reason: int | str | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    made = builder(**fields)
    events = made.start(Usage(prompt_tokens=11))
    for delta in deltas:
        events += made.add([delta])
    return events_in(events + made.finish(finish_reason, stop_reason, USAGE))


def message_of(events: Sequence[dict[str, Any]]) -> Message:
    """The message that Anthropic's stream helper makes of events."""
    with anthropic_client(events).messages.stream(model="tiny", max_tokens=9, messages=HI) as stream:
        return stream.get_final_message()


def test_an_answer_with_everything_is_the_whole_sequence_of_events() -> None:
    events = events_of(WHOLE)
    block = ("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop")
    assert [event["type"] for event in events] == [
        "message_start",
        *(*block[:2], *block[1:]),
        *block,
        *block,
        *(*block[:2], block[3]),
        "message_delta",
        "message_stop",
    ]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [0, 1, 2, 3]
    for event in events:
        EVENT.validate_python(event)


def test_anthropics_stream_helper_puts_the_answer_together() -> None:
    client = anthropic_client(events_of(WHOLE))
    with client.messages.stream(model="tiny", max_tokens=9, messages=HI) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= kinds
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert thinking.thinking == "Let me think."  # type: ignore[union-attr]
    assert text.text == "I will look."  # type: ignore[union-attr]
    assert [(call.id, call.name, call.input) for call in calls] == [  # type: ignore[union-attr]
        ("call_a", "weather", {"city": "Rome"}),
        ("call_b", "clock", {}),
    ]
    assert message.stop_reason == "tool_use"
    assert (
        message.usage.input_tokens,
        message.usage.cache_read_input_tokens,
        message.usage.output_tokens,
    ) == (7, 4, 7)


def test_a_body_and_a_stream_say_the_same() -> None:
    made = builder()
    made.add(WHOLE)
    made.finish("stop", None, USAGE)
    whole = Message.model_validate(made.message)
    answered = anthropic_client(made.message).messages.create(model="tiny", max_tokens=9, messages=HI)
    streamed = message_of(events_of(WHOLE))
    assert answered.content == whole.content
    contents = [
        [block.model_dump(exclude_none=True) for block in message.content] for message in (whole, streamed)
    ]
    assert contents[0] == contents[1]
    assert (whole.stop_reason, whole.usage) == (streamed.stop_reason, streamed.usage)


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "max_tokens", "wanted"),
    [
        ("stop", None, 100, ("end_turn", None)),
        ("stop", 2, 100, ("end_turn", None)),
        ("stop", "END", 100, ("stop_sequence", "END")),
        ("stop", "<|eot|>", 100, ("end_turn", None)),
        ("length", None, 7, ("max_tokens", None)),
        ("length", None, 8, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_of_the_end_is_anthropics(
    finish_reason: str, stop_reason: int | str | None, max_tokens: int, wanted: tuple[str, str | None]
) -> None:
    events = events_of(
        [ContentDelta("x")], finish_reason, stop_reason, max_tokens=max_tokens, stop_sequences=["END"]
    )
    message = message_of(events)
    assert (message.stop_reason, message.stop_sequence) == wanted


def test_thoughts_that_are_to_be_omitted_are_empty_in_a_stream_and_in_a_body() -> None:
    made = builder(thinking=Thinking("enabled", 1024, "omitted"))
    events = events_in(made.start(USAGE) + made.add(WHOLE) + made.finish("stop", None, USAGE))
    assert message_of(events).content[0].thinking == ""  # type: ignore[union-attr]
    assert made.message["content"][0]["thinking"] == ""


@pytest.mark.parametrize(
    "arguments", [['{"city": '], ['{"city": None}'], ['{"city"', ": N", "one", "}"], ["{'city': 1}"]]
)
def test_a_call_that_cannot_be_read_is_no_reason_to_use_a_tool_and_its_text_is_kept(
    arguments: list[str],
) -> None:
    raw = f'<tool_call>{{"name": "weather", "arguments": {"".join(arguments)}</tool_call>'
    deltas = [
        ToolCallStarted(0, "call_a", "weather"),
        *(ArgumentsDelta(0, piece) for piece in arguments),
        MalformedCall(raw, "the arguments are no JSON", 0),
    ]
    made = builder()
    events = events_in(made.start(USAGE) + made.add(deltas) + made.finish("stop", None, USAGE))
    streamed = message_of(events)
    assert streamed.stop_reason == "end_turn"
    assert streamed.content[-1].text == raw  # type: ignore[union-attr]
    assert made.message["content"] == [{"type": "text", "text": raw}]
    unreadable = [{"text": raw, "reason": "the arguments are no JSON"}]
    assert msgspec.to_builtins(made.message["unreadable_tool_calls"]) == unreadable
    [end] = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert end["unreadable_tool_calls"] == unreadable
    assert not any("unreadable_tool_calls" in event.get("delta", {}) for event in events_of(WHOLE))


FRAGMENTS = [
    *'{}[]",:-+.01eE\\ \nn',
    *("true", "fal", "null", "None", "NaN", '"a"', '"a": ', '", "b": ', '"}', "'a'", "\x01", "é"),
    *("\\n", "\\u", "\\ud83d", "\\ude00", "\\u00e9", "d83d"),
]


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=20))
def test_what_is_taken_of_arguments_can_be_read_by_anthropics_client_and_the_rest_is_no_json(
    fragments: list[str],
) -> None:
    prefix, taken = ObjectPrefix(), ""
    for fragment in ("{", *fragments):
        if not prefix.take(fragment):
            assert isinstance(read_object("{" + "".join(fragments)), str)
            break
        taken += fragment
        from_json(taken.encode(), partial_mode=True)


def test_an_error_in_a_stream_is_raised_by_the_client_with_its_reason() -> None:
    error = ApiError(503, "server_error", "engine_dead", None, "the engine has ended")
    events = [*events_in(builder().start(USAGE)), error.anthropic_body()]
    with pytest.raises(anthropic.APIStatusError, match="the engine has ended"):
        message_of(events)


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.APIStatusError),
        (422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_an_error_has_anthropics_form(status: int, kind: str, raised: type[anthropic.APIStatusError]) -> None:
    body = ApiError(status, "t", None, "temperature", "temperature must be …").anthropic_body()
    assert body == {"type": "error", "error": {"type": kind, "message": "temperature must be …"}}
    with pytest.raises(raised, match="temperature"):
        anthropic_client(body, status).messages.create(model="tiny", max_tokens=9, messages=HI)
