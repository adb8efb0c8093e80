"""OpenAI's responses and Anthropic's client, against a server for a real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic, AuthenticationError

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


def test_a_reader_who_leaves_ends_his_request(serve: Serve) -> None:
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
