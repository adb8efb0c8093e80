"""Sockets are private, unbounded, and fail with an error that names the address."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbengine.errors import EngineStartError, NBEngineError, WireError
from nbengine.ipc.control_messages import (
    AttachClient,
    ClientToHost,
    CoreToHost,
    EngineHandshakeMetadata,
    Heartbeat,
    Hello,
    Shutdown,
)
from nbengine.ipc.handshake import ControlDecoder, encode_control, say_hello
from nbengine.ipc.messages import engine_identity
from nbengine.ipc.protocol import PROTOCOL
from nbengine.ipc.sockets import make_socket

MakeSocket = Callable[..., zmq.Socket]


@pytest.fixture
def socket_of() -> Iterator[MakeSocket]:
    """`make_socket` in a context of its own; the context can be ended once the sockets are closed."""
    context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def make(address: str, kind: int, **options: Any) -> zmq.Socket:
        sockets.append(make_socket(context, address, kind, **options))
        return sockets[-1]

    yield make
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def test_a_bound_socket_file_is_its_owners_alone(socket_of: MakeSocket, tmp_path: Path) -> None:
    socket_of(f"ipc://{tmp_path}/s", zmq.PULL, bind=True)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_options_are_set_before_the_socket_is_used(socket_of: MakeSocket) -> None:
    socket = socket_of("inproc://a", zmq.DEALER, bind=True, identity=b"\x01\x00", linger=7)
    assert (socket.routing_id, socket.linger) == (b"\x01\x00", 7)
    assert (socket.sndhwm, socket.rcvhwm) == (0, 0)
    assert socket_of("inproc://b", zmq.PUSH, bind=True, send_hwm=5).sndhwm == 5


@pytest.mark.parametrize(
    "address", ["nonsense", "ipc:///no/such/directory/s", f"ipc:///tmp/{'x' * 200}", "tcp://no.such.host.:1x"]
)
def test_a_bad_address_is_named_and_leaves_no_socket(socket_of: MakeSocket, address: str) -> None:
    with pytest.raises(NBEngineError, match=address[:20]):
        socket_of(address, zmq.PULL, bind=True)


def test_control_messages_survive_and_garbage_does_not() -> None:
    decoder = ControlDecoder(ClientToHost)
    assert decoder.decode(encode_control(Shutdown(drain=True))) == Shutdown(drain=True)
    assert decoder.decode(encode_control(Heartbeat())) == Heartbeat()
    for frame in (b"", b"\xc1", encode_control(Hello(0, 1)), b"\x81\xa4type\x01", b"\x91" * 100_000):
        with pytest.raises(WireError):
            decoder.decode(frame)


@pytest.fixture
def host_and_core(socket_of: MakeSocket) -> tuple[zmq.Socket, zmq.Socket]:
    """A host's ROUTER and a core's DEALER that know each other."""
    host = socket_of("inproc://core", zmq.ROUTER, bind=True)
    core = socket_of("inproc://core", zmq.DEALER, bind=False, identity=engine_identity(3))
    core.send(b"")
    assert host.recv_multipart() == [engine_identity(3), b""]
    return host, core


def test_the_handshake_says_hello_and_takes_the_answer(host_and_core) -> None:
    host, core = host_and_core
    metadata = EngineHandshakeMetadata("in", "out", protocol=PROTOCOL)
    host.send_multipart([engine_identity(3), encode_control(metadata)])
    assert say_hello(core, 3, 42) == metadata
    assert ControlDecoder(CoreToHost).decode(host.recv_multipart()[1]) == Hello(3, 42, protocol=PROTOCOL)


def test_a_silent_host_and_a_wrong_answer_are_start_errors(host_and_core) -> None:
    host, core = host_and_core
    with pytest.raises(EngineStartError, match=r"did not answer engine core 3 within 0.01 s"):
        say_hello(core, 3, 1, timeout_ms=10)
    host.send_multipart([engine_identity(3), encode_control(AttachClient(1, "a", "b"))])
    with pytest.raises(EngineStartError, match="AttachClient"):
        say_hello(core, 3, 1)
