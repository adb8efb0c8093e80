"""The engine core says how far it has read a long prompt, and those who asked are told where they wait."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from nbengine.frontend.outputs.output_collector import RequestOutputCollector, wake
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PromptRead
from nbengine.outputs import CompletionOutput, PromptProgress, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams


def progress(read: int = 50) -> PromptProgress:
    return PromptProgress("r", 100, read, 10, 2.0)


def collector() -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind.DELTA, "r", "r-1")


def output() -> RequestOutput:
    return RequestOutput("r", "p", [1], [CompletionOutput(0, "a", [1], finish_reason="length")], True)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (("r", 8000, 3200, 1100, 4.0, 9.1), "reading 3,200 of 8,000 tokens, 1,100 reused, 10 s to go"),
        (("r", 8000, 4000, 0, 0.5, 0.5), "reading 4,000 of 8,000 tokens, 1 s to go"),
        (("r", 8000, 1100, 1100, 4.0), "reading 1,100 of 8,000 tokens, 1,100 reused"),
    ],
)
def test_progress_is_a_line_for_people(known: tuple[Any, ...], text: str) -> None:
    assert str(PromptProgress(*known)) == text


@pytest.mark.parametrize("num_cached", [0, 100])
@pytest.mark.parametrize(("each", "growth"), [(0.001, 0.0), (0.001, 1e-6), (0.0, 1e-5)])
def test_the_time_that_is_left_is_right_where_tokens_take_longer_the_later_they_come(
    byte_level: Tokenizer, num_cached: int, each: float, growth: float
) -> None:
    def seconds(num_read: int) -> float:
        return each * (num_read - num_cached) + growth * (num_read**2 - num_cached**2)

    progresses = progress_after(byte_level, *(PartRead(n, num_cached, seconds(n)) for n in (300, 500, 900)))
    left = [seconds(1000) - seconds(n) for n in (300, 500, 900)]
    # One step says nothing of growth.
    expected = left if not growth else [700 * seconds(300) / (300 - num_cached), *left[1:]]
    assert [found.seconds_left for found in progresses] == pytest.approx(expected)


def test_nothing_is_expected_of_what_was_reused_and_the_average_after_a_preemption(
    byte_level: Tokenizer,
) -> None:
    parts = [
        PartRead(100, 100, 1.0),
        PartRead(600, 100, 2.0),
        PartRead(200, 100, 4.0),
        PartRead(90, 100, 5.0),
    ]
    expected = [None, 400 * 2.0 / 500, 800 * 4.0 / 100, None]
    assert [found.seconds_left for found in progress_after(byte_level, *parts)] == expected


class PartRead(NamedTuple):
    """A step that has read a part of 1,000 tokens."""

    num_read: int
    num_cached: int
    seconds: float


def progress_after(tokenizer: Tokenizer, *parts: PartRead) -> list[PromptProgress]:
    processor, told = OutputProcessor(TextDecoding(tokenizer)), []
    request = EngineCoreRequest("r-1", [1] * 1000, SamplingParams(), external_req_id="r")
    processor.add_request(request, "p", on_prompt_progress=told.append)
    for part in parts:
        processor.process_prompts_read([PromptRead("r-1", 1000, *part)])
    return told


async def test_a_coroutine_that_waits_is_woken() -> None:
    queue, told = collector(), []
    queue.on_prompt_progress = told.append
    reading = asyncio.create_task(queue.get())
    while queue._waiter is None:
        await asyncio.sleep(0)
    waiter = queue.report(progress())
    assert waiter is not None
    wake([waiter])
    while not told:
        await asyncio.sleep(0)
    assert not reading.done()
    queue.put(output())
    assert (await asyncio.wait_for(reading, 60)).finished
    assert told == [progress()]


async def test_a_coroutine_is_told_on_its_own_loop() -> None:
    queue, told = collector(), []

    def note(part: PromptProgress) -> None:
        told.append((part.num_read_tokens, asyncio.get_running_loop()))
        if part.num_read_tokens < 70:
            report(progress(part.num_read_tokens + 10))
        else:
            threading.Thread(target=queue.put, args=(output(),)).start()

    def report(part: PromptProgress) -> None:
        waiter = queue.report(part)
        assert waiter is None, "the reader, who is here, does not wait"

    queue.on_prompt_progress = note
    report(progress())
    assert (await asyncio.wait_for(queue.get(), 60)).finished
    assert told == [(read, asyncio.get_running_loop()) for read in (50, 60, 70)]


def test_a_blocking_reader_that_waits_is_woken_and_told_in_its_own_thread() -> None:
    queue, told = collector(), []
    heard = threading.Event()

    def note(part: PromptProgress) -> None:
        told.append((part.num_read_tokens, threading.current_thread()))
        heard.set()

    def write() -> None:
        while not queue._num_blocked:
            time.sleep(0.001)
        queue.report(progress())
        heard.wait(60)
        queue.put(output())

    queue.on_prompt_progress = note
    writer = threading.Thread(target=write)
    writer.start()
    assert queue.get_blocking(timeout=60).finished
    writer.join()
    assert heard.is_set()
    assert told == [(50, threading.current_thread())]


def test_a_reader_that_looks_now_and_then_is_told_of_the_newest_once() -> None:
    queue, told = collector(), []
    queue.on_prompt_progress = told.append
    queue.report(progress(20))
    queue.report(progress(30))
    assert queue.get_nowait() is None
    assert queue.get_nowait() is None
    assert told == [progress(30)]


def test_what_a_function_raises_reaches_the_reader_and_loses_no_output() -> None:
    queue = collector()

    def refuse(_: PromptProgress) -> None:
        raise KeyboardInterrupt

    queue.on_prompt_progress = refuse
    queue.report(progress())
    queue.put(output())
    with pytest.raises(KeyboardInterrupt):
        queue.get_blocking(timeout=60)
    assert queue.get_blocking(timeout=60).finished


def test_nobody_is_woken_who_does_not_want_to_know() -> None:
    queue = collector()
    assert queue.report(progress()) is None
    with pytest.raises(TimeoutError):
        queue.get_blocking(timeout=0)


@pytest.mark.parametrize("n", [1, 3])
def test_the_progress_of_the_first_completion_is_that_of_the_request(byte_level: Tokenizer, n: int) -> None:
    processor, told = OutputProcessor(TextDecoding(byte_level)), []
    params = SamplingParams(n=n, output_kind=RequestOutputKind.FINAL_ONLY)
    request = EngineCoreRequest("r-1", [1] * 100, params, external_req_id="r")
    ids = [child.request_id for child in processor.add_request(request, "p", on_prompt_progress=told.append)]
    processor.process_prompts_read([PromptRead(name, 100, 30, 10, 0.5) for name in (*ids, "unknown")])
    assert told == [PromptProgress("r", 100, 30, 10, 0.5, 70 * 0.5 / 20)]
    processor.process_prompts_read([PromptRead(name, 100, 60, 10, 0.75) for name in ids[1:]])
    assert len(told) == 1
    assert processor.process_outputs([EngineCoreOutput(name, [7]) for name in ids]).request_outputs == []
    (last,) = processor.process_outputs(
        [EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH) for name in ids]
    ).request_outputs
    assert last.metrics.prompt_progress == told[0]
