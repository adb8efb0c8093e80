"""The service of an engine, and the streams of events that routes make of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from asgi import Call
from fake_service_engine import FakeEngine, FakeServer
from starlette.types import Receive, Scope, Send

from nbengine.errors import EngineDeadError, InvalidArgumentError
from nbengine.frontend.outputs.output_collector import RequestOutputCollector, wake
from nbengine.frontend.outputs.output_stream import OutputStream
from nbengine.outputs import CompletionOutput, PromptProgress, RequestOutput
from nbengine.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from nbengine.server.events import event
from nbengine.server.http_protocol import WRITE_PART
from nbengine.server.limits import Limits
from nbengine.server.outputs import Indexed, Outputs
from nbengine.server.protocol.errors import ApiError
from nbengine.server.service import State
from nbengine.server.sse import EventStream

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
    sending = asyncio.ensure_future(fake.service.send([{"prompt": "a"}], DELTAS, "r"))
    await asyncio.sleep(0)
    fake.feed.sleep_level(1)
    fake.service.look()
    ticket.release()
    with pytest.raises(ApiError) as refused:
        await sending
    assert refused.value.code == "engine_asleep"
    assert fake.service.limits.num_running == 0


async def test_closing_the_outputs_aborts_all_requests_and_gives_their_places_back() -> None:
    engine = FakeEngine(["a"] * 100)
    fake = await FakeServer(engine).start()
    outputs = await fake.service.send([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], DELTAS, "r")
    assert fake.service.limits.num_running == 3
    outputs.close()
    outputs.close()
    assert sorted(engine.aborted) == ["r-0", "r-1", "r-2"]
    assert fake.service.limits.num_running == 0


async def test_prompts_are_repeated_only_where_there_are_places_for_the_copies() -> None:
    reads: list[int] = []

    class Prompts(list[dict[str, str]]):
        def __iter__(self) -> Iterator[dict[str, str]]:
            reads.append(len(self))
            return super().__iter__()

    engine = FakeEngine()
    fake = await FakeServer(engine, max_concurrent_requests=4).start()
    prompts = Prompts([{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ApiError, match="at most 4 completions"):
        await fake.service.send(prompts, DELTAS, "r", copies=3)
    assert not reads
    outputs = await fake.service.send(prompts, DELTAS, "r", copies=2)
    assert [prompt["prompt"] for prompt, *_ in engine.asked] == ["a", "a", "b", "b"]
    outputs.close()


async def test_a_prompt_that_is_refused_aborts_those_that_were_sent() -> None:
    engine = FakeEngine(["a"] * 100)
    fake = await FakeServer(engine).start()
    open_stream = engine.open_stream

    async def refusing(prompt: Any, *args: Any, **options: Any) -> OutputStream:
        if prompt["prompt"] == "bad":
            await asyncio.sleep(0)
            raise InvalidArgumentError("prompt", "bad", "good")
        return await open_stream(prompt, *args, **options)

    engine.open_stream = refusing  # type: ignore[method-assign]
    with pytest.raises(InvalidArgumentError):
        await fake.service.send([{"prompt": "a"}, {"prompt": "bad"}, {"prompt": "c"}], DELTAS, "r")
    assert sorted(engine.aborted) == ["r-0", "r-2"]
    assert fake.service.limits.num_running == 0


class Requests:
    """Requests whose outputs a test puts, and the reader of all of them."""

    def __init__(self, num_requests: int) -> None:
        self.queues = [
            RequestOutputCollector(DELTAS.output_kind, f"r-{index}", f"r-{index}")
            for index in range(num_requests)
        ]
        self.aborted: list[str] = []
        self.limits = Limits(100, 0)
        self.outputs: Outputs

    async def send(self) -> Outputs:
        self.outputs = Outputs(await self.limits.enter(len(self.queues)))
        for index, queue in enumerate(self.queues):
            queue.on_prompt_progress = partial(self.outputs.report, index)

        async def opened(queue: RequestOutputCollector) -> OutputStream:
            return OutputStream(queue, self.aborted.append)

        await self.outputs.open([opened(queue) for queue in self.queues])
        return self.outputs

    def put(self, text: str, index: int = 0, *, ends: bool = False) -> None:
        completion = CompletionOutput(0, text, [1] * len(text), finish_reason="stop" if ends else None)
        self.queues[index].put(RequestOutput(f"r-{index}", "p", [1], [completion], ends))

    def report(self, index: int, number: int) -> None:
        waiter = self.queues[index].report(PromptProgress(f"r-{index}", 100, number, 0, 1.0))
        if waiter is not None:
            wake([waiter])


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def said(found: Iterable[Indexed]) -> list[tuple[int, Any]]:
    """The words of outputs, each with its request's index."""
    return [
        (index, what.num_read_tokens if isinstance(what, PromptProgress) else what.outputs[0].text)
        for index, what in found
    ]


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_a_reader_is_called_once_for_all_that_comes_in_a_turn_and_takes_it_joined(
    num_requests: int,
) -> None:
    requests = Requests(num_requests)
    outputs = await requests.send()
    taken: list[list[tuple[int, Any]]] = []
    outputs.listen(lambda: taken.append(said(outputs.take())))
    everyone = range(num_requests)
    for number in (10, 20):
        for index in everyone:
            requests.report(index, number)
    await turns()
    for text in "ab":
        for index in everyone:
            requests.put(text, index)
    await turns()
    for index in everyone:
        requests.put("c", index, ends=True)
    assert not outputs.finished
    await turns()
    assert taken == [[(index, what) for index in everyone] for what in (20, "ab", "c")]
    assert outputs.finished
    outputs.close()
    assert (requests.aborted, requests.limits.num_running) == ([], 0)


