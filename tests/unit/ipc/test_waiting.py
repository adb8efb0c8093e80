"""An end of a ring looks when something is due, and sleeps when not."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest

from nbengine.ipc.queues import waiting
from nbengine.ipc.queues.waiting import LEAD, LONGEST_SLEEP, SPIN, Fence, Waiter, WakeWord


class Clock:
    """Time that passes only in sleep and, 10 µs each, in looks; what is waited for comes at `due`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due = 0.0
        self.sleeps: list[float] = []
        self.looks = 0

    def monotonic(self) -> float:
        return self.now

    def sched_yield(self) -> None:
        self.looks += 1
        self.now += 10e-6

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now = max(self.now, min(self.now + seconds, self.due))

    def ready(self) -> bool:
        return self.now >= self.due


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(waiting.os, "sched_yield", clock.sched_yield)
    return clock


@pytest.fixture
def waiter(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiter]:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        word = WakeWord(memory, 0)
        monkeypatch.setattr(word, "sleep", clock.sleep)
        yield Waiter(word, Fence(), lambda: None)
        word.release()
        # The address that ctypes took of the memory goes with the word.
        del word


def wait(waiter: Waiter, clock: Clock, seconds: float, timeout: float | None = None) -> bool:
    """Wait for something that comes after `seconds`; what was seen before is forgotten."""
    clock.sleeps.clear()
    clock.looks = 0
    clock.due = clock.now + seconds
    return waiter.wait(clock.ready, timeout)


def test_what_comes_at_once_is_seen_without_sleep(waiter: Waiter, clock: Clock) -> None:
    for _ in range(3):
        assert wait(waiter, clock, SPIN / 2)
        assert not clock.sleeps


def test_what_takes_as_long_as_the_last_time_is_looked_for_when_it_is_due(
    waiter: Waiter, clock: Clock
) -> None:
    assert wait(waiter, clock, 0.002)
    assert clock.sleeps == pytest.approx([LONGEST_SLEEP])
    for _ in range(3):
        assert wait(waiter, clock, 0.002)
        assert clock.sleeps == pytest.approx([0.002 - LEAD], abs=30e-6)
        assert 0 < clock.looks <= LEAD / 10e-6 + 2


def test_what_comes_earlier_than_expected_wakes_the_sleeper(waiter: Waiter, clock: Clock) -> None:
    wait(waiter, clock, 0.01)
    start = clock.now
    assert wait(waiter, clock, 0.003)
    assert clock.now - start == pytest.approx(0.003)
    assert not clock.looks


def test_what_comes_later_than_expected_is_slept_for_after_a_short_look(waiter: Waiter, clock: Clock) -> None:
    wait(waiter, clock, 0.002)
    assert wait(waiter, clock, 0.03)
    assert len(clock.sleeps) == 2
    assert clock.looks <= SPIN / 10e-6 + 1


def test_nothing_is_looked_for_when_a_long_wait_leaves_nothing_due(waiter: Waiter, clock: Clock) -> None:
    wait(waiter, clock, 10.0)
    assert wait(waiter, clock, 10.0)
    assert not clock.looks
    assert wait(waiter, clock, 0.04)
    assert not clock.looks


@pytest.mark.parametrize("last", [0.0, 0.002, 10.0])
@pytest.mark.parametrize("timeout", [0.0, 0.0001, 0.001, 0.2])
def test_a_time_limit_is_kept(waiter: Waiter, clock: Clock, last: float, timeout: float) -> None:
    wait(waiter, clock, last)
    start = clock.now
    assert not wait(waiter, clock, 1.0, timeout)
    assert clock.now - start == pytest.approx(timeout, abs=30e-6)
