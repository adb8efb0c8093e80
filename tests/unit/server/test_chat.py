"""`/v1/chat/completions`, against an engine that writes what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi import Call, call
from fake_service_engine import FakeEngine, FakeServer
from scripted_engine import MAX_MODEL_LEN, ScriptedEngine

from nbengine.errors import EngineDeadError, RefusedArgumentError, RequestError
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.deltas import ContentDelta, ReasoningDelta
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.outputs import PromptProgress
from nbengine.sampling_params import MAX_N, RequestOutputKind
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.chat_events import ChatChunks, ChatForm

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
READ = [PromptProgress("r", 200, 60, 20, 0.25), PromptProgress("r", 200, 120, 20, 1.0)]
SHOWN = [
    {"total": 200, "cache": 20, "processed": 60, "time_ms": 250},
    {"total": 200, "cache": 20, "processed": 120, "time_ms": 1000},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}


async def server(engine: FakeEngine | None = None, **settings: Any) -> FakeServer:
    return await FakeServer(engine, **settings).start()


async def test_an_answer_has_openais_form() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"model": "fake-model", "messages": HELLO})
    assert reply.status == 200
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake-model"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": len("user: hi\n"),
        "completion_tokens": 5,
        "total_tokens": len("user: hi\n") + 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_says_how_far_the_prompt_is_read_to_those_who_ask() -> None:
    fake = await server()
    fake.engine.progress = READ
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for more in ({}, {"return_progress": False}, {"return_progress": True, "stream": False}):
        reply = await call(fake.app, PATH, {"messages": HELLO, "stream": True, **more})
        assert b"prompt_progress" not in b"".join(reply.parts)
    for more in ({}, {"n": 2, "temperature": 0}, {"n": 2, "temperature": 1}, usage):
        body = {"messages": HELLO, "stream": True, "return_progress": True, **more}
        chunks = (await call(fake.app, PATH, body)).events()
        # Completions that are requests of their own read the same prompt.
        assert [chunk["prompt_progress"] for chunk in chunks[:2]] == SHOWN
        for chunk in chunks[:2]:
            assert chunk["object"] == "chat.completion.chunk"
            assert chunk["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
        assert not any("prompt_progress" in chunk for chunk in chunks[2:])
        first = [chunk["choices"][0] for chunk in chunks[2:-1] if chunk["choices"]]
        text = "".join(part["delta"].get("content", "") for part in first if part["index"] == 0)
        assert text == "Hello"


async def test_a_stream_says_the_same_in_chunks_and_ends_with_usage_if_asked() -> None:
    fake = await server()
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    reply = await call(fake.app, PATH, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = reply.events()
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


async def test_a_stream_without_stream_options_has_no_usage() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"messages": HELLO, "stream": True})
    assert all("usage" not in chunk for chunk in reply.events()[:-1])


async def test_usage_so_far_comes_with_each_chunk_if_asked() -> None:
    fake = await server()
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await call(fake.app, PATH, {"messages": HELLO, "stream": True, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.events()[:-1]]
    assert counts == [3, 3, 5, 5]


async def test_parameters_reach_the_engine() -> None:
    fake = await server()
    body = {
        "messages": HELLO,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_completion_tokens": 9,
        "stop": "END",
        "seed": -1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": -100},
        "n": 2,
        "priority": 3,
        "cache_salt": "s",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
        "chat_template_kwargs": {"enable_thinking": False},
    }
    reply = await call(fake.app, PATH, body)
    assert reply.status == 200
    [(prompt, params, _, options)] = fake.engine.asked
    assert prompt["cache_salt"] == "s"
    assert options["priority"] == 3
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.max_tokens, params.stop, params.seed, params.n) == (9, ["END"], 2**63 - 1, 2)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert params.logit_bias == {5: -100}
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"type": "object"}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert fake.engine.rendered[0][1]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    fake = await server()
    await call(fake.app, PATH, {"messages": HELLO, "max_tokens": None})
    assert fake.engine.asked[0][1].max_tokens is None


async def test_the_models_recommendations_stand_in_for_what_is_not_given() -> None:
    engine = FakeEngine()
    engine.recommended = {"temperature": 0.6, "top_k": 20, "max_tokens": 40}
    fake = await server(engine)
    await call(fake.app, PATH, {"messages": HELLO, "top_k": 5})
    params = engine.asked[0][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, None)


async def test_several_completions_at_temperature_0_are_as_many_requests() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"messages": HELLO, "temperature": 0, "n": 3})
    body = reply.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello"}
    assert body["usage"]["prompt_tokens"] == len("user: hi\n")
    assert len(fake.engine.asked) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_n_completions_have_their_indices(stream: bool) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"messages": HELLO, "n": 2, "stream": stream})
    if stream:
        texts = {0: "", 1: ""}
        for chunk in reply.events()[:-1]:
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in reply.json()["choices"]}
    assert texts == {0: "Hello", 1: "Hello"}


async def test_log_probabilities_have_the_token_and_the_likeliest() -> None:
    fake = await server(FakeEngine(["é"]))
    reply = await call(fake.app, PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 2})
    [entry] = reply.json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [top["token"] for top in entry["top_logprobs"]] == ["é", "<0>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_log_probabilities_come_once_with_each_choice(stream: bool) -> None:
    fake = await server()
    body = {"messages": HELLO, "prompt_logprobs": 1, "n": 2, "stream": stream}
    for change, wanted in (({}, [0, 1]), ({"temperature": 0}, [0, 1]), ({"prompt_logprobs": None}, [])):
        reply = await call(fake.app, PATH, {**body, **change})
        parts = reply.events()[:-1] if stream else [reply.json()]
        choices = [choice for part in parts for choice in part["choices"] if "prompt_logprobs" in choice]
        assert [choice["index"] for choice in choices] == wanted
        for choice in choices:
            first, second, *_ = choice["prompt_logprobs"]
            assert first is None
            assert second == {str(ord("s")): {"logprob": -0.5, "rank": 1, "decoded_token": "s"}}


async def test_logprobs_alone_name_no_others() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"messages": HELLO, "logprobs": True})
    assert all(entry["top_logprobs"] == [] for entry in reply.json()["choices"][0]["logprobs"]["content"])
    assert fake.engine.asked[0][1].logprobs == 0


async def test_a_developers_instructions_are_the_systems_where_the_template_knows_no_developer() -> None:
    fake = await server()
    await call(fake.app, PATH, {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]})
    assert fake.engine.rendered[0][0][0]["role"] == "system"
    fake.engine.tokenizer.chat_template += "{# developer #}"
    await call(fake.app, PATH, {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]})
    assert fake.engine.rendered[1][0][0]["role"] == "developer"


async def test_messages_come_back_as_clients_got_them() -> None:
    fake = await server()
    given = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None}
    reply = await call(fake.app, PATH, {"messages": [*HELLO, given, *HELLO]})
    assert reply.status == 200
    assert fake.engine.rendered[0][0][1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": MAX_N + 1, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
async def test_a_wrong_field_gets_openais_error_that_names_it(change: dict[str, Any], param: str) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"messages": HELLO, **change})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert param.split(".")[-1] in reply.error["message"]
    # One that asks for more completions than there are places has another code.
    assert reply.error["code"] != "too_many_completions"
    assert not fake.engine.asked


async def test_a_prompt_that_is_too_long_is_named_as_its_messages() -> None:
    fake = await server(ScriptedEngine())
    messages = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    error = (await call(fake.app, PATH, {"messages": messages})).error
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"].startswith("messages must be at most")


async def test_a_missing_field_is_named() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"model": "fake-model"})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert reply.error["code"] == "missing_required_parameter"


async def test_an_unknown_model_is_not_found() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"model": "gpt-4", "messages": HELLO})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_a_model_answers_under_all_its_names() -> None:
    fake = await server(served_model_names=("one", "two"))
    for name in ("one", "two"):
        reply = await call(fake.app, PATH, {"model": name, "messages": HELLO})
        assert reply.json()["model"] == name
    assert (await call(fake.app, PATH, {"model": "fake-model", "messages": HELLO})).status == 404


async def test_unknown_fields_are_named_in_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    fake = await server()
    for _ in range(3):
        reply = await call(fake.app, PATH, {"messages": HELLO, "zz_top": 1, "aa_new": 2})
        assert reply.status == 200
    [record] = [record for record in caplog.records if "zz_top" in record.getMessage()]
    assert "aa_new" in record.getMessage()


async def test_unknown_fields_of_objects_within_are_named_with_their_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = await server()
    schema = {"name": "x", "schema": {"type": "object", "own": 1}, "strct": True}
    body = {
        "messages": [{**HELLO[0], "free": 1}],
        "stream": True,
        "stream_options": {"include_usge": True, "include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    assert (await call(fake.app, PATH, body)).status == 200
    [line] = [record.getMessage() for record in caplog.records if "unknown fields" in record.getMessage()]
    assert line.endswith(": response_format.json_schema.strct, stream_options.include_usge")
    caplog.clear()
    wanted = {"format": {"type": "json_schema", "schema": {}}}
    messages = {"model": "fake-model", "max_tokens": 1, "messages": HELLO, "output_config": wanted}
    assert (await call(fake.app, "/v1/messages", messages)).status == 200
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"response_format": FORM}, "json", "response_format"),
        ({"response_format": FORM, "tools": [TOOL], "tool_choice": "required"}, "grammar", "tools"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ],
)
async def test_a_constraint_that_the_engine_refuses_is_named_as_the_field_that_asked_for_it(
    change: dict[str, Any], kind: str, param: str, stream: bool
) -> None:
    engine = FakeEngine()
    engine.reading = AnswerReading(AnswerFormat(None, "hermes"))
    name = f"structured_outputs.{kind}"
    engine.error = RefusedArgumentError(name, f"request a: {name} cannot be used: it is contradictory")
    reply = await call((await server(engine)).app, PATH, {"messages": HELLO, "stream": stream, **change})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "invalid_value")
    assert reply.error["message"] == f"request a: {param} cannot be used: it is contradictory"


async def test_a_request_that_the_engine_refuses_gets_a_status_also_as_a_stream() -> None:
    engine = FakeEngine()
    engine.error = RequestError("the grammar is bad")
    fake = await server(engine)
    reply = await call(fake.app, PATH, {"messages": HELLO, "stream": True})
    assert reply.status == 400
    assert reply.error["message"] == "the grammar is bad"


async def test_an_engines_death_ends_a_stream_with_an_error_event() -> None:
    engine = FakeEngine()
    engine.error, engine.error_at = EngineDeadError("killed", "secret log"), 1
    fake = await server(engine)
    reply = await call(fake.app, PATH, {"messages": HELLO, "stream": True})
    assert reply.status == 200
    *_, error, done = reply.events()
    assert done == "[DONE]"
    assert "killed" in error["error"]["message"]
    assert "secret log" not in error["error"]["message"]
    assert reply.complete


async def test_a_request_that_somebody_ends_is_no_answer() -> None:
    fake = await server(FakeEngine(finish_reason="abort"))
    reply = await call(fake.app, PATH, {"messages": HELLO})
    assert (reply.status, reply.error["code"]) == (503, "request_aborted")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_leaves_ends_the_request(stream: bool) -> None:
    engine = FakeEngine()
    reached, never = asyncio.Event(), asyncio.Event()

    async def stand(step: int) -> None:
        if step == (1 if stream else 0):
            reached.set()
            await never.wait()

    engine.before_step = stand
    fake = await server(engine)
    caller = Call()
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}' % str(stream).lower().encode()
    headers = {"host": "localhost", "content-type": "application/json"}
    running = asyncio.create_task(caller.run(fake.app, "POST", PATH, body, headers))
    await reached.wait()
    assert engine.running == 1
    caller.gone.set()
    await running
    assert engine.running == 0
    assert len(engine.aborted) == 1
    assert fake.service.limits.num_running == 0
    assert fake.service.num_active == 0


@pytest.mark.parametrize("usage", [False, True])
def test_chunks_of_content_say_the_same_whichever_way_they_are_encoded(usage: bool) -> None:
    mark = "\x00"
    form = ChatForm(f'id"{mark}', 1, f"a model {mark} %d", usage_chunk=usage)
    # Log probabilities that nobody has sent change nothing but the way of encoding.
    slow = ChatForm(form.id, form.created, form.model, top_logprobs=0, usage_chunk=usage)
    quick, other = (ChatChunks(each) for each in (form, slow))
    for index in (0, 1):
        for text in ("", "a", mark, "%b", '"\\\n', "é\u2028😀", "data: x\n\n"):
            part = AnswerPart(index, [ContentDelta(text)], [1])
            assert quick.add(part) == other.add(part)
    for deltas in ([ReasoningDelta("r")], [ContentDelta("a"), ContentDelta("b")], []):
        part = AnswerPart(0, list(deltas), [1])
        assert quick.add(part) == other.add(part)
    last = AnswerPart(0, [ContentDelta("end")], [1], finish_reason="stop")
    assert quick.add(last) == other.add(last)
