"""The log says that requests wait for an engine that sleeps or is paused, once for those that wait side by side."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from nbengine.errors import EngineDeadError
from nbengine.frontend import held_back
from nbengine.frontend.held_back import LEAST_SECONDS_BETWEEN, HeldBack

Log = pytest.LogCaptureFixture


class Engine:
    """An engine that answers with what it `holds`, or with an error."""

    def __init__(self, holds: str = "", error: Exception | None = None) -> None:
        self.holds, self.error = holds, error
        self.asked: list[str] = []

    def submit(self, method: str) -> Future[Any]:
        self.asked.append(method)
        future: Future[Any] = Future()
        if self.error is None:
            future.set_result(method == self.holds)
        else:
            future.set_exception(self.error)
        return future


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ("is_sleeping", ["engine mine sleeps, so that requests wait: wake_up() lets them go on"]),
        ("is_paused", ["engine mine is paused, so that requests wait: resume_generation() lets them go on"]),
        ("", []),
    ],
)
def test_what_holds_requests_back_is_said_with_what_lets_them_go_on(
    caplog: Log, holds: str, said: list[str]
) -> None:
    HeldBack("mine", Engine(holds).submit).ask()
    assert caplog.messages == said


def test_an_engine_that_has_ended_is_no_reason(caplog: Log) -> None:
    HeldBack("mine", Engine(error=EngineDeadError("killed")).submit).ask()
    assert caplog.messages == []


async def test_many_that_wait_ask_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(held_back, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(held_back.time, "monotonic", lambda: now)
    engine = Engine("is_paused")
    waiting = HeldBack("mine", engine.submit)
    for moment, number in ((100.0, 2), (100.0 + LEAST_SECONDS_BETWEEN, 4)):
        now = moment
        timers = [waiting.ask_later() for _ in range(3)]
        while len(engine.asked) < number:
            await asyncio.sleep(0)
        for timer in timers:
            timer.cancel()
    assert engine.asked == ["is_sleeping", "is_paused"] * 2


async def test_who_gets_an_output_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_back, "QUIET_SECONDS", 0.0)
    engine = Engine("is_paused")
    HeldBack("mine", engine.submit).ask_later().cancel()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, done.set)
    await done.wait()
    assert engine.asked == []