@pytest.mark.parametrize("num_requests", [1, 2])
async def test_what_nobody_takes_stays_in_the_streams_which_join_it(num_requests: int) -> None:
    requests = Requests(num_requests)
    outputs = await requests.send()
    calls: list[None] = []
    outputs.listen(lambda: calls.append(None))
    for _ in range(500):
        for index in range(num_requests):
            requests.put("x", index)
        await turns(2)
    assert len(calls) == 1
    assert all(len(queue._parts) <= 65 for queue in requests.queues)
    assert said(outputs.take()) == [(index, "x" * 500) for index in range(num_requests)]


async def test_an_error_of_one_request_is_raised_behind_what_others_have() -> None:
    requests = Requests(3)
    outputs = await requests.send()
    taken: list[Any] = []

    def take() -> None:
        try:
            for found in outputs.take():
                taken.extend(said([found]))
        except EngineDeadError as error:
            taken.append(str(error))

    outputs.listen(take)
    requests.put("a", 0)
    requests.queues[1].put_error(EngineDeadError("gone"))
    await turns()
    assert taken == [(0, "a"), "gone"]
    outputs.close()
    assert sorted(requests.aborted) == ["r-0", "r-1", "r-2"]


async def test_a_pooling_request_without_an_output_is_an_error_for_its_caller() -> None:
    fake = await FakeServer().start()

    async def encode(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        raise ValueError("no")
        yield

    fake.engine.encode = encode  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no"):
        await fake.service.pool([{"prompt": "a"}], [PoolingParams()], "r", ["input"])
    assert fake.service.limits.num_running == 0


class Texts:
    """Events that are the texts of outputs."""

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        assert isinstance(output, RequestOutput)
        text = output.outputs[0].text
        if text == "bad":
            raise ValueError("unforeseen")
        return event(text) if text else b""

    def end(self) -> bytes:
        return event("end")


class Reader(Call):
    """A caller; `write` is what its protocol offers for parts of streams."""

    def __init__(self, write: Callable[[bytes], bool] | None = None) -> None:
        super().__init__()
        self.write = write

    async def read(self, requests: Requests, ping_interval: float = 60) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = {} if self.write is None else {WRITE_PART: self.write}
            await EventStream(requests.send, Texts(), ping_interval=ping_interval)(scope, receive, send)

        await self.run(app, "GET", "/", b"", {})


async def test_a_quiet_stream_gets_comments() -> None:
    requests, caller = Requests(1), Reader()
    running = asyncio.create_task(caller.read(requests, ping_interval=0.01))
    requests.put("a")
    while b"".join(caller.reply.parts).count(b": ping") < 2:
        caller.changed.clear()
        await caller.changed.wait()
    requests.put("b", ends=True)
    await running
    assert caller.reply.events() == ["a", "b", "end"]
    assert caller.reply.complete


async def test_a_reader_that_leaves_aborts_the_request() -> None:
    requests, caller = Requests(1), Reader()
    running = asyncio.create_task(caller.read(requests))
    requests.put("a")
    await caller.changed.wait()
    caller.gone.set()
    await running
    assert (requests.aborted, requests.limits.num_running) == (["r-0"], 0)


async def test_events_are_written_without_a_task_where_the_reader_keeps_up() -> None:
    written: list[bytes] = []

    def write(part: bytes) -> bool:
        tasks.append(asyncio.current_task())
        written.append(part)
        return True

    tasks: list[asyncio.Task[Any] | None] = []
    requests, caller = Requests(2), Reader(write)
    running = asyncio.create_task(caller.read(requests))
    requests.put("a", 1)
    while not caller.reply.parts:
        await asyncio.sleep(0)
    await turns()
    # The status and the first event are ASGI's.
    assert (caller.reply.status, caller.reply.events(), written) == (200, ["a"], [])
    for text in "bc":
        requests.put(text, 1)
        requests.put(text.upper())
        requests.put(".")
        await turns()
    requests.put("d", ends=True)
    await turns()
    requests.put("e", 1, ends=True)
    await running
    assert written == [
        event("b") + event("B."),
        event("c") + event("C."),
        event("d"),
        event("e") + event("end"),
    ]
    assert tasks == [None] * 4
    assert caller.reply.complete


@pytest.mark.parametrize("has_write", [False, True])
async def test_while_a_reader_is_behind_nothing_is_taken_and_all_of_it_comes_joined(has_write: bool) -> None:
    room = asyncio.Event()
    refused: list[bytes] = []

    def write(part: bytes) -> bool:
        refused.append(part)
        return False

    requests, caller = Requests(1), Reader(write if has_write else None)
    caller.before_send = room.wait
    room.set()
    running = asyncio.create_task(caller.read(requests))
    requests.put("a")
    while not caller.reply.parts:
        await asyncio.sleep(0)
    await turns()
    room.clear()
    requests.put("b")
    await turns()
    assert caller.reply.events() == ["a"]
    for _ in range(300):
        requests.put("x")
        await turns(2)
    assert len(requests.queues[0]._parts) <= 65
    room.set()
    await turns()
    assert caller.reply.events() == ["a", "b", "x" * 300]
    requests.put("c", ends=True)
    await running
    assert caller.reply.events() == ["a", "b", "x" * 300, "c", "end"]
    assert len(refused) == (3 if has_write else 0)


@pytest.mark.parametrize("has_write", [False, True])
async def test_an_error_ends_a_stream_behind_what_came_before_it(has_write: bool) -> None:
    written: list[bytes] = []
    requests, caller = Requests(2), Reader((lambda part: not written.append(part)) if has_write else None)
    running = asyncio.create_task(caller.read(requests))
    requests.put("a")
    while not caller.reply.parts:
        await asyncio.sleep(0)
    await turns()
    requests.put("b")
    requests.put("bad", 1)
    await running
    events = [json.loads(part[6:]) for part in b"".join(written).split(b"\n\n") if part]
    *before, error, done = [*caller.reply.events()[:1], *events, *caller.reply.events()[1:]]
    assert before == ["a", "b"]
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
    assert sorted(requests.aborted) == ["r-0", "r-1"]
    assert requests.limits.num_running == 0


def test_an_event_is_one_line_whatever_it_says() -> None:
    assert event({"text": "a\nb\r\n\u2028"}, "name").count(b"\n") == 3
    assert event({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
