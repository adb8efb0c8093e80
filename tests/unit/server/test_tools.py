"""Tools, calls and reasoning in `/v1/chat/completions`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import call
from fake_service_engine import FakeEngine, FakeServer, FakeTokenizer

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AnswerFormat

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
ANSWER = '<think>Where?</think>I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def engine_of(text: str, size: int = 3, tools: tuple[Any, ...] = (WEATHER, TIME)) -> FakeEngine:
    engine = FakeEngine([text[at : at + size] for at in range(0, len(text), size)])
    engine.reading = AnswerReading(AnswerFormat("qwen3", "hermes" if tools else None), tools)
    return engine


async def server(engine: FakeEngine) -> FakeServer:
    return await FakeServer(engine).start()


async def test_reasoning_content_and_calls_are_apart() -> None:
    fake = await server(engine_of(ANSWER))
    reply = await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER]})
    [choice] = reply.json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Where?"
    assert message["content"].strip() == "I look."
    [made] = message["tool_calls"]
    assert made["type"] == "function"
    assert made["function"]["name"] == "weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Bern"}
    assert choice["finish_reason"] == "tool_calls"
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Where?")


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_the_content(stream: bool) -> None:
    """OpenAI's objects have no place for the tokens of reasoning, markers and calls."""
    fake = await server(engine_of(ANSWER))
    body = {"messages": HELLO, "tools": [WEATHER], "logprobs": True, "stream": stream}
    for change in ({}, {"include_reasoning": False}):
        reply = await call(fake.app, PATH, {**body, **change})
        choices = [part["choices"][0] for part in (reply.events()[:-1] if stream else [reply.json()])]
        entries = [
            entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(entry["token"] for entry in entries) == "I look."
    asked = {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}], "top_logprobs": 1}
    reply = await call(fake.app, "/v1/responses", {**asked, "stream": stream})
    response = reply.events()[-1]["response"] if stream else reply.json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    [part] = response["output"][1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "I look."


async def test_the_tokens_of_streamed_reasoning_are_counted_as_they_come() -> None:
    engine = engine_of("")
    engine.pieces = ["<think>", "ab", "c\n", "de", "fg", "</think>", "\n\n", "I look."]
    encoded: list[str] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        encoded.append(text)
        return list(map(ord, text))

    engine.tokenizer.encode = encode  # type: ignore[method-assign, assignment]
    fake = await server(engine)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "tools": [WEATHER], "stream": True, "stream_options": options}
    reply = await call(fake.app, PATH, body)
    counts = [
        chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in reply.events()[:-1]
    ]
    assert list(dict.fromkeys(counts)) == [0, len("ab"), len("abc"), len("abc\nde"), len("abc\ndefg")]
    # The line break is held back until more reasoning follows it.
    assert encoded == ["c", "\nde"]


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_a_streamed_call_is_the_same_in_any_pieces(size: int) -> None:
    fake = await server(engine_of(ANSWER, size))
    reply = await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER], "stream": True})
    content = reasoning = arguments = ""
    names, ids, reasons = [], [], []
    num_parts = 0
    for chunk in reply.events()[:-1]:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            assert part["index"] == 0
            arguments += part["function"].get("arguments", "")
            num_parts += 1
            names += [part["function"]["name"]] if "name" in part["function"] else []
            ids += [part["id"]] if "id" in part else []
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (reasoning, content.strip(), names) == ("Where?", "I look.", ["weather"])
    assert json.loads(arguments) == {"city": "Bern"}
    assert len(ids) == 1
    assert reasons == ["tool_calls"]
    # The name, and then the arguments as they are written.
    assert num_parts > 2 or size == 1000


async def test_a_call_that_cannot_be_read_is_content() -> None:
    fake = await server(engine_of('<tool_call>\n{"name": oops</tool_call>'))
    reply = await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER]})
    [choice] = reply.json()["choices"]
    assert "oops" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    [unreadable] = choice["message"]["unreadable_tool_calls"]
    assert "oops" in unreadable["text"]
    assert unreadable["reason"]
    streamed = await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER], "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed.events()[:-1]]
    assert [each for delta in deltas for each in delta.get("unreadable_tool_calls", ())] == [unreadable]
    good = await call((await server(engine_of(ANSWER))).app, PATH, {"messages": HELLO, "tools": [WEATHER]})
    assert "unreadable_tool_calls" not in good.json()["choices"][0]["message"]


async def test_a_call_that_proves_unreadable_in_a_stream_is_named_by_its_index_and_may_come_back() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": Bern}}\n</tool_call>'
    good = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    fake = await server(engine_of(broken + good))
    body = {"messages": HELLO, "tools": [WEATHER]}
    reply = await call(fake.app, PATH, {**body, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in reply.events()[:-1]]
    [void] = [each for delta in deltas for each in delta.get("unreadable_tool_calls", ())]
    assert (void["text"], void["index"]) == (broken, 0)
    arguments = {0: "", 1: ""}
    for part in (each for delta in deltas for each in delta.get("tool_calls", ())):
        arguments[part["index"]] += part["function"].get("arguments", "")
    assert json.loads(arguments[1]) == {"city": "Bern"}
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for index, text in arguments.items()
    ]
    for content in (broken, None):
        sent = [*HELLO, {"role": "assistant", "content": content, "tool_calls": calls}]
        assert (await call(fake.app, PATH, {**body, "messages": sent})).status == 200
        message = fake.engine.rendered[-1][0][1]
        assert message["tool_calls"] == [calls[1]]
        assert message["content"] == (content or arguments[0])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_choice_that_asks_for_a_call_is_a_grammar(choice: Any) -> None:
    fake = await server(engine_of(ANSWER))
    reply = await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER, TIME], "tool_choice": choice})
    assert reply.status == 200
    structured = fake.engine.asked[0][1].structured_outputs
    assert structured is not None
    assert structured.grammar is not None
    assert "weather" in structured.grammar
    assert ("time" in structured.grammar) == (choice == "required")


