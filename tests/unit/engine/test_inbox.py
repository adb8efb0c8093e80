"""The host reads a bounded number of messages in a turn, of which one peer has a bounded share."""

from __future__ import annotations

import logging
import math
import os
import select
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbengine.engine.host.inbox import MESSAGES_A_SECOND, MESSAGES_A_TURN, Inbox, RateLimit
from nbengine.engine.host.subscribers import (
    STRANGE_TOPICS,
    SUBSCRIPTION_HWM,
    WISH_INTERVAL,
    Subscribers,
    Wishes,
)
from nbengine.errors import WireError
from nbengine.ipc.control_messages import WantEvents
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.sockets import make_socket

FLOOD = 4 * MESSAGES_A_TURN
OpenSocket = Callable[..., zmq.Socket[bytes]]
LOG = PeerLog(logging.getLogger("test"))


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def make(kind: int, address: str, **options: Any) -> zmq.Socket[bytes]:
        sockets.append(make_socket(context, address, kind, **options))
        return sockets[-1]

    yield make
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def read(inbox: Inbox, now: float) -> list[tuple[bytes, list[bytes]]]:
    return list(inbox.read(now))


def test_the_message_of_a_quiet_peer_comes_in_the_next_turn_whatever_another_sends(
    open_socket: OpenSocket,
) -> None:
    host = open_socket(zmq.ROUTER, "inproc://host", bind=True)
    loud = open_socket(zmq.DEALER, "inproc://host", bind=False, identity=b"loud")
    quiet = open_socket(zmq.DEALER, "inproc://host", bind=False, identity=b"quiet")
    inbox = Inbox(host, LOG, most_a_second=math.inf)
    for _ in range(FLOOD):
        loud.send(b"heartbeat")
    assert len(read(inbox, 0.0)) == MESSAGES_A_TURN
    quiet.send(b"attach")
    assert (b"quiet", [b"attach"]) in read(inbox, 0.0)


