"""A client's link to the host, whose part the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from nbengine.client.link.host_link import HostLink
from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Attached, ClientToHost, Detach, EngineReady
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.liveness import this_process
from nbengine.ipc.protocol import PROTOCOL
from nbengine.runtime.connection import ConnectionInfo


class Listener:
    """Fails when it hears of a lease."""

    def __init__(self) -> None:
        self.error: NBEngineError | None = None

    def on_attached(self, *_: object) -> None:
        raise ArithmeticError("a defect")

    def on_ready(self, ready: EngineReady) -> None: ...

    def on_dead(self, error: NBEngineError) -> None:
        self.error = error


@pytest.fixture
def info(tmp_path: Path) -> ConnectionInfo:
    process = this_process()
    return ConnectionInfo(
        name="e",
        run_dir=str(tmp_path),
        log_path="",
        host_pid=process.pid,
        host_started=process.started,
        config=EngineConfig(),
    )


@pytest.fixture
def host(info: ConnectionInfo) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(info.address("host.sock"))
        socket.rcvtimeo = 10_000
        yield socket


def test_a_link_that_fails_gives_its_lease_back_since_its_process_goes_on(
    info: ConnectionInfo, host: zmq.Socket[bytes]
) -> None:
    listener = Listener()
    link = HostLink(info, "s", "in", "out", listener)  # type: ignore[arg-type]
    link.start()
    identity, _ = host.recv_multipart()
    host.send_multipart([identity, encode_control(Attached(1, [0], protocol=PROTOCOL))])
    link.join()
    assert "a defect" in str(listener.error)
    _, frame = host.recv_multipart()
    assert ControlDecoder[ClientToHost](ClientToHost).decode(frame) == Detach()
