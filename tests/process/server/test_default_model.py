"""People's clients against a server for the default model: each one's ordinary calls, and the answers of the engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from nbengine import AsyncLLM, RequestOutput, SamplingParams
from nbengine.server.launch import start_server, stop_server
from nbengine.server.settings import ServerSettings

if TYPE_CHECKING:
    import openai

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
LITELLM = Path(__file__).parents[1] / "process_support" / "litellm_calls.py"
MAX_TOKENS = 12

pytestmark = pytest.mark.timeout(600)


class Weather(BaseModel):
    """The arguments of a tool, and the form of an answer."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["Rome", "Paris"]


def weather(place: str) -> str:
    """Say what the weather is like."""
    return f"fine in {place}"


@dataclass(frozen=True)
class Served:
    """An engine with the default model, and its server."""

    llm: AsyncLLM
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def asked(self, prompt: Any) -> RequestOutput:
        """The greedy answer of the engine in Python."""

        async def ask() -> RequestOutput:
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
            return [output async for output in self.llm.generate(prompt, params)][-1]

        return asyncio.run(ask())

    def said(self, prompt: Any) -> str:
        """The text of that answer."""
        return self.asked(prompt).outputs[0].text

    def vector(self, text: str) -> list[float]:
        """The engine's vector of a text."""

        async def embed() -> list[float]:
            return list((await self.llm.embed(text)).outputs.embedding)

        return asyncio.run(embed())


@pytest.fixture(scope="module")
def served(no_leftovers_of_module: None) -> Iterator[Served]:
    """One engine and one server for all clients. The template of the model does not say how it calls tools."""
    llm = AsyncLLM(MODEL, max_model_len=1024, num_gpu_blocks_override=512, lease=60.0)
    try:
        record = start_server(llm.connection, ServerSettings(port=0, tool_parser="hermes"), timeout=300)
        try:
            found = Served(llm, record.url)
            with found.client() as client:
                # The first one with a grammar starts the process that compiles them all.
                client.completions.create(
                    model=MODEL, prompt="a", max_tokens=1, extra_body={"structured_outputs": {"regex": "b"}}
                )
            yield found
        finally:
            stop_server(record, drain_timeout=0)
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def answer(served: Served) -> str:
    """The engine's own answer to `QUESTION`."""
    text = served.said(served.llm.render_chat(QUESTION))
    assert text
    return text


def strict_tool(**more: Any) -> dict[str, Any]:
    return {"name": "weather", "parameters": Weather.model_json_schema(), "strict": True, **more}


def test_openais_client_asks_whole_and_in_streams(served: Served, answer: str) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(messages=QUESTION, **options)
        assert whole.choices[0].message.content == answer
        chunks = client.chat.completions.create(messages=QUESTION, stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
        text = client.completions.create(prompt="The capital of France is", **options).choices[0].text
        assert text == served.said("The capital of France is")
        vectors = client.embeddings.create(model=MODEL, input=["a cat", "rain"])
        for entry, words in zip(vectors.data, ["a cat", "rain"], strict=True):
            # Products of other numbers of rows may add up in another order.
            np.testing.assert_allclose(entry.embedding, served.vector(words), rtol=0, atol=1e-5)


def test_openais_client_parses_and_loops_through_tools(served: Served) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 48}
    tools: Any = [{"type": "function", "function": strict_tool()}]
    with served.client() as client:
        parsed = client.chat.completions.parse(messages=QUESTION, response_format=Weather, **options)
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        asked = client.chat.completions.create(
            messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, **options
        )
        assert asked.choices[0].finish_reason == "tool_calls"
        [call] = asked.choices[0].message.tool_calls or []
        assert call.type == "function"
        result = weather(**json.loads(call.function.arguments))
        made: Any = asked.choices[0].message.model_dump(exclude_none=True)
        turn = [*QUESTION, made, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answered = client.chat.completions.create(messages=turn, tools=tools, **options)
        assert answered.choices[0].message.content
        assert answered.choices[0].finish_reason in ("stop", "length")


def test_openais_client_has_responses(served: Served, answer: str) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    with served.client() as client:
        whole = client.responses.create(input=QUESTION, **options)
        assert whole.output_text == answer
        with client.responses.stream(input=QUESTION, **options) as events:
            [*_, last] = events
        assert last.response.output_text == answer  # type: ignore[union-attr]
        bound = client.responses.parse(
            input=QUESTION, text_format=Weather, **{**options, "max_output_tokens": 48}
        )
        assert isinstance(bound.output_parsed, Weather)
        more = client.responses.create(input="And of Italy?", previous_response_id=whole.id, **options)
        turn = [
            *QUESTION,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And of Italy?"},
        ]
        assert more.output_text == served.said(served.llm.render_chat(turn))


async def test_openais_async_client_asks_several_at_once(served: Served, answer: str) -> None:
    import openai

    options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        found = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(4)))
        assert [one.choices[0].message.content for one in found] == [answer] * 4
        stream = await client.chat.completions.create(stream=True, **options)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer


