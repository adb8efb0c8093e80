"""OpenAI's responses, Anthropic's client and LangChain's chat model, against a server for a real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
HI: Any = [{"role": "user", "content": "a"}]


def test_responses_are_streamed_and_go_on_from_each_other(served: Any) -> None:
    client = served.client()
    fields: Any = {"model": "random-tiny", "max_output_tokens": 5}
    with client.responses.stream(**fields, input="a") as stream:
        [*_, last] = list(stream)
    assert last.response.output_text == "bcdef"
    more = client.responses.create(**fields, input="", previous_response_id=last.response.id)
    assert more.output_text == "ghijk"
    assert more.usage is not None
    assert (more.usage.input_tokens, more.usage.output_tokens) == (6, 5)


def test_anthropics_client_streams_with_its_own_key(with_a_key: Any) -> None:
    from anthropic import Anthropic, AuthenticationError

    url = with_a_key.record.url
    with pytest.raises(AuthenticationError):
        Anthropic(base_url=url, api_key="wrong-key-here", max_retries=0).messages.create(
            model="random-tiny", max_tokens=5, messages=HI
        )
    client = Anthropic(base_url=url, api_key="a-secret-key", max_retries=0)
    with client.messages.stream(
        model="random-tiny", max_tokens=20, messages=HI, stop_sequences=["f"]
    ) as stream:
        assert "".join(stream.text_stream) == "bcde"
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "f")
    assert client.messages.count_tokens(model="random-tiny", messages=HI).input_tokens == 1


def weather(place: str) -> str:
    """Say what the weather is like."""
    return f"fine in {place}"


async def test_langchains_chat_model_asks_whole_and_in_streams_and_tells_of_tools(served: Any) -> None:
    # It takes more than a second to import: only this test pays for it.
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(
        model="random-tiny",
        base_url=served.url,
        api_key=SecretStr("none"),
        max_retries=0,
        max_completion_tokens=5,
        temperature=0,
    )
    answer = chat.invoke([HumanMessage("a")])
    assert (answer.text, answer.response_metadata["finish_reason"]) == ("bcdef", "length")
    assert answer.usage_metadata is not None
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (1, 5)
    chunks = list(chat.stream("a"))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == "bcdef"
    assert [answer.text for answer in await chat.abatch(["a", "k"])] == ["bcdef", "lmnop"]
    assert "".join([chunk.text async for chunk in chat.astream("k", stop=["o"])]) == "lmn"
    call = {"name": "weather", "args": {"place": "Rome"}, "id": "call_1", "type": "tool_call"}
    turn = [HumanMessage("a"), AIMessage("", tool_calls=[call]), ToolMessage("k", tool_call_id="call_1")]
    # The template of this engine puts the contents of the messages together, and says nothing of tools.
    assert chat.bind_tools([weather]).invoke(turn).text == "lmnop"
    chat.root_client.close()
    await chat.root_async_client.close()


def test_a_reader_who_leaves_ends_his_request(serve: Serve) -> None:
    from anthropic import Anthropic

    served = serve(knobs={"step_seconds": 0.02})
    client = served.client()
    with client.responses.stream(model="random-tiny", input="a", max_output_tokens=150) as stream:
        next(iter(stream))
    with Anthropic(base_url=served.record.url, api_key="none").messages.stream(
        model="random-tiny", max_tokens=150, messages=HI
    ) as messages:
        next(iter(messages))
    served.idle()
    # Whole answers would take 300 steps.
    assert sum(engine.step_counter for engine in served.llm.stats_blocking().engines) < 200
