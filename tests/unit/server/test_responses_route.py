"""`/v1/responses` answers OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from scripted_engine import MAX_MODEL_LEN, ScriptedEngine, http_to, thinking_engine

from nbengine.errors import EngineDeadError, RefusedArgumentError


@asynccontextmanager
async def client_of(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    async with http_to(engine, **settings) as http:
        yield AsyncOpenAI(base_url="http://localhost/v1", api_key="key", max_retries=0, http_client=http)


async def test_an_answer_comes_whole_with_its_usage_and_the_parameters_reach_the_engine() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        response = await client.responses.create(
            model="tiny", input="Hi", instructions="Be kind.", max_output_tokens=9, temperature=0.5
        )
    assert (response.status, response.output_text) == ("completed", "Hello there")
    assert engine.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    [params] = engine.params
    assert (params.max_tokens, params.temperature) == (9, 0.5)
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (11, 2)


async def test_a_stream_ends_with_the_response_that_a_call_without_stream_gives() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        async with client.responses.stream(model="tiny", input="Hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="tiny", input="Hi")
    assert deltas == ["Hello", " there"]
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert engine.running == 0


async def test_a_conversation_goes_on_from_a_stored_response_without_its_instructions() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        first = await client.responses.create(model="tiny", input="Hi", instructions="Be kind.")
        async with client.responses.stream(
            model="tiny", input="And?", previous_response_id=first.id
        ) as stream:
            second = await stream.get_final_response()
        assert [message["content"] for message in engine.messages] == ["Hi", "Hello there", "And?"]
        await client.responses.create(model="tiny", input="So?", previous_response_id=second.id)
        assert [message["role"] for message in engine.messages] == ["user", "assistant"] * 2 + ["user"]
        assert (await client.responses.retrieve(second.id)).output_text == "Hello there"
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)


async def test_a_response_that_is_not_to_be_stored_is_not() -> None:
    async with client_of(ScriptedEngine()) as client:
        first = await client.responses.create(model="tiny", input="Hi", store=False)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="So?", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_each_token_come_with_the_text(stream: bool) -> None:
    async with client_of(ScriptedEngine()) as client:
        if stream:
            async with client.responses.stream(model="tiny", input="Hi", top_logprobs=2) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model="tiny", input="Hi", top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "Hello there"
    assert [entry.token for entry in entries[0].top_logprobs] == ["H", "<0>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fills_its_limit_is_incomplete(stream: bool) -> None:
    async with client_of(ScriptedEngine(finish_reason="length")) as client:
        if stream:
            async with client.responses.stream(model="tiny", input="Hi") as events:
                response = [event async for event in events][-1].response  # type: ignore[union-attr]
        else:
            response = await client.responses.create(model="tiny", input="Hi")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": "x" * (MAX_MODEL_LEN + 1)}, "input"),
        ({"background": True}, "background"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
async def test_a_wrong_field_is_refused_under_the_name_that_the_caller_gave(
    fields: dict[str, Any], param: str
) -> None:
    async with client_of(ScriptedEngine()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "tiny", "input": "Hi", **fields})
    assert caught.value.param == param
    assert param.split(".")[0] in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_the_engine_refuses_is_named_as_the_caller_gave_it(stream: bool) -> None:
    engine = ScriptedEngine()
    name = "structured_outputs.json"
    engine.error = RefusedArgumentError(name, f"{name} cannot be used: it is contradictory")
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match=r"text\.format cannot be used") as caught:
            await client.responses.create(model="tiny", input="Hi", text=form, stream=stream)
    assert caught.value.param == "text.format"


@pytest.mark.parametrize(
    ("length", "most", "kept"),
    [(100, None, -1), (100, 156, -1), (101, 156, 128), (200, 57, 199), (255, None, -1), (256, None, 192)],
)
async def test_a_conversation_that_is_cut_leaves_room_for_the_answer(
    length: int, most: int | None, kept: int
) -> None:
    engine = ScriptedEngine()
    fields: Any = {} if most is None else {"max_output_tokens": most}
    text = "x" * (length - len("user: \n"))
    async with client_of(engine) as client:
        await client.responses.create(model="tiny", input=text, truncation="auto", **fields)
    assert [params.truncate_prompt_tokens for params in engine.params] == [kept]


async def test_an_unknown_model_is_not_found() -> None:
    async with client_of(ScriptedEngine()) as client:
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await client.responses.create(model="huge", input="Hi")


async def test_a_failure_before_the_first_event_has_a_status_and_a_later_one_an_event() -> None:
    engine = ScriptedEngine()
    engine.error = EngineDeadError("the machine has no memory left")
    async with client_of(engine) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.create(model="tiny", input="Hi", stream=True)
        assert caught.value.status_code == 503
        engine.error_at = 1
        events = [
            event async for event in await client.responses.create(model="tiny", input="Hi", stream=True)
        ]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.output_text == "Hello"
    assert last.response.error is not None
    assert "no memory left" in last.response.error.message


async def test_the_tokens_of_a_prompt_are_counted_without_an_answer() -> None:
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        counted = await client.responses.input_tokens.count(model="tiny", input="x" * MAX_MODEL_LEN)
    assert counted.input_tokens == len("user: \n") + MAX_MODEL_LEN
    assert engine.params == []


async def test_responses_are_behind_the_key() -> None:
    async with http_to(ScriptedEngine(), api_keys=("a-long-key",)) as http:
        assert (await http.post("/v1/responses", json={"input": "Hi"})).status_code == 401
        assert (await http.get("/v1/responses/resp_1")).status_code == 401


async def test_reasoning_and_calls_are_items_of_their_own_and_the_tools_loop_goes_round() -> None:
    engine = thinking_engine()
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    async with client_of(engine) as client:
        async with client.responses.stream(model="tiny", input="Hot?", tools=[tool]) as stream:
            streamed = await stream.get_final_response()
        whole = await client.responses.create(model="tiny", input="Hot?", tools=[tool])
        for response in (streamed, whole):
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
            assert response.output[0].content[0].text == "Where?"  # type: ignore[union-attr, index]
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == len("Where?")
        call: Any = whole.output[-1]
        assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "hot"}
        await client.responses.create(
            model="tiny", input=[result], previous_response_id=whole.id, tools=[tool]
        )
    question, asked, answered = engine.messages
    assert question["content"] == "Hot?"
    assert asked["reasoning_content"] == "Where?"
    assert asked["tool_calls"][0]["id"] == call.call_id
    assert (answered["role"], answered["name"], answered["content"]) == ("tool", "weather", "hot")
