"""`/v1/completions`, against an engine that writes what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from asgi import call
from fake_service_engine import FakeEngine, FakeServer

from nbengine.errors import InvalidArgumentError
from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.sampling_params import MAX_N

PATH = "/v1/completions"


async def server(engine: FakeEngine | None = None, **settings: Any) -> FakeServer:
    return await FakeServer(engine, **settings).start()


async def test_an_answer_has_openais_form() -> None:
    fake = await server()
    body = (await call(fake.app, PATH, {"prompt": "ab"})).json()
    assert body["object"] == "text_completion"
    [choice] = body["choices"]
    assert (choice["text"], choice["index"], choice["logprobs"]) == ("Hello", 0, None)
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 2
    assert fake.engine.asked[0][1].max_tokens == 16


async def test_a_stream_says_how_far_each_prompt_is_read_to_those_who_ask() -> None:
    fake = await server()
    fake.engine.progress = [PromptProgress("r", 200, 60, 20, 0.25)]
    body = {"prompt": ["a", "b"], "stream": True, "n": 2, "temperature": 0}
    reply = await call(fake.app, PATH, body)
    assert b"prompt_progress" not in b"".join(reply.parts)
    *chunks, done = (await call(fake.app, PATH, {**body, "return_progress": True})).events()
    told = [chunk for chunk in chunks if "prompt_progress" in chunk]
    shown = {"total": 200, "cache": 20, "processed": 60, "time_ms": 250}
    assert [chunk["prompt_progress"] for chunk in told] == [shown, shown]
    # Each prompt is told of at its first completion.
    assert sorted(chunk["choices"][0]["index"] for chunk in told) == [0, 2]
    assert {chunk["choices"][0]["text"] for chunk in told} == {""}
    assert done == "[DONE]"


async def test_half_a_surrogate_pair_is_named_with_its_place() -> None:
    r"""JSON can write it, as "\ud83d"; a text that was cut inside an emoji has it."""
    fake = await server()
    error = (await call(fake.app, PATH, b'{"prompt": ["ab", "c\\ud83d"]}')).error
    assert error["param"] == "prompt[1]"
    assert "prompt[1]" in error["message"]
    assert "'\\ud83d' at position 1 is half of a surrogate pair" in error["message"]
    whole = (await call(fake.app, PATH, b'{"prompt": "\\ud83d\\ude00"}')).json()
    assert whole["usage"]["prompt_tokens"] == 1
    broken = (await call(fake.app, PATH, b'{"prompt": "\\ud83d"')).error
    assert broken["code"] == "invalid_json"


async def test_the_tokens_around_a_text_can_be_left_out() -> None:
    fake = await server()
    asked: list[bool] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        asked.append(add_special_tokens)
        return list(map(ord, text))

    fake.engine.tokenizer.encode = encode  # type: ignore[method-assign, assignment]
    body = {"prompt": ["ab", "c"], "add_special_tokens": False, "echo": True}
    choices = (await call(fake.app, PATH, body)).json()["choices"]
    await call(fake.app, PATH, {"prompt": [7], "add_special_tokens": False})
    await call(fake.app, PATH, {"prompt": "ab", "add_special_tokens": True})
    assert [prompt for prompt, *_ in fake.engine.asked] == [
        {"prompt": "ab", "prompt_token_ids": [97, 98]},
        {"prompt": "c", "prompt_token_ids": [99]},
        {"prompt_token_ids": [7]},
        {"prompt": "ab"},
    ]
    assert asked == [False, False]
    assert [choice["text"] for choice in choices] == ["abHello", "cHello"]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [{"prompt": "ab"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
async def test_each_form_of_a_prompt_is_sent(prompt: Any, sent: list[Any]) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"prompt": prompt})
    assert [asked[0] for asked in fake.engine.asked] == sent
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(len(sent)))


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], {"a": 1}, None, 7, [True]])
async def test_other_prompts_are_refused(prompt: Any) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"prompt": prompt})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert not fake.engine.asked


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    fake = await server()
    body = (await call(fake.app, PATH, {"prompt": ["a", "b"], "n": 2})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 20


async def test_a_stream_of_several_prompts_has_all_texts() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"prompt": ["a", "b", "c"], "stream": True})
    texts = {0: "", 1: "", 2: ""}
    *chunks, done = reply.events()
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt_also_where_it_was_tokens(stream: bool) -> None:
    fake = await server()
    for prompt in ("ab", [97, 98]):
        reply = await call(fake.app, PATH, {"prompt": prompt, "echo": True, "stream": stream})
        parts = reply.events()[:-1] if stream else [reply.json()]
        assert "".join(part["choices"][0]["text"] for part in parts) == "abHello"


async def test_the_prompts_log_probabilities_come_with_its_echo() -> None:
    fake = await server()
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await call(fake.app, PATH, body)).json()
    [choice] = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


async def test_a_choice_that_begins_before_the_first_has_the_prompts_log_probabilities_too() -> None:
    """The engine works them out for the first completion alone, and may begin another before it."""
    fake = await server()
    make = fake.engine._outputs

    def one_by_one(*asked: Any) -> Iterator[RequestOutput]:
        for output in make(*asked):
            for completion in reversed(output.outputs):
                prompt_logprobs = None if completion.index else output.prompt_logprobs
                finished = output.finished and not completion.index
                part = {"outputs": [completion], "prompt_logprobs": prompt_logprobs, "finished": finished}
                yield msgspec.structs.replace(output, **part)

    fake.engine._outputs = one_by_one  # type: ignore[method-assign]
    reply = await call(
        fake.app, PATH, {"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "n": 2, "stream": True}
    )
    texts, tokens = [""] * 4, [""] * 4
    for chunk in reply.events()[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += "".join(choice["logprobs"]["tokens"])
    assert texts == tokens == ["abHello", "abHello", "cHello", "cHello"]


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_shows_the_token_behind_a_prompt_that_is_wanted_alone(stream: bool) -> None:
    fake = await server(FakeEngine(["H"]))
    fake.engine.stop_reason = ord("H")
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "max_tokens": 0, "return_token_ids": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    reply = await call(fake.app, PATH, body)
    first, *others = reply.events()[:-1] if stream else [reply.json()]
    [choice] = first["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == ("ab", [], None)
    assert choice["finish_reason"] == "length"
    assert [part["usage"]["completion_tokens"] for part in (first, *others)] == [0] * (1 + stream)
    kept = (
        await call(fake.app, PATH, {**body, "max_tokens": 1, "stream": False, "stream_options": None})
    ).json()
    [choice] = kept["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == ("abH", [ord("H")], ord("H"))


@pytest.mark.parametrize("stream", [False, True])
async def test_places_in_the_text_go_on_from_chunk_to_chunk(stream: bool) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"prompt": "ab", "logprobs": 2, "stream": stream})
    parts = reply.events()[:-1] if stream else [reply.json()]
    logprobs = [part["choices"][0]["logprobs"] for part in parts]
    assert [place for part in logprobs for place in part["text_offset"]] == [0, 1, 2, 3, 4]
    assert [token for part in logprobs for token in part["tokens"]] == list("Hello")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": MAX_N + 1, "temperature": 0}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, {"prompt": "a", **change})
    assert (reply.status, reply.error["param"]) == (400, param)
    # One that asks for more completions than there are places has another code.
    assert reply.error["code"] != "too_many_completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_are_wrong_are_named_as_the_prompt(stream: bool) -> None:
    engine = FakeEngine()
    engine.error = InvalidArgumentError("prompt_token_ids", 1 << 30, "tokens of the model")
    fake = await server(engine)
    reply = await call(fake.app, PATH, {"prompt": [1 << 30], "stream": stream})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert reply.error["message"].startswith("prompt must be tokens of the model")


async def test_an_error_of_one_prompt_ends_the_others() -> None:
    engine = FakeEngine()
    engine.error, engine.error_at = ValueError("unforeseen"), 0
    fake = await server(engine)
    reply = await call(fake.app, PATH, {"prompt": ["a", "b"], "stream": True})
    assert reply.status == 500
    assert "unforeseen" not in reply.error["message"]
    assert engine.running == 0


async def test_more_completions_than_there_are_places_are_refused() -> None:
    fake = await server(max_concurrent_requests=3)
    reply = await call(fake.app, PATH, {"prompt": ["a", "b"], "n": 2})
    assert (reply.status, reply.error["code"]) == (400, "too_many_completions")