def test_anthropics_client_asks_streams_and_calls_tools(served: Served, answer: str) -> None:
    from anthropic import Anthropic

    options: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    schema = Weather.model_json_schema()
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(messages=QUESTION, **options)
        assert message.content[0].text == answer  # type: ignore[union-attr]
        with client.messages.stream(messages=QUESTION, **options) as stream:
            assert "".join(stream.text_stream) == answer
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
        cached = message.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == message.usage.input_tokens + cached
        called = client.messages.create(
            messages=QUESTION,
            tools=[{"name": "weather", "input_schema": schema, "strict": True}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            **{**options, "max_tokens": 48},
        )
    [use] = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use"
    assert weather(**use.input)  # type: ignore[arg-type]


async def test_langchains_chat_model_asks_streams_binds_and_calls_tools(served: Served, answer: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    def chat(max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(
            model=MODEL,
            base_url=f"{served.url}/v1",
            api_key=SecretStr("none"),
            max_retries=0,
            max_completion_tokens=max_tokens,
            temperature=0,
        )

    short, long = chat(MAX_TOKENS), chat(48)
    words = QUESTION[0]["content"]
    assert short.invoke(words).text == answer
    assert "".join(chunk.text for chunk in short.stream(words)) == answer
    assert (await short.ainvoke(words)).text == answer
    assert isinstance(long.with_structured_output(Weather).invoke(words), Weather)
    called = long.bind_tools([weather], tool_choice="weather", strict=True, parallel_tool_calls=False)
    [call] = called.invoke(words).tool_calls  # type: ignore[attr-defined]
    assert call["name"] == "weather"
    assert weather(**call["args"])
    for one in (short, long):
        one.root_client.close()
        await one.root_async_client.close()


@pytest.fixture(scope="module")
def litellms(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers to LiteLLM's calls, which a process of its own makes."""
    own = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))}
    done = subprocess.run(
        [sys.executable, str(LITELLM), served.url, MODEL],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env=own,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_litellm_asks_whole_in_streams_and_at_once(
    served: Served, answer: str, litellms: dict[str, Any]
) -> None:
    found = litellms
    for kind in ("completion", "stream", "astream", "responses", "messages"):
        assert found[kind] == answer, kind
    assert found["acompletion"] == [answer] * 3
    output = served.asked(served.llm.render_chat(QUESTION))
    assert found["finish_reason"] == output.outputs[0].finish_reason
    usage = [len(output.prompt_token_ids or ()), len(output.outputs[0].token_ids)]
    assert found["usage"] == found["stream_usage"] == usage
    assert found["text_completion"] == served.said("The capital of France is")


def test_litellm_calls_tools_and_has_structured_answers(litellms: dict[str, Any]) -> None:
    found = litellms
    for call in (found["call"], found["streamed_call"]):
        name, arguments = call
        assert name == "weather"
        Weather.model_validate(arguments)
    assert found["call"] == found["streamed_call"]
    assert found["call_reason"] == "tool_calls"
    assert found["after_call"]
    assert found["structured"]["is_capital"] in (True, False)


def test_litellm_gets_vectors_and_its_own_exception(served: Served, litellms: dict[str, Any]) -> None:
    cat, rain = (served.vector(text) for text in ("a cat", "rain"))
    found = [*litellms["embedding"], litellms["aembedding"]]
    for vector, expected in zip(found, (cat, rain, rain), strict=True):
        np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)
    assert "temperature" in litellms["refused"]
