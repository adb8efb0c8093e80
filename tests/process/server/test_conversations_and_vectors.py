"""The routes beside OpenAI's oldest ones, over a real engine: what they answer is what the engine says in Python."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import numpy as np
import pytest

from nbengine import AsyncLLM, SamplingParams
from nbengine.server.app import make_app
from nbengine.server.service import EngineService
from nbengine.server.settings import ServerSettings

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: <think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}"
)
HI: Any = [{"role": "user", "content": "Hi"}]
TEXTS = ["a cat", "a dog and a cat", "rain"]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@asynccontextmanager
async def served(template: str = TEMPLATE) -> AsyncIterator[tuple[AsyncLLM, httpx2.AsyncClient]]:
    """A random model, and a client that reaches a server of its engine."""
    async with AsyncLLM("random-tiny", chat_template=template, num_gpu_blocks_override=256) as llm:
        service = EngineService(ServerSettings())
        await service.attach(llm)
        try:
            transport = httpx2.ASGITransport(make_app(service))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                yield llm, http
        finally:
            service.close()


async def said(llm: AsyncLLM, messages: Any, **options: Any) -> str:
    """The greedy answer of 12 tokens that the engine gives in Python."""
    prompt = llm.render_chat(messages, **options)
    outputs = [output async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))]
    return outputs[-1].outputs[0].text


async def test_conversations_get_the_answers_that_the_engine_gives_in_python() -> None:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    async with served() as (llm, http):
        ours = AsyncOpenAI(base_url="http://localhost/v1", api_key="key", max_retries=0, http_client=http)
        theirs = AsyncAnthropic(base_url="http://localhost", api_key="key", max_retries=0, http_client=http)
        whole = await said(llm, HI)
        fields: Any = {"model": "random-tiny", "extra_body": {"temperature": 0}}
        async with ours.responses.stream(**fields, input="Hi", max_output_tokens=12) as events:
            [*_, last] = [event async for event in events]
        assert last.response.output_text == whole  # type: ignore[union-attr]
        response = await ours.responses.create(**fields, input="Hi", max_output_tokens=12)
        assert (response.status, response.output_text) == ("incomplete", whole)

        more = [*HI, {"role": "assistant", "content": whole}, {"role": "user", "content": "And?"}]
        followed = await ours.responses.create(
            **fields, input="And?", max_output_tokens=12, previous_response_id=response.id
        )
        assert followed.output_text == await said(llm, more)

        async with theirs.messages.stream(**fields, messages=HI, max_tokens=12) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole
        begun = [*HI, {"role": "assistant", "content": "We"}]
        message = await theirs.messages.create(**fields, messages=begun, max_tokens=12)
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        assert message.content[0].text == await said(llm, begun, **going_on)  # type: ignore[union-attr]
        assert message.stop_reason == "max_tokens"

        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        bound = await theirs.messages.create(**fields, messages=HI, max_tokens=64, output_config=config)
        # A random model likes white space, so that it gets no further than this.
        assert re.match(r'\{\s*"ok"\s*:', bound.content[0].text)  # type: ignore[union-attr]
        assert not whole.startswith("{")


async def test_a_model_thinks_when_anthropics_client_asks_for_it_and_within_its_budget() -> None:
    from anthropic import AsyncAnthropic

    async with served(THINKING_TEMPLATE) as (_, http):
        client = AsyncAnthropic(base_url="http://localhost", api_key="key", max_retries=0, http_client=http)
        fields: Any = {"model": "random-tiny", "messages": HI, "max_tokens": 30}
        fields["extra_body"] = {"temperature": 0}
        plain = await client.messages.create(**fields)
        thinking = await client.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 6})
    assert [block.type for block in plain.content] == ["text"]
    assert [block.type for block in thinking.content] == ["thinking", "text"]
    # A token of this model is a byte.
    assert len(thinking.content[0].thinking) <= 6  # type: ignore[union-attr]


async def test_vectors_and_scores_are_those_of_the_engine() -> None:
    import openai
    from openai import AsyncOpenAI

    async with served() as (llm, http):
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="key", max_retries=0, http_client=http)
        answer = await client.embeddings.create(model="random-tiny", input=TEXTS)
        expected = [(await llm.embed(text)).outputs.embedding for text in TEXTS]
        for entry, vector in zip(answer.data, expected, strict=True):
            # Products of other numbers of rows may add up in another order.
            np.testing.assert_allclose(entry.embedding, vector, rtol=0, atol=1e-6)
        cosines = [float(np.dot(expected[0], vector)) for vector in expected]
        fields: dict[str, Any] = {"text_1": TEXTS[0], "text_2": TEXTS}
        scores = (await http.post("/score", json=fields)).json()["data"]
        assert [entry["score"] for entry in scores] == pytest.approx(cosines, abs=1e-5)
        ranked = (await http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS})).json()["results"]
        assert [result["index"] for result in ranked] == sorted(range(3), key=lambda index: -cosines[index])

        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model="random-tiny", input="a", dimensions=10**6)
        refused = await http.post("/classify", json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