def test_of_a_flood_a_bounded_number_of_messages_is_heard_in_a_second(
    open_socket: OpenSocket, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_socket(zmq.ROUTER, "inproc://host", bind=True)
    loud = open_socket(zmq.DEALER, "inproc://host", bind=False, identity=b"loud")
    inbox = Inbox(host, PeerLog(logging.getLogger("test")))
    for _ in range(FLOOD):
        loud.send(b"heartbeat")
    heard = [len(read(inbox, 0.5 * turn)) for turn in range(4)]
    assert heard == [MESSAGES_A_SECOND, 0, MESSAGES_A_SECOND, 0]
    assert 0 < len(caplog.records) <= 10
    assert f"b'loud', which sends more than {MESSAGES_A_SECOND} a second" in caplog.text


def test_a_rate_is_counted_for_each_peer_and_forgotten() -> None:
    limit = RateLimit(2)
    assert [limit.allows(b"a", 0.0), limit.allows(b"a", 0.0), limit.allows(b"a", 0.9)] == [True, True, False]
    assert limit.allows(b"b", 0.9)
    assert limit.allows(b"a", 1.0)
    assert len(limit._counts) == 1


# Subscriptions.


def drain(subscribers: Subscribers) -> tuple[list[list[bytes]], int]:
    """Read everything that is there; return the messages, and how many were none."""
    heard, refused = [], 0
    while True:
        try:
            heard.append(subscribers.receive())
        except zmq.Again:
            return heard, refused
        except WireError:
            refused += 1


def test_a_subscriber_to_topics_that_there_are_not_loses_its_connection_and_others_keep_theirs(
    open_socket: OpenSocket, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/stats"
    publisher = open_socket(zmq.XPUB, address, bind=True, receive_hwm=SUBSCRIPTION_HWM)
    subscribers = Subscribers(publisher, [b"stats", b"kv"], LOG)
    follower = open_socket(zmq.SUB, address, bind=False)
    follower.subscribe(b"stats")
    assert publisher.poll(60_000)
    assert drain(subscribers) == ([[b"\x01stats"]], 0)
    stranger = open_socket(zmq.XSUB, address, bind=False)
    watch = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    end = time.monotonic() + 10
    number, refused = 0, 0
    while not watch.poll(0):
        assert time.monotonic() < end, f"not cut after {number} topics"
        stranger.send(b"\x01topic%d" % number)
        number += 1
        if publisher.poll(10):
            heard, more = drain(subscribers)
            assert heard == []
            refused += more
    assert refused > STRANGE_TOPICS
    stranger.disable_monitor()
    stranger.close()
    watch.close()
    publisher.send_multipart([b"stats", b"news"])
    assert follower.poll(60_000)
    assert follower.recv_multipart() == [b"stats", b"news"]


STRANGER = """
import sys, zmq
socket = zmq.Context().socket(zmq.XSUB)
socket.connect(sys.argv[1])
for number in range(int(sys.argv[2])):
    socket.send(b"\\1topic%d" % number)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_connection_with_the_number_of_a_strangers_that_has_ended_is_not_cut(
    tmp_path: Path, transport: str
) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.XPUB) as publisher,
        connected(transport, tmp_path) as (end, other),
    ):
        publisher.bind(f"ipc://{tmp_path}/stats" if transport == "ipc" else "tcp://127.0.0.1:*")
        subscribers = Subscribers(publisher, [b"stats"], LOG)
        with publisher.get_monitor_socket(zmq.EVENT_ACCEPTED) as watch:
            command = [sys.executable, "-c", STRANGER, publisher.last_endpoint, str(10 * STRANGE_TOPICS)]
            with subprocess.Popen(command, stdin=subprocess.PIPE):
                descriptor = recv_monitor_message(watch)["value"]
                assert publisher.poll(60_000)
            publisher.disable_monitor()
        # The stranger is gone before any of its messages is read.
        wait_until_closed(descriptor)
        os.dup2(end.fileno(), descriptor)
        try:
            refused = drain(subscribers)[1]
            assert refused > STRANGE_TOPICS
            assert not select.select([other], [], [], 0)[0], "cut"
        finally:
            os.close(descriptor)


def wait_until_closed(descriptor: int) -> None:
    """Wait until ZeroMQ has closed a file, which it does not announce."""
    deadline = time.monotonic() + 10
    with suppress(OSError):
        while os.fstat(descriptor):
            assert time.monotonic() < deadline, "the connection stands"
            time.sleep(0.002)


@contextmanager
def connected(transport: str, path: Path) -> Iterator[tuple[sockets.socket, sockets.socket]]:
    """A connection of this process to another address, from the end that has accepted it."""
    family = sockets.AF_UNIX if transport == "ipc" else sockets.AF_INET
    with sockets.socket(family) as listener, sockets.socket(family) as other:
        listener.bind(str(path / "clients") if transport == "ipc" else ("127.0.0.1", 0))
        listener.listen()
        other.connect(listener.getsockname())
        with listener.accept()[0] as end:
            yield end, other


@pytest.mark.parametrize("topic", [b"", b"st", b"stats", b"kv"])
def test_topics_may_be_given_by_their_beginning(
    open_socket: OpenSocket, tmp_path: Path, topic: bytes
) -> None:
    publisher = open_socket(zmq.XPUB, f"ipc://{tmp_path}/stats", bind=True)
    follower = open_socket(zmq.SUB, f"ipc://{tmp_path}/stats", bind=False)
    follower.subscribe(topic)
    assert publisher.poll(60_000)
    assert drain(Subscribers(publisher, [b"stats", b"kv"], LOG)) == ([[b"\x01" + topic]], 0)


def test_engine_cores_are_asked_for_snapshots_at_a_bounded_rate() -> None:
    wishes = Wishes()
    assert (wishes.take(0.0), wishes.deadline) == ([], math.inf)
    told = []
    for millisecond in range(200):
        for wanted in (True, False, True):
            wishes.note("kv", wanted)
            told += wishes.take(millisecond / 1000)
    assert 200 / 1000 / WISH_INTERVAL <= sum(wish.wanted for wish in told) <= 200 / 1000 / WISH_INTERVAL + 1
    assert len(told) <= 2 * (200 / 1000 / WISH_INTERVAL + 1)
    wishes.note("trace", True)
    assert wishes.take(0.199) == [WantEvents("trace", True)]


def test_engine_cores_hear_at_once_that_nobody_follows_them_and_of_the_newest_wish_in_the_end() -> None:
    wishes = Wishes()
    wishes.note("kv", True)
    # The host waits until this time, in whole milliseconds: infinitely long ago is none.
    assert wishes.deadline == 0.0
    assert wishes.take(0.0) == [WantEvents("kv", True)]
    wishes.note("kv", False)
    assert wishes.take(0.0) == [WantEvents("kv", False)]
    wishes.note("kv", True)
    assert (wishes.take(0.0), wishes.deadline) == ([], WISH_INTERVAL)
    assert wishes.take(WISH_INTERVAL) == [WantEvents("kv", True)]
    assert wishes.deadline == math.inf


def test_followers_that_come_and_go_before_they_are_told_of_are_not_told_of() -> None:
    wishes = Wishes()
    for wanted in (True, False):
        wishes.note("kv", wanted)
    assert (wishes.take(0.0), wishes.deadline) == ([], math.inf)
