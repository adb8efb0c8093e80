"""A host that does not answer its client is missed, and one that the client could not hear is not."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nbengine.client.link import host_answers
from nbengine.client.link.host_answers import PAUSE, HostAnswers
from nbengine.client.link.stalls import HOST_RANK, Stalls
from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError
from nbengine.ipc.control_messages import Stalled
from nbengine.ipc.liveness import ProcessState

INTERVAL = 5.0


class Link:
    """The part of a link that runs every half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        info = SimpleNamespace(host_pid=os.getpid(), is_here=True, config=EngineConfig())
        self.answers = HostAnswers(info, INTERVAL)
        self.now = 100.0
        self.state = ProcessState.RUNNING
        monkeypatch.setattr(host_answers, "what_holds", lambda _: self.state)

    def looks(self, seconds: float) -> list[Stalled]:
        told = []
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            told.append(self.answers.look(self.now))
        return [stalled for stalled in told if stalled is not None]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    return Link(monkeypatch)


def test_a_heartbeat_without_an_answer_is_told_of_once_and_so_is_the_answer(link: Link) -> None:
    link.answers.asked(link.now)
    assert link.looks(2 * INTERVAL - 0.5) == []
    assert link.looks(30) == [Stalled(HOST_RANK, 2 * INTERVAL, f"pid {os.getpid()}")]
    assert link.answers.answered()
    assert not link.answers.answered()
    assert link.looks(60) == []


def test_a_stopped_host_is_told_of_with_the_reason(link: Link) -> None:
    link.state = ProcessState.STOPPED
    (stalled,) = link.looks(30)
    assert stalled.doing == "its process is stopped (SIGSTOP?)"
    assert 10 <= stalled.seconds < 11


def test_a_host_that_is_stopped_shortly_before_its_silence_is_told_of_is_told_of_with_that_reason(
    link: Link,
) -> None:
    link.answers.asked(link.now)
    assert link.looks(2 * INTERVAL - 1) == []
    link.state = ProcessState.STOPPED
    assert link.looks(30) == [Stalled(HOST_RANK, 2 * INTERVAL, "its process is stopped (SIGSTOP?)")]


def test_a_client_that_did_not_run_itself_misses_nobody(link: Link) -> None:
    link.answers.asked(link.now)
    link.looks(1)
    link.now += 3600
    assert link.looks(2 * INTERVAL - 0.5) == []


def test_who_asks_gets_the_answer_to_a_later_heartbeat_or_the_end(link: Link) -> None:
    answers = link.answers
    answers.asked(link.now)
    first, cancelled = answers.ask(), answers.ask()
    cancelled.cancel()
    answers.asked(link.now)
    later: Future[None] = answers.ask()
    answers.answered()
    assert not first.done()
    answers.answered()
    assert first.done()
    assert first.result() is None
    answers.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        later.result(0)


def test_stalls_are_one_line_each_of_host_and_cores_until_they_are_over() -> None:
    stalls = Stalls()
    assert stalls.describe() is None
    stalls.note(Stalled(1, 41.8, "in step 1,234"))
    stalls.note(Stalled(HOST_RANK, 12.0, "pid 7"))
    assert stalls.describe(1) == "core 1: no progress for 42 s, in step 1,234"
    assert stalls.describe() == f"host: no answer for 12 s, pid 7; {stalls.describe(1)}"
    stalls.clear(HOST_RANK)
    assert stalls.ranks == [1]
    stalls.clear()
    assert stalls.describe(1) is None


def test_those_who_ask_share_a_heartbeat_and_none_comes_too_soon_after_another(link: Link) -> None:
    answers = link.answers
    assert answers.due == math.inf
    first = answers.ask()
    # The link waits until this time, in whole milliseconds: infinitely long ago is none.
    assert answers.due == 0.0
    answers.asked(link.now)
    assert answers.due == math.inf
    second, third = answers.ask(), answers.ask()
    assert answers.due == link.now + PAUSE
    answers.answered()
    assert first.done()
    assert not second.done()
    answers.asked(link.now + PAUSE)
    answers.answered()
    assert second.done()
    assert third.done()
