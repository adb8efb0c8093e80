"""`/v1/messages` answers Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam
from scripted_engine import MAX_MODEL_LEN, ScriptedEngine, http_to, thinking_engine

from nbengine.errors import EngineDeadError, RefusedArgumentError

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]
KEY = "a-long-key"


@asynccontextmanager
async def client_of(engine: ScriptedEngine, key: str = KEY) -> AsyncIterator[AsyncAnthropic]:
    async with http_to(engine, api_keys=(KEY,)) as http:
        yield AsyncAnthropic(base_url="http://localhost", api_key=key, max_retries=0, http_client=http)


async def test_an_answer_comes_whole_with_its_usage_and_the_parameters_reach_the_engine() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        message = await client.messages.create(
            model="tiny",
            max_tokens=9,
            messages=HI,
            system="Be kind.",
            extra_body={"temperature": 0.5},
            stop_sequences=["END"],
        )
    assert message.content[0].text == "Hello there"  # type: ignore[union-attr]
    assert (message.stop_reason, message.model) == ("end_turn", "tiny")
    num_prompt = len("system: Be kind.\nuser: Hi\n")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (num_prompt - 2, 2)
    assert message.usage.output_tokens == 11
    [params] = engine.params
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, ["END"])
    assert engine.render_options["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_stream_ends_with_the_message_that_a_call_without_stream_gives() -> None:
    engine = ScriptedEngine()
    engine.stop_reason = "END"
    fields: Any = {"model": "tiny", "max_tokens": 9, "messages": HI, "stop_sequences": ["END"]}
    async with client_of(engine) as client:
        async with client.messages.stream(**fields) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**fields)
    assert texts == ["Hello", " there"]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    assert (streamed.stop_reason, streamed.stop_sequence, streamed.usage) == (
        whole.stop_reason,
        whole.stop_sequence,
        whole.usage,
    )
    assert engine.running == 0


async def test_an_answer_goes_on_where_the_last_message_of_the_assistant_ends() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        messages: list[MessageParam] = [*HI, {"role": "assistant", "content": "Well,"}]
        await client.messages.create(model="tiny", max_tokens=9, messages=messages)
    assert engine.render_options["continue_final_message"]
    assert not engine.render_options["add_generation_prompt"]


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
async def test_with_no_tokens_to_write_the_prompt_alone_is_read(finish_reason: str) -> None:
    engine = ScriptedEngine(["x"], finish_reason)
    async with client_of(engine) as client:
        whole = await client.messages.create(model="tiny", max_tokens=0, messages=HI)
        async with client.messages.stream(model="tiny", max_tokens=0, messages=HI) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert events == ["message_start", "message_delta", "message_stop"]
    for message in (whole, streamed):
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
        assert message.usage.cache_read_input_tokens == 2
    assert [params.max_tokens for params in engine.params] == [1, 1]


async def test_counting_gives_the_tokens_of_the_prompt_whatever_its_length() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        counted = await client.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}]
        )
    assert counted.input_tokens == len("user: \n") + MAX_MODEL_LEN
    assert engine.params == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * (MAX_MODEL_LEN + 1)}]}, "messages must be at most"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ],
)
async def test_a_wrong_field_is_refused_under_the_name_that_the_caller_gave(
    fields: dict[str, Any], word: str
) -> None:
    async with client_of(ScriptedEngine()) as client:
        with pytest.raises(anthropic.BadRequestError, match=word) as caught:
            await client.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": HI, **fields})
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_the_engine_refuses_is_named_as_the_caller_gave_it(stream: bool) -> None:
    engine = ScriptedEngine()
    name = "structured_outputs.json"
    engine.error = RefusedArgumentError(name, f"{name} cannot be used: it is contradictory")
    form: Any = {"format": {"type": "json_schema", "schema": {}}}
    fields: Any = {"max_tokens": 9, "messages": HI, "output_config": form, "stream": stream}
    async with client_of(engine) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format cannot be used"):
            await client.messages.create(model="tiny", **fields)


async def test_a_wrong_key_is_refused_in_anthropics_words() -> None:
    async with client_of(ScriptedEngine(), key="wrong-long-key") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="tiny", max_tokens=9, messages=HI)
    assert caught.value.type == "authentication_error"


async def test_a_failure_before_the_first_event_has_a_status_and_a_later_one_an_event() -> None:
    engine = ScriptedEngine()
    engine.error = EngineDeadError("the machine has no memory left")
    fields: Any = {"model": "tiny", "max_tokens": 9, "messages": HI}
    async with client_of(engine) as client:
        with pytest.raises(anthropic.APIStatusError, match="no memory left") as caught:
            await client.messages.create(**fields, stream=True)
        assert caught.value.status_code == 503
        engine.error_at = 1
        async with client.messages.stream(**fields) as stream:
            assert await anext(stream.text_stream) == "Hello"
            with pytest.raises(anthropic.APIStatusError, match="no memory left"):
                await anext(stream.text_stream)


async def test_reasoning_and_calls_are_blocks_of_their_own_and_the_tools_loop_goes_round() -> None:
    engine = thinking_engine()
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}}
    fields: Any = {"model": "tiny", "max_tokens": 200, "tools": [tool]}
    async with client_of(engine) as client:
        async with client.messages.stream(**fields, messages=HI) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**fields, messages=HI)
        for message in (streamed, whole):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert message.content[0].thinking == "Where?"  # type: ignore[union-attr]
            assert message.stop_reason == "tool_use"
        call: Any = whole.content[-1]
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "hot"}
        messages: Any = [
            *HI,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**fields, messages=messages)
    _, asked, answered = engine.messages
    assert asked["reasoning_content"] == "Where?"
    assert asked["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (answered["role"], answered["name"], answered["content"]) == ("tool", "weather", "hot")
