"""The real client of OpenAI's API, against a server for a real engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_support.engine_under_test import wait_for

from nbengine.errors import EngineStartError
from nbengine.server.launch import start_server, stop_server
from nbengine.server.records import servers_of
from nbengine.server.settings import ServerSettings

Serve = Callable[..., Any]
HELLO: Any = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def long_prompts(start_shared_server: Serve) -> Any:
    """An engine that reads 32 tokens a step, and its server."""
    return start_shared_server(max_num_batched_tokens=32, max_num_seqs=4)


def letters(first: str, count: int) -> str:
    """The text that the fake executor writes behind a prompt that ends with `first`."""
    return "".join(chr(ord(first) + number) for number in range(1, count + 1))


def test_ordinary_calls_are_answered(served: Any) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["random-tiny"]
    assert client.models.retrieve("random-tiny").id == "random-tiny"
    chat = client.chat.completions.create(model="random-tiny", messages=HELLO, max_tokens=5)
    assert chat.choices[0].message.content == letters("a", 5)
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 5
    text = client.completions.create(model="random-tiny", prompt=["a", "k"], max_tokens=3, echo=True)
    assert [choice.text for choice in text.choices] == ["abcd", "klmn"]
    stopped = client.completions.create(model="random-tiny", prompt="a", max_tokens=20, stop="e")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("bcd", "stop")


def test_a_stream_has_the_whole_answer_and_its_usage(served: Any) -> None:
    client = served.client()
    stream = client.chat.completions.create(
        model="random-tiny",
        messages=HELLO,
        max_tokens=20,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: letters("a", 20), 1: letters("a", 20)}
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 40


def test_tokens_of_a_stream_are_sent_together(told_together: Any) -> None:
    stream = told_together.client().completions.create(
        model="random-tiny", prompt="a", max_tokens=20, stream=True
    )
    texts = [chunk.choices[0].text for chunk in stream if chunk.choices[0].text]
    assert "".join(texts) == letters("a", 20)
    # The first token comes at once (`tests/unit/scheduler/test_held_outputs.py`), where the server does not read it with
    # the others; and the minute may end in between, once.
    assert len(texts) <= 3


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_says_how_far_a_long_prompt_is_read(is_chat: bool, long_prompts: Any) -> None:
    client = long_prompts.client()
    # Each prompt begins differently, so that none finds blocks of another's.
    text = ("c" if is_chat else "t") * 200 + "a"

    def chunks(**extra: Any) -> list[Any]:
        options = {"model": "random-tiny", "max_tokens": 3, "stream": True, "extra_body": extra}
        if is_chat:
            return list(
                client.chat.completions.create(messages=[{"role": "user", "content": text}], **options)
            )
        return list(client.completions.create(prompt=text, **options))

    def told(found: list[Any]) -> list[dict[str, int]]:
        return [chunk.prompt_progress for chunk in found if "prompt_progress" in (chunk.model_extra or {})]

    found = chunks(return_progress=True)
    progress = told(found)
    # 201 tokens are read in steps of 32; no step is told of twice, and the last one brings the first token.
    assert [step["processed"] for step in progress] == sorted({step["processed"] for step in progress})
    assert {step["processed"] for step in progress} <= set(range(32, 201, 32))
    assert progress
    assert all((step["total"], step["cache"]) == (201, 0) for step in progress)
    times = [step["time_ms"] for step in progress]
    assert times == sorted(times)
    assert "prompt_progress" in found[0].model_extra
    answer = [chunk.choices[0].delta.content if is_chat else chunk.choices[0].text for chunk in found]
    assert "".join(part or "" for part in answer) == letters("a", 3)
    assert told(chunks()) == []
    # The second time 192 tokens are there, and one step reads the others.
    assert told(chunks(return_progress=True)) == []


async def test_the_async_client_streams(served: Any) -> None:
    async with served.async_client() as client:
        stream = await client.completions.create(model="random-tiny", prompt="a", max_tokens=9, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == letters("a", 9)


def test_refusals_are_the_clients_own_exceptions(with_a_key: Any) -> None:
    import openai

    served = with_a_key
    with pytest.raises(openai.AuthenticationError):
        served.client(api_key="wrong-key-here").models.list()
    client = served.client(api_key="a-secret-key")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="random-tiny", prompt="x" * 10_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="random-tiny", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"


def test_texts_and_tokens_are_each_others(served: Any) -> None:
    post = served.http().post
    made = post("/tokenize", json={"prompt": "häuser", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len("häuser".encode())
    assert post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "häuser"}
    assert post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert post("/tokenize", json={"messages": HELLO}).json()["count"] == 1
    assert post("/tokenize", json={}).status_code == 400


def test_requests_go_to_all_ranks(serve: Serve) -> None:
    import openai

    served = serve(data_parallel_size=2)
    client = served.client()
    for rank in (0, 1):
        extra = {"data_parallel_rank": rank}
        text = client.completions.create(model="random-tiny", prompt="a", max_tokens=3, extra_body=extra)
        assert text.choices[0].text == "bcd"
    steps = [engine.step_counter for engine in served.llm.stats_blocking().engines]
    assert all(steps)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="random-tiny", prompt="a", extra_body={"data_parallel_rank": 2})


@pytest.mark.parametrize(
    ("hold", "code", "go_on"),
    [
        (("sleep", 1, None, False), "engine_asleep", ("wake_up", None)),
        (("pause_generation", "keep", False), "engine_paused", ("resume_generation",)),
    ],
)
def test_an_engine_that_sleeps_or_is_paused_is_not_ready(
    served: Any, hold: tuple[Any, ...], code: str, go_on: tuple[Any, ...]
) -> None:
    client = served.http()
    served.llm.call_utility_blocking(*hold)
    wait_for(lambda: client.get("/ready").status_code == 503, "the server to refuse requests")
    refused = client.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
    assert "retry-after" in refused.headers
    served.llm.call_utility_blocking(*go_on)
    wait_for(lambda: client.get("/ready").status_code == 200, "the server to take requests")
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_server_is_found_and_ends_with_its_engine(serve: Serve) -> None:
    served = serve()
    [record] = servers_of(served.llm.connection)
    assert record == served.record
    assert served.process.cmdline()[0] == f"nbengine: server {served.llm.name}"
    assert not any(served.process.cmdline()[1:])
    served.llm.shutdown()
    wait_for(served.has_ended, "the server to end with its engine")


def test_an_ending_server_finishes_what_it_is_answering(serve: Serve, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    served = serve(knobs={"step_seconds": 0.01, "hold": str(hold)})
    stream = served.client().completions.create(
        model="random-tiny", prompt="a", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    parts = iter(stream)
    text = next(parts).choices[0].text
    # The answer does not end before the server has refused another request.
    hold.touch()
    os.kill(served.record.pid, signal.SIGTERM)
    http = served.http()
    wait_for(lambda: http.get("/ready").status_code == 503, "the server to refuse requests")
    refused = http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
    hold.unlink()
    tokens = 1
    for part in parts:
        text += part.choices[0].text
        reason = part.choices[0].finish_reason
        tokens += 1
    assert reason == "length"
    assert text.startswith("bcdefg")
    wait_for(served.has_ended, "the server to end with its engine")
    assert served.llm.death is None


def test_an_engines_death_ends_streams_with_an_error_and_the_server(serve: Serve) -> None:
    import openai

    served = serve(knobs={"step_seconds": 0.01})
    stream = served.client().completions.create(
        model="random-tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    parts = iter(stream)
    next(parts)
    os.kill(served.llm.connection.host_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine has ended"):
        list(parts)
    wait_for(served.has_ended, "the server to end with its engine")


def test_a_server_that_cannot_listen_says_why(served: Any) -> None:
    port = int(served.record.url.rpartition(":")[2])
    with pytest.raises(EngineStartError, match="another program listens"):
        start_server(served.llm.connection, ServerSettings(port=port))
    second = start_server(served.llm.connection, ServerSettings(port=0))
    assert len(servers_of(served.llm.connection)) == 2
    stop_server(second)
    assert servers_of(served.llm.connection) == [served.record]