async def test_the_grammar_of_a_call_names_added_tokens_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {777: SimpleNamespace(content="<tool_call>", special=False)}
    monkeypatch.setattr(FakeTokenizer, "get_added_tokens_decoder", lambda _self: added)
    fake = await server(engine_of(ANSWER))
    await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"})
    structured = fake.engine.asked[0][1].structured_outputs
    assert structured is not None
    assert "<[777]>" in structured.grammar


@pytest.mark.parametrize(("parser", "is_bound_whole"), [("hermes", False), ("gpt_oss", True)])
async def test_a_grammar_that_contains_the_reasoning_begins_with_it(
    parser: str, is_bound_whole: bool
) -> None:
    engine = engine_of(ANSWER)
    engine.reading = AnswerReading(AnswerFormat("gpt_oss" if is_bound_whole else "qwen3", parser), (WEATHER,))
    fake = await server(engine)
    await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"})
    prompt = fake.engine.asked[0][0]
    assert ("reasoning" in prompt) == is_bound_whole
    assert prompt.get("reasoning") is None


async def test_auto_is_free_unless_a_tool_is_strict() -> None:
    fake = await server(engine_of(ANSWER))
    await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER]})
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    await call(fake.app, PATH, {"messages": HELLO, "tools": [strict]})
    free, bound = (asked[1].structured_outputs for asked in fake.engine.asked)
    assert free is None
    assert bound is not None


@pytest.mark.parametrize(("parallel", "is_bound"), [(None, False), (True, False), (False, True)])
async def test_auto_is_bound_where_one_call_is_to_be_the_last(parallel: bool | None, is_bound: bool) -> None:
    fake = await server(engine_of(ANSWER))
    body = {"messages": HELLO, "tools": [WEATHER], "parallel_tool_calls": parallel}
    assert (await call(fake.app, PATH, body)).status == 200
    assert (fake.engine.asked[0][1].structured_outputs is not None) == is_bound


@pytest.mark.parametrize("is_strict", [False, True])
async def test_a_format_of_the_answer_leaves_calls_possible(is_strict: bool) -> None:
    fake = await server(engine_of(ANSWER))
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": is_strict}}
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for choice in ("auto", "required", "none"):
        body = {"messages": HELLO, "tools": [tool], "tool_choice": choice, "response_format": wanted}
        assert (await call(fake.app, PATH, body)).status == 200
    auto, required, none = (asked[1].structured_outputs for asked in fake.engine.asked)
    assert "weather" in auto.grammar
    assert "degrees" in auto.grammar
    assert "weather" in required.grammar
    assert "degrees" not in required.grammar
    assert none.json == schema


async def test_with_none_the_model_is_told_of_no_tools() -> None:
    fake = await server(engine_of("Hello", tools=()))
    await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"})
    assert fake.engine.rendered[0][1]["tools"] is None


async def test_allowed_tools_are_those_that_the_model_is_told_of() -> None:
    fake = await server(engine_of(ANSWER))
    names = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    await call(fake.app, PATH, {"messages": HELLO, "tools": [WEATHER, TIME], "tool_choice": choice})
    assert fake.engine.rendered[0][1]["tools"] == (WEATHER,)
    assert fake.engine.asked[0][1].structured_outputs is not None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ],
)
async def test_a_wrong_choice_is_refused(change: dict[str, Any], param: str) -> None:
    fake = await server(engine_of(ANSWER))
    reply = await call(fake.app, PATH, {"messages": HELLO, **change})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(("skip", "content"), [(None, "Hi"), (True, "Hi"), (False, "Hi<|x|>")])
async def test_special_tokens_that_are_no_marks_stay_where_they_are_wanted(
    skip: bool | None, content: str
) -> None:
    engine = FakeEngine(["<think>a</think>Hi<|x|>"])
    special = frozenset({"<think>", "</think>", "<|x|>"})
    engine.reading = AnswerReading(
        AnswerFormat("qwen3", None, keeps_special_tokens=True), special_tokens=special
    )
    fake = await server(engine)
    reply = await call(fake.app, PATH, {"messages": HELLO, "skip_special_tokens": skip})
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", content)
    assert fake.engine.asked[0][1].skip_special_tokens is False


async def test_reasoning_can_be_left_out() -> None:
    fake = await server(engine_of(ANSWER))
    for stream in (False, True):
        body = {"messages": HELLO, "tools": [WEATHER], "include_reasoning": False, "stream": stream}
        assert b"reasoning_content" not in (await call(fake.app, PATH, body)).body
