"""The hand-over of outputs between threads and event loops."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.frontend.outputs.output_collector import DueCall, RequestOutputCollector, wake
from nbengine.frontend.outputs.output_stream import OutputStream
from nbengine.outputs import CompletionOutput, PromptProgress, RequestOutput
from nbengine.sampling_params import RequestOutputKind

DELTA = RequestOutputKind.DELTA
CUMULATIVE = RequestOutputKind.CUMULATIVE


def output(text: str, token_ids: list[int], *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, text, token_ids, finish_reason="length" if finished else None)
    return RequestOutput("r", "p", [1], [completion], finished)


def collector(kind: RequestOutputKind = DELTA) -> RequestOutputCollector:
    return RequestOutputCollector(kind, "r", "r-12345678")


def test_unread_deltas_are_joined() -> None:
    queue = collector()
    queue.put(output("a", [1]))
    queue.put(output("b", [2]))
    queue.put(output("c", [3], finished=True))
    merged = queue.get_nowait()
    assert merged is not None
    assert (merged.outputs[0].text, merged.outputs[0].token_ids) == ("abc", [1, 2, 3])
    assert merged.finished
    assert merged.outputs[0].finish_reason == "length"


def test_a_cumulative_reader_gets_everything_so_far() -> None:
    queue = collector(CUMULATIVE)
    queue.put(output("a", [1]))
    queue.put(output("b", [2]))
    newest = queue.get_nowait()
    assert newest is not None
    assert newest.outputs[0].text == "ab"
    assert queue.get_nowait() is None
    queue.put(output("c", [3], finished=True))
    last = queue.get_nowait()
    assert last is not None
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.finished) == ("abc", [1, 2, 3], True)
    assert newest.outputs[0].token_ids == [1, 2]
    with pytest.raises(NBEngineError, match="finished"):
        queue.get_nowait()


def test_an_error_comes_after_what_is_unread_and_stays() -> None:
    queue = collector()
    queue.put(output("a", [1]))
    queue.put_error(EngineDeadError("gone"))
    assert queue.get_nowait() is not None
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            queue.get_nowait()


def test_reading_on_after_the_last_output_is_an_error_not_a_hang() -> None:
    queue = collector()
    queue.put(output("a", [1], finished=True))
    queue.get_blocking(timeout=60)
    with pytest.raises(NBEngineError, match="finished"):
        queue.get_blocking(timeout=60)


def test_blocking_get_times_out() -> None:
    with pytest.raises(TimeoutError):
        collector().get_blocking(timeout=0.01)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_a_coroutine_misses_nothing_that_another_thread_puts(kind: RequestOutputKind) -> None:
    queue = collector(kind)
    count = 3000

    def produce() -> None:
        for index in range(count):
            last = index == count - 1
            queue.put(output("x", [index], finished=last))

    producer = threading.Thread(target=produce)
    producer.start()
    seen: list[int] = []
    while True:
        item = queue.get_nowait() or await asyncio.wait_for(queue.get(), 60)
        seen = [*seen, *item.outputs[0].token_ids] if kind is DELTA else item.outputs[0].token_ids
        if item.finished:
            break
    producer.join()
    assert seen == list(range(count))


def test_a_blocking_reader_misses_nothing_that_another_thread_puts() -> None:
    queue = collector()
    count = 3000
    producer = threading.Thread(
        target=lambda: [queue.put(output("x", [i], finished=i == count - 1)) for i in range(count)]
    )
    producer.start()
    seen: list[int] = []
    finished = False
    while not finished:
        item = queue.get_blocking(timeout=60)
        seen += item.outputs[0].token_ids
        finished = item.finished
    producer.join()
    assert seen == list(range(count))


def test_an_interrupt_ends_the_wait_at_once_and_loses_nothing(interrupt_when_armed: threading.Event) -> None:
    queue = collector()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        get_armed(queue, interrupt_when_armed)
    assert time.monotonic() - start < 60
    queue.put(output("kept", [1]))
    assert queue.get_blocking(timeout=60).outputs[0].text == "kept"


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_an_interrupt_just_before_the_return_loses_no_output(kind: RequestOutputKind, more: bool) -> None:
    queue = collector(kind)
    queue.put(output("a", [1]))
    queue._changed = InterruptedOnExit(queue._changed)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        queue.get_blocking(timeout=60)
    if more:
        queue.put(output("b", [2], finished=True))
    merged = queue.get_blocking(timeout=60)
    assert (merged.outputs[0].text, merged.finished) == ("ab" if more else "a", more)


class InterruptedOnExit:
    """A condition whose first release is followed by an interrupt."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._interrupts = iter([KeyboardInterrupt()])
        self.notify = condition.notify
        self.wait = condition.wait

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._condition.release()
        for interrupt in self._interrupts:
            raise interrupt


def get_armed(queue: RequestOutputCollector, armed: threading.Event) -> None:
    armed.set()
    queue.get_blocking(timeout=60)


