"""The thread of a client's own and the shared loop treat sockets and functions alike."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from nbengine.client.threads.loop_thread import LoopThread
from nbengine.client.threads.own_thread import OwnThread
from nbengine.client.threads.shared_loop import SharedLoop
from nbengine.client.threads.socket_thread import SocketThread
from nbengine.ipc.shortage import Setbacks

PATIENCE = 60.0


class Pair:
    """A socket that the thread reads, and the other end of it."""

    def __init__(self, thread: SocketThread) -> None:
        self.thread = thread
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.far = self.context.socket(zmq.PAIR)
        self.far.bind("inproc://pair")
        self.near = self.context.socket(zmq.PAIR)
        self.near.connect("inproc://pair")
        self.handle: Callable[[Any], None] = lambda frames: self.heard.put(frames[0])
        self.heard: SimpleQueue[Any] = SimpleQueue()
        self.closed_on: list[threading.Thread] = []

    def open(self) -> None:
        self.thread.watch(self.near, lambda frames: self.handle(frames))

    def close(self) -> None:
        if not self.near.closed:
            self.closed_on.append(threading.current_thread())
            self.thread.unwatch(self.near)
            self.near.close()


@pytest.fixture(params=["own thread", "shared loop"])
def thread(request: pytest.FixtureRequest) -> Iterator[SocketThread]:
    setbacks = Setbacks(logging.getLogger(__name__), "a test falters")
    if request.param == "own thread":
        yield OwnThread(setbacks)
        return
    loop_thread = LoopThread()
    yield SharedLoop(loop_thread, setbacks)
    loop_thread.stop()


@pytest.fixture
def failures() -> SimpleQueue[BaseException]:
    return SimpleQueue()


@pytest.fixture
def pair(thread: SocketThread, failures: SimpleQueue[BaseException]) -> Iterator[Pair]:
    pair = Pair(thread)
    thread.start(pair, failures.put)
    yield pair
    thread.close()
    pair.far.close(linger=0)
    pair.context.term()
    assert len(pair.closed_on) == 1


def test_messages_are_handled_in_their_order_on_one_thread_that_is_not_the_callers(
    pair: Pair, failures: SimpleQueue[BaseException]
) -> None:
    threads = set()

    def handle(frames: Any) -> None:
        threads.add(threading.current_thread())
        pair.heard.put(frames[0])

    pair.handle = handle
    for number in range(500):
        pair.far.send(b"%d" % number)
    assert [pair.heard.get(timeout=PATIENCE) for _ in range(500)] == [b"%d" % n for n in range(500)]
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert failures.empty()


def test_functions_run_in_the_order_of_the_calls_on_the_thread_of_the_messages(
    pair: Pair, thread: SocketThread
) -> None:
    for number in range(100):
        thread.run_soon(lambda n: pair.heard.put((n, threading.current_thread())), number)
    ran = [pair.heard.get(timeout=PATIENCE) for _ in range(100)]
    assert [number for number, _ in ran] == list(range(100))
    pair.handle = lambda frames: pair.heard.put(threading.current_thread())
    pair.far.send(b"x")
    assert {where for _, where in ran} == {pair.heard.get(timeout=PATIENCE)}


def test_a_message_that_comes_while_the_thread_sends_is_read(pair: Pair, thread: SocketThread) -> None:
    def send() -> None:
        pair.near.send(b"question")
        # The answer is there before the thread waits again: sending has used up the news of it.
        assert pair.far.recv() == b"question"
        pair.far.send(b"answer")
        thread.on_sent(pair.near)

    thread.run_soon(send)
    assert pair.heard.get(timeout=PATIENCE) == b"answer"


def test_a_function_that_meets_a_shortage_is_called_again_and_what_came_after_it_runs(
    pair: Pair, thread: SocketThread, failures: SimpleQueue[BaseException]
) -> None:
    tries = []

    def falter() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "no descriptor")
        pair.heard.put("done")

    thread.run_soon(falter)
    thread.run_soon(pair.heard.put, "after")
    assert {pair.heard.get(timeout=PATIENCE) for _ in range(2)} == {"done", "after"}
    assert len(tries) == 3
    assert failures.empty()


def test_another_failure_is_told_once(
    pair: Pair, thread: SocketThread, failures: SimpleQueue[BaseException]
) -> None:
    def fail() -> None:
        raise ArithmeticError("a defect")

    thread.run_soon(fail)
    assert isinstance(failures.get(timeout=PATIENCE), ArithmeticError)
    thread.close()
    assert failures.empty()


def test_the_sockets_are_closed_on_their_thread_before_close_returns(
    pair: Pair, thread: SocketThread
) -> None:
    thread.close()
    assert pair.near.closed
    assert threading.current_thread() not in pair.closed_on
    thread.close()
