"""LiteLLM's ordinary calls against a server, in a process of their own: `python litellm_calls.py URL MODEL`.

Its import takes seconds, and its threads stay until the interpreter ends. What each call gave is printed as one JSON
object; an exception ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

# Its documented switch: the prices of models are read from the package, and not from the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say what the weather is like.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
MAX_TOKENS = 12


class Town(BaseModel):
    """A structured answer."""

    is_capital: bool


def joined(chunks: list[Any]) -> str:
    """The text of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def texts(options: dict[str, Any]) -> dict[str, Any]:
    """Ask for texts; return what came."""
    whole = litellm.completion(messages=QUESTION, **options)
    chunks = list(
        litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **options)
    )
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt is not None
    text = litellm.text_completion(prompt="The capital of France is", **options)
    return {
        "completion": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": joined(chunks),
        "stream_usage": [rebuilt.usage.prompt_tokens, rebuilt.usage.completion_tokens],
        "text_completion": text.choices[0].text,
    }


def tools(options: dict[str, Any]) -> dict[str, Any]:
    """Ask for calls of tools and for a structured answer; return what came."""
    long = {**options, "max_tokens": 64}
    demand: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    asked = litellm.completion(messages=QUESTION, **demand, **long)
    message = asked.choices[0].message
    [made] = message.tool_calls
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **demand, **long))
    streamed = litellm.stream_chunk_builder(chunks)
    assert streamed is not None
    [again] = streamed.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": made.id, "content": "fine"}
    answer = litellm.completion(messages=[*QUESTION, message, result], tools=[TOOL], **options)
    bound = litellm.completion(messages=QUESTION, response_format=Town, **long)
    return {
        "call": [made.function.name, json.loads(made.function.arguments)],
        "call_reason": asked.choices[0].finish_reason,
        "streamed_call": [again.function.name, json.loads(again.function.arguments)],
        "after_call": answer.choices[0].message.content,
        "structured": Town.model_validate_json(bound.choices[0].message.content).model_dump(),
    }


def others(options: dict[str, Any], address: dict[str, Any], model: str, url: str) -> dict[str, Any]:
    """Ask for vectors, at the other routes, and wrongly; return what came."""
    vectors = litellm.embedding(
        model=f"openai/{model}", input=["a cat", "rain"], encoding_format="float", **address
    )
    response = litellm.responses(
        model=f"openai/{model}",
        input=QUESTION,
        max_output_tokens=MAX_TOKENS,
        temperature=0,
        **address,
    )
    message = litellm.completion(
        model=f"anthropic/{model}",
        messages=QUESTION,
        max_tokens=MAX_TOKENS,
        temperature=0,
        api_key="none",
        api_base=url,
    )
    refused = ""
    try:
        litellm.completion(messages=QUESTION, **{**options, "temperature": -1})
    except litellm.BadRequestError as error:
        refused = str(error)
    return {
        "embedding": [entry["embedding"] for entry in vectors.data],
        "responses": response.output[0].content[0].text,
        "messages": message.choices[0].message.content,
        "refused": refused,
    }


async def asynchronous(options: dict[str, Any], address: dict[str, Any], model: str) -> dict[str, Any]:
    """Ask again in an event loop, several at a time; return what came."""
    whole = await asyncio.gather(*(litellm.acompletion(messages=QUESTION, **options) for _ in range(3)))
    chunks = [chunk async for chunk in await litellm.acompletion(messages=QUESTION, stream=True, **options)]
    vectors = await litellm.aembedding(
        model=f"openai/{model}", input=["rain"], encoding_format="float", **address
    )
    return {
        "acompletion": [one.choices[0].message.content for one in whole],
        "astream": joined(chunks),
        "aembedding": vectors.data[0]["embedding"],
    }


def main() -> None:
    """Make all calls and print what they gave."""
    url, model = sys.argv[1:]
    address = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    options = {"model": f"openai/{model}", "max_tokens": MAX_TOKENS, "temperature": 0, **address}
    found = {**texts(options), **tools(options), **others(options, address, model, url)}
    found |= asyncio.run(asynchronous(options, address, model))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
