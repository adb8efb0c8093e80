"""Connections that stand still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbengine.server.connections import Sweeper


class FakeConnection:
    """A connection as uvicorn keeps it."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.cycle: Any = None
        self.timeout_keep_alive_task: Any = None
        self.unsent = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True

    def answering(self, value: bool = True) -> FakeConnection:
        self.cycle = SimpleNamespace(response_complete=not value)
        return self


def test_one_that_never_completes_its_headers_is_ended() -> None:
    sweeper, silent = Sweeper(30, 60), FakeConnection()
    assert sweeper.sweep([silent], 0) == []
    assert sweeper.sweep([silent], 29) == []
    assert sweeper.sweep([silent], 30) == [silent]
    assert silent.is_aborted


def test_one_that_is_answered_or_waits_between_requests_stays() -> None:
    sweeper = Sweeper(30, 60)
    answered, idle = FakeConnection().answering(), FakeConnection().answering(False)
    idle.timeout_keep_alive_task = object()
    for now in range(0, 1000, 10):
        assert sweeper.sweep([answered, idle], now) == []


def test_one_that_begins_a_second_request_and_stops_is_ended() -> None:
    sweeper, begun = Sweeper(30, 60), FakeConnection().answering(False)
    begun.timeout_keep_alive_task = object()
    sweeper.sweep([begun], 0)
    begun.timeout_keep_alive_task = None
    sweeper.sweep([begun], 100)
    assert sweeper.sweep([begun], 130) == [begun]


def test_one_that_reads_nothing_is_ended_and_one_that_reads_slowly_stays() -> None:
    sweeper = Sweeper(30, 60)
    stuck, slow = FakeConnection().answering(), FakeConnection().answering()
    stuck.unsent = slow.unsent = 100_000
    for now in range(0, 60, 10):
        slow.unsent -= 1
        assert sweeper.sweep([stuck, slow], now) == []
    slow.unsent -= 1
    assert sweeper.sweep([stuck, slow], 60) == [stuck]


def test_nothing_is_kept_of_connections_that_are_gone() -> None:
    sweeper = Sweeper(30, 60)
    for now in range(100):
        sweeper.sweep([FakeConnection(), FakeConnection().answering()], now)
    sweeper.sweep([], 100)
    assert not sweeper._silent_since
    assert not sweeper._unread
