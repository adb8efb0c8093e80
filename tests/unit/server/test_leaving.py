"""Of many callers, of whom some leave at any moment, nothing is left: no task, no place, no body, no request."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from typing import Any

import pytest
from asgi import Call, Reply
from fake_service_engine import FakeEngine, FakeServer

from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_stream import OutputStream
from nbengine.server.outputs import Outputs
from nbengine.server.sse import EventStream

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": ["hi", "ho"]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "fake-model", "messages": HELLO, "max_tokens": 8},
}
HEADERS = {"host": "localhost", "content-type": "application/json"}
PIECES = list("abcdefgh")


def texts_of(path: str, reply: Reply) -> list[str]:
    """The texts of a stream's completions."""
    texts = {0: "", 1: ""}
    for event in reply.events():
        if path == "/v1/responses":
            texts[0] += event["delta"] if event["type"] == "response.output_text.delta" else ""
        elif path == "/v1/messages":
            texts[0] += event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
        else:
            for choice in event["choices"] if event != "[DONE]" else ():
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return [text for text in texts.values() if text]


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_left_of_200_streams_of_which_a_third_leaves(path: str) -> None:
    engine = FakeEngine(PIECES)
    fake = await FakeServer(engine, max_concurrent_requests=50).start()
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    draw = random.Random(3)
    before = asyncio.all_tasks()

    async def ask(number: int) -> Reply:
        caller = Call()
        running = asyncio.create_task(caller.run(fake.app, "POST", path, body, HEADERS))
        if number % 3 == 0:
            for _ in range(draw.randint(0, 60)):
                await asyncio.sleep(0)
            caller.gone.set()
        return await running

    replies = await asyncio.gather(*(ask(number) for number in range(200)))
    expected = ["".join(PIECES)] * (2 if path == "/v1/completions" else 1)
    for number, reply in enumerate(replies):
        if number % 3:
            assert texts_of(path, reply) == expected
    # Some have left before their answer was whole.
    assert engine.aborted
    while asyncio.all_tasks() - before:
        await asyncio.sleep(0)
    service = fake.service
    assert (engine.running, service.limits.num_running, service.limits.num_waiting) == (0, 0, 0)
    assert (service.num_active, service.num_body_bytes) == (0, 0)


@pytest.mark.parametrize("path", BODIES)
async def test_an_answered_stream_leaves_nothing_for_the_collector_of_cycles(path: str) -> None:
    fake = await FakeServer(FakeEngine(PIECES)).start()
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    kinds = (EventStream, Outputs, OutputStream, RequestOutputCollector)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await Call().run(fake.app, "POST", path, body, HEADERS)).complete
        # What the loop still has to call ends first.
        for _ in range(10):
            await asyncio.sleep(0)
        assert [each for each in gc.get_objects() if isinstance(each, kinds)] == []
    finally:
        gc.enable()