@pytest.fixture
def interrupt_when_armed() -> Iterator[threading.Event]:
    """An event; once it is set, the main thread gets one interrupt, and only then."""
    armed, done = threading.Event(), threading.Event()

    def handler(signum: int, frame: FrameType | None) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def interrupt() -> None:
        armed.wait(60)
        while not done.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    previous = signal.signal(signal.SIGUSR1, handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    yield armed
    armed.clear()
    done.set()
    interrupter.join()
    signal.signal(signal.SIGUSR1, previous)


async def test_a_cancelled_wait_leaves_the_collector_usable() -> None:
    queue = collector()
    waiter = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    queue.put(output("a", [1]))
    assert (await asyncio.wait_for(queue.get(), 60)).outputs[0].text == "a"


def test_a_reader_whose_loop_is_closed_does_not_disturb_the_producer() -> None:
    queue = collector()
    loop = asyncio.new_event_loop()
    task = loop.create_task(queue.get())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    queue.put(output("a", [1]))
    assert queue.get_nowait() is not None


class Listener:
    """A reader that is called: it takes what has come, unless it `rests`."""

    def __init__(self, queue: RequestOutputCollector) -> None:
        self.queue = queue
        self.texts: list[str] = []
        self.calls = 0
        self.rests = False
        self.ended = asyncio.Event()
        queue.listen(DueCall(asyncio.get_running_loop(), self.on_due))

    def on_due(self) -> None:
        self.calls += 1
        if not self.rests:
            self.take()

    def take(self) -> None:
        try:
            found = self.queue.get_nowait()
        except NBEngineError as error:
            self.texts.append(str(error))
            self.ended.set()
            return
        if found is not None:
            self.texts.append(found.outputs[0].text)
            if found.finished:
                self.ended.set()


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_a_reader_that_is_called_misses_nothing_that_another_thread_puts(
    kind: RequestOutputKind,
) -> None:
    queue = collector(kind)
    listener = Listener(queue)

    def produce() -> None:
        for number in range(300):
            queue.put(output(f"{number},", [number], finished=number == 299))

    producer = threading.Thread(target=produce)
    producer.start()
    await asyncio.wait_for(listener.ended.wait(), 60)
    producer.join()
    whole = "".join(f"{number}," for number in range(300))
    assert (listener.texts[-1] if kind is CUMULATIVE else "".join(listener.texts)) == whole


async def test_a_reader_is_called_once_for_what_comes_in_one_turn_of_its_loop() -> None:
    queue = collector()
    queue.put(output("a", [1]))
    listener = Listener(queue)
    queue.put(output("b", [2]))
    assert listener.calls == 0
    await turns()
    assert listener.texts == ["ab"]
    for text in "cde":
        queue.put(output(text, [3]))
    assert listener.calls == 1
    await turns()
    assert (listener.texts, listener.calls) == (["ab", "cde"], 2)


async def test_a_reader_that_does_not_take_is_not_called_again_and_loses_nothing() -> None:
    queue = collector()
    listener = Listener(queue)
    listener.rests = True
    for number in range(200):
        queue.put(output("x", [number]))
        await turns(1)
    assert listener.calls == 1
    listener.rests = False
    listener.take()
    assert listener.texts == ["x" * 200]
    queue.put(output("y", [1]))
    await turns()
    assert (listener.texts[1:], listener.calls) == (["y"], 2)


async def test_a_reader_is_called_for_an_error_behind_an_output_and_for_progress() -> None:
    queue = collector()
    told: list[PromptProgress] = []
    queue.on_prompt_progress = told.append
    listener = Listener(queue)
    progress = [PromptProgress("r", 100, number, 0, 1.0) for number in (10, 20)]
    for each in progress:
        if (waiter := queue.report(each)) is not None:
            wake([waiter])
    await turns()
    assert (told, listener.texts) == (progress[-1:], [])
    queue.put(output("a", [1]))
    queue.put_error(EngineDeadError("gone"))
    await turns()
    assert listener.texts == ["a", "gone"]


async def test_a_reader_that_fails_does_not_keep_the_others_from_being_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queues = [collector() for _ in range(3)]
    listeners = [Listener(queue) for queue in queues]

    def fail() -> None:
        raise ValueError("its own fault")

    queues[1].listen(DueCall(asyncio.get_running_loop(), fail))
    waiters = [queue.add(output("a", [1])) for queue in queues]
    wake([waiter for waiter in waiters if waiter is not None])
    await turns()
    assert [listener.texts for listener in listeners] == [["a"], [], ["a"]]
    assert "its own fault" in caplog.text


async def test_leaving_a_stream_aborts_its_request_once_and_not_behind_its_end() -> None:
    aborted: list[str] = []
    for ends in (False, True):
        queue = collector()
        stream = OutputStream(queue, aborted.append)
        queue.put(output("a", [1], finished=ends))
        assert (await stream.get()).outputs[0].text == "a"
        assert stream.finished is ends
        stream.close()
        stream.close()
    assert aborted == ["r-12345678"]


@pytest.mark.parametrize("how", ["get", "take", "close"])
async def test_the_question_why_nothing_comes_is_dropped_with_the_first_output_or_the_end(how: str) -> None:
    queue = collector()
    question = asyncio.get_running_loop().call_later(3600, lambda: None)
    stream = OutputStream(queue, lambda request_id: None, question)
    assert stream.take() is None
    assert not question.cancelled()
    queue.put(output("a", [1]))
    if how == "get":
        await stream.get()
    elif how == "take":
        stream.take()
    else:
        stream.close()
    assert question.cancelled()
