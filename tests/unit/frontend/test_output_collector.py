"""The hand-over of outputs between threads and event loops."""

from __future__ import annotations

import _thread
import asyncio
import threading

import pytest

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.frontend.output_collector import RequestOutputCollector
from nbengine.outputs import CompletionOutput, RequestOutput
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


def test_unread_cumulative_outputs_are_replaced() -> None:
    queue = collector(CUMULATIVE)
    queue.put(output("a", [1]))
    queue.put(output("ab", [1, 2]))
    newest = queue.get_nowait()
    assert newest is not None
    assert newest.outputs[0].text == "ab"
    assert queue.get_nowait() is None


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
    queue.get_blocking(timeout=1)
    with pytest.raises(NBEngineError, match="finished"):
        queue.get_blocking(timeout=1)


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
            ids = [index] if kind is DELTA else list(range(index + 1))
            queue.put(output("x" * len(ids), ids, finished=last))

    producer = threading.Thread(target=produce)
    producer.start()
    seen: list[int] = []
    while True:
        item = queue.get_nowait() or await asyncio.wait_for(queue.get(), 10)
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
        item = queue.get_blocking(timeout=10)
        seen += item.outputs[0].token_ids
        finished = item.finished
    producer.join()
    assert seen == list(range(count))


def test_an_interrupt_ends_the_wait_at_once_and_loses_nothing() -> None:
    queue = collector()
    waiting = threading.Event()

    def interrupt() -> None:
        waiting.wait(5)
        _thread.interrupt_main()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        queue.get_blocking(timeout=20)
    interrupter.join()
    queue.put(output("kept", [1]))
    assert queue.get_blocking(timeout=1).outputs[0].text == "kept"


def test_interrupts_at_any_moment_lose_no_output() -> None:
    queue = collector()
    count = 400
    proceed = threading.Event()

    def produce() -> None:
        for index in range(count):
            queue.put(output("x", [index], finished=index == count - 1))
            if index % 20 == 0:
                _thread.interrupt_main()
            proceed.wait(0.0002)

    producer = threading.Thread(target=produce)
    seen: list[int] = []
    interrupts = 0
    finished = False
    item = None
    producer.start()
    while not finished:
        try:
            item = queue.get_blocking(timeout=10)
            seen += item.outputs[0].token_ids
            finished = item.finished
        except KeyboardInterrupt:
            interrupts += 1
            # The interrupt may hit this loop between the call's return and the line after it.
            if item is not None and item.outputs[0].token_ids[-1] not in seen:
                seen += item.outputs[0].token_ids
                finished = item.finished
    producer.join()
    assert interrupts
    assert seen == list(range(count))


async def test_a_cancelled_wait_leaves_the_collector_usable() -> None:
    queue = collector()
    waiter = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    queue.put(output("a", [1]))
    assert (await asyncio.wait_for(queue.get(), 5)).outputs[0].text == "a"


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
