"""Answers that stream in the background: one thread and one beat for all, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.generation.background import Background, Beat
from nbengine.magics.generation.view import UPDATE_SECONDS, CellView, pause_after
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

STREAMS = 16
MOST_A_SECOND = 1 / (pause_after(0, 0.0, 1000) / 1000)
"""The most updates of all cells together in a second."""


async def test_streams_that_wait_wake_together_and_one_that_is_cancelled_alone() -> None:
    beat, woken = Beat(), []

    async def stream(name: str, interval: float) -> None:
        await beat.wait(name, interval)
        woken.append((name, asyncio.get_running_loop().time()))
        beat.leave(name)

    tasks = [asyncio.create_task(stream(name, 0.02)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [name for name, _ in woken] == ["b", "c", "d"]
    assert tasks[0].cancelled()


async def test_a_beat_comes_after_the_mean_of_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    beat, delays = Beat(), []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def at_once(delay: float, callback: object) -> object:
        delays.append(delay)
        return call_later(0, callback)

    monkeypatch.setattr(loop, "call_later", at_once)
    await asyncio.gather(beat.wait("fast", 0.1), beat.wait("slow", 0.5))
    await asyncio.gather(beat.wait("fast", 0.1), beat.wait("slow", 0.7))
    beat.leave("slow")
    await beat.wait("fast", 0.2)
    # The first beat knows one stream, the second what both have asked for.
    assert delays == pytest.approx([0.1, 0.3, 0.2])


async def test_many_answers_are_whole_and_share_one_thread_and_their_messages_are_bounded(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    before = threading.active_count()
    for number in range(STREAMS):
        (await run(kernel_shell, f"%%generate -a -o later{number}\nhi\n")).raise_error()
    # The runs' writer and the background's loop may have come.
    assert threading.active_count() <= before + 2
    began, expected = time.monotonic(), [""] * STREAMS
    for token in range(60):
        for number in range(STREAMS):
            word = f"{number}.{token} "
            expected[number] += word
            engine.emit(word, "stop" if token == 59 else None, number)
        await asyncio.sleep(0.005)
    results = [await kernel_shell.user_ns[f"later{number}"] for number in range(STREAMS)]
    elapsed = time.monotonic() - began
    assert [result.text for result in results] == expected
    shown = publisher(kernel_shell).outputs()
    assert [data["text/plain"].split("\n\n[")[0] for data in shown] == expected
    # Beside the beats each cell shows its placeholder, its first token and its end.
    assert len(publisher(kernel_shell).messages) <= elapsed * MOST_A_SECOND + 4 * STREAMS
    assert not CellView._streaming


async def test_an_answer_grows_while_others_wait(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    for number in range(4):
        (await run(kernel_shell, f"%%generate -a -o later{number}\nhi\n")).raise_error()
    for part in ("one ", "two ", "three "):
        engine.emit(part, None, 2)
        await asyncio.to_thread(publisher(kernel_shell).wait_for, part)
    for number in range(4):
        kernel_shell.user_ns[f"later{number}"].cancel()
    results = [await kernel_shell.user_ns[f"later{number}"] for number in range(4)]
    assert [result.text for result in results] == ["", "", "one two three ", ""]
    assert {result.finish_reason for result in results} == {"abort"}


async def test_an_answer_that_is_cancelled_ends_although_its_engine_says_nothing(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "abort_soon", lambda request_id: None)
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o later\nhi\n")).raise_error()
    kernel_shell.user_ns["later"].cancel()
    result = await asyncio.wait_for(asyncio.shield(_awaited(kernel_shell.user_ns["later"])), 60)
    assert (result.text, result.finish_reason) == ("", "abort")


async def _awaited(handle: object) -> object:
    return await handle


async def test_an_unexpected_error_is_told_as_that_of_a_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr("threading.excepthook", told.append)

    async def fail() -> None:
        raise OSError("no room")

    Background.shared().start(fail())
    await until(lambda: bool(told))
    assert (told[0].exc_type, str(told[0].exc_value)) == (OSError, "no room")
    assert told[0].thread is not None
    assert told[0].thread.name == "nbengine-background"


def test_many_cells_together_are_updated_several_times_a_second() -> None:
    assert UPDATE_SECONDS < pause_after(1000, 0.0001, 64) <= 1 / 3
