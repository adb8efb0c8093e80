"""Connections that show no key take a bounded part of a process's files, and keys still open the door."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from nbengine.ipc.accept_bound import SHARE, YOUTH, Strangers
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import EngineContext, bound_address, port_of

ROOM = 160
"""Files that the listening process may open besides those it has."""


def test_who_showed_a_key_or_left_is_no_stranger() -> None:
    strangers = Strangers()
    for descriptor in range(10):
        strangers.came(descriptor, 0.0)
    assert strangers.count(0.0) == 10
    for _ in range(3):
        strangers.showed_key(1.0)
    strangers.went(9)
    strangers.went(99)
    assert strangers.count(1.0) == 6


def test_nobody_is_a_stranger_for_longer_than_a_handshake_may_take() -> None:
    strangers = Strangers()
    strangers.came(1, 0.0)
    strangers.came(2, 3.0)
    strangers.showed_key(0.5)
    assert strangers.count(3.0) == 1
    assert strangers.count(YOUTH) == 0
    assert strangers.count(YOUTH + 1.0) == 1
    assert strangers.count(YOUTH + 3.0) == 0


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    strangers = Strangers()
    strangers.came(1, 0.0)
    strangers.went(1)
    strangers.came(1, 5.0)
    assert strangers.count(YOUTH) == 1


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's filters are Linux's")
def test_a_crowd_is_kept_waiting_and_a_key_opens_the_door_when_it_has_gone(
    few_files: None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_curve_keys()
    contexts = [EngineContext.with_keys(keys) for _ in range(2)]
    listener = make_socket(contexts[0], "tcp://127.0.0.1:*", zmq.PULL, bind=True)
    port = port_of(bound_address(listener))
    limit = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
    crowd: list[socket.socket] = []
    # Each stranger here is two descriptors of this process: its own, and the one that it is accepted with.
    end = time.monotonic() + 10.0
    while not caplog.records and time.monotonic() < end and len(crowd) < ROOM // 2:
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect(("127.0.0.1", port))
        crowd.append(stranger)
        listener.poll(2)
    assert "too many connections without a key" in caplog.text
    assert len(crowd) <= limit + 16
    late = socket.socket()
    late.settimeout(0.2)
    with pytest.raises(TimeoutError):
        late.connect(("127.0.0.1", port))
    for stranger in (*crowd, late):
        stranger.close()
    friend = make_socket(contexts[1], f"tcp://127.0.0.1:{port}", zmq.PUSH, bind=False)
    friend.send(b"hello")
    with caplog.at_level(logging.CRITICAL):
        assert listener.poll(60_000)
    assert listener.recv() == b"hello"
    for each in (listener, friend):
        each.close(linger=0)
    for context in contexts:
        context.term()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass
