"""The service of an engine, and the streams of events that routes make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from asgi import Call
from fake_service_engine import FakeEngine, FakeServer
from starlette.types import Receive, Scope, Send

from nbengine.errors import EngineDeadError
from nbengine.outputs import PromptProgress
from nbengine.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from nbengine.server.merging import Inbox, merged
from nbengine.server.protocol.errors import ApiError
from nbengine.server.service import State
from nbengine.server.sse import EventStream, event

DELTAS = SamplingParams(output_kind=RequestOutputKind.DELTA)


async def test_the_watch_ends_with_the_engine() -> None:
    fake = await FakeServer().start()
    watching = asyncio.create_task(fake.service.watch())
    await asyncio.sleep(0)
    assert not watching.done()
    fake.engine.death = EngineDeadError("gone")
    assert str(await watching) == "gone"
    assert fake.service.state is State.DEAD
    with pytest.raises(ApiError, match="gone"):
        fake.service.check_ready()


async def test_one_who_waited_while_the_engine_fell_asleep_is_refused() -> None:
    fake = await FakeServer(max_concurrent_requests=1).start()
    ticket = await fake.service.limits.enter()
    outputs = fake.service.generate([{"prompt": "a"}], DELTAS, "r")
    first = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    fake.feed.sleep_level(1)
    fake.service.look()
    ticket.release()
    with pytest.raises(ApiError) as refused:
        await first
    assert refused.value.code == "engine_asleep"
    assert fake.service.limits.num_running == 0


async def test_closing_several_streams_aborts_all_of_them() -> None:
    engine = FakeEngine(["a"] * 100)
    fake = await FakeServer(engine).start()
    outputs = fake.service.generate([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], DELTAS, "r")
    for _ in range(5):
        await anext(outputs)
    await outputs.aclose()
    assert engine.running == 0
    assert sorted(engine.aborted) == ["r-0", "r-1", "r-2"]
    assert fake.service.limits.num_running == 0


async def test_what_nobody_reads_stays_in_the_streams() -> None:
    made = [0, 0]

    async def stream(index: int) -> AsyncGenerator[Any, None]:
        for number in range(100):
            made[index] += 1
            yield number

    outputs = merged([stream(0), stream(1)])
    await anext(outputs)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum(made) <= 4
    await outputs.aclose()


async def test_one_who_lags_behind_gets_the_latest_progress_of_each_prompt_and_every_output() -> None:
    inbox = Inbox()

    def progress(index: int, number: int) -> PromptProgress:
        return PromptProgress(f"r-{index}", 100, number, 0, 1.0)

    async def stream(index: int) -> AsyncGenerator[Any, None]:
        for number in range(3):
            inbox.report(index, progress(index, number))
        for number in range(5):
            yield number

    items: list[Any] = []
    async with aclosing(merged([stream(0), stream(1)], inbox)) as outputs:
        async for item in outputs:
            for _ in range(20):
                await asyncio.sleep(0)
            items.append(item)
    for index in (0, 1):
        assert [what for whose, what in items if whose == index] == [progress(index, 2), *range(5)]


async def test_a_pooling_request_without_an_output_is_an_error_for_its_caller() -> None:
    fake = await FakeServer().start()

    async def encode(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        raise ValueError("no")
        yield

    fake.engine.encode = encode  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no"):
        await fake.service.pool([{"prompt": "a"}], [PoolingParams()], "r", ["input"])
    assert fake.service.limits.num_running == 0


async def run_stream(stream: EventStream, caller: Call) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"send_body": send}
        await stream(scope, receive, send)

    await caller.run(app, "GET", "/", b"", {})


async def test_a_quiet_stream_gets_comments() -> None:
    more = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        await more.wait()
        yield event({"b": 2})

    caller = Call()
    running = asyncio.create_task(run_stream(EventStream(events(), ping_interval=0.01), caller))
    while b"".join(caller.reply.parts).count(b": ping") < 2:
        caller.changed.clear()
        await caller.changed.wait()
    more.set()
    await running
    assert caller.reply.events() == [{"a": 1}, {"b": 2}]
    assert caller.reply.complete


async def test_a_reader_that_leaves_closes_the_events() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield event({"a": 1})
            await asyncio.Event().wait()
        finally:
            closed.set()

    caller = Call()
    running = asyncio.create_task(run_stream(EventStream(events(), ping_interval=60), caller))
    await caller.changed.wait()
    caller.gone.set()
    await running
    assert closed.is_set()


def test_an_event_is_one_line_whatever_it_says() -> None:
    assert event({"text": "a\nb\r\n\u2028"}, "name").count(b"\n") == 3
    assert event({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
