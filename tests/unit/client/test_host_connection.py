"""A connection to the host that cannot be renewed for want of a descriptor stays as it was until it can."""

from __future__ import annotations

import errno
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from nbengine.client.link import host_connection
from nbengine.client.link.host_connection import HostConnection
from nbengine.config import EngineConfig, ModelConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Heartbeat
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.shortage import is_shortage
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import bound_address
from nbengine.runtime.connection import ConnectionInfo


def described(run_dir: Path) -> ConnectionInfo:
    return ConnectionInfo(
        name="n", run_dir=str(run_dir), log_path="", host_pid=0, host_started=0,
        config=EngineConfig(model=ModelConfig("fake")), keys=make_curve_keys(),
    )  # fmt: skip


@pytest.mark.parametrize("what", ["socket", "watch"])
def test_a_broken_connection_is_opened_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    info = described(tmp_path)
    context = info.make_context()
    router = make_socket(context, "tcp://127.0.0.1:*", zmq.ROUTER, bind=True)
    info.addresses["host.sock"] = bound_address(router)
    poller = zmq.Poller()
    connection = HostConnection(info, poller, linger=0)
    connection._broke = True
    errors = [OSError(errno.EMFILE, "short")]

    def scarce(*args: Any, **options: Any) -> Any:
        if errors:
            raise NBEngineError("no socket") from errors.pop()
        return make_socket(*args, **options)

    def unwatched(*_: Any, **named: Any) -> None:
        if errors:
            errors.clear()
            raise zmq.ZMQError(errno.EMFILE)
        announce(*_, **named)

    announce = host_connection.ConnectionWatch.announce
    if what == "socket":
        monkeypatch.setattr(host_connection, "make_socket", scarce)
    else:
        monkeypatch.setattr(host_connection.ConnectionWatch, "announce", unwatched)
    with pytest.raises(NBEngineError) as caught:
        connection.reopen()
    assert is_shortage(caught.value)
    assert connection.look(0.0)
    connection.socket.send(b"over the old one")
    assert router.poll(60_000)
    router.recv_multipart()
    connection.reopen()
    assert not connection.look(0.0)
    connection.socket.send(b"over the new one")
    assert router.poll(60_000)
    assert router.recv_multipart()[1] == b"over the new one"
    connection.close()
    router.close(linger=0)
    context.term()


def test_a_message_to_a_host_that_has_turned_the_connection_down_does_not_wait(tmp_path: Path) -> None:
    info = described(tmp_path)
    context = info.make_context()
    router = make_socket(context, "tcp://127.0.0.1:*", zmq.ROUTER, bind=True)
    info.addresses["host.sock"] = bound_address(router)
    assert info.keys is not None
    info.keys = msgspec.structs.replace(make_curve_keys(), server_public=info.keys.server_public)
    connection = HostConnection(info, zmq.Poller(), linger=0)
    while connection.socket.poll(0, zmq.POLLOUT):
        time.sleep(0.005)
    connection.send(Heartbeat())
    assert not router.poll(0)
    assert connection.unreachable_at < math.inf
    connection.close()
    router.close(linger=0)
    context.term()
