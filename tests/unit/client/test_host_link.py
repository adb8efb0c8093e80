"""A client's link to the host, whose part the test plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from nbengine.client.link import host_link
from nbengine.client.link.host_link import HostLink
from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Attached, ClientToHost, Detach, EngineDead, EngineReady
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


@pytest.fixture
def told(info: ConnectionInfo, host: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a link see that its host, which has had the exit status `status`, is gone, and only then send what it has
    said, if anything; gives what the link makes of it."""

    def tell(status: int | None, cause: str | None, patience: float) -> str:
        monkeypatch.setattr(host_link, "WATCH_INTERVAL", 0.01)
        monkeypatch.setattr(host_link, "LAST_WORDS_PATIENCE", patience)
        monkeypatch.setattr(host_link, "host_status", lambda _: status)
        listener, seen = Mock(), threading.Event()
        link = HostLink(info, "s", "in", "out", listener)
        # It would end what is left of the engine, whose host is this process here.
        monkeypatch.setattr(link, "_end", Mock())
        link.start()
        identity, _ = host.recv_multipart()
        monkeypatch.setattr(link._watch, "host_gone", lambda: seen.set() or True)
        assert seen.wait(60)
        if cause is not None:
            host.send_multipart([identity, encode_control(EngineDead(cause, "a log", started=True))])
        link.join(60)
        (error,) = listener.on_dead.call_args.args
        return str(error)

    return tell


def test_a_host_that_is_gone_is_heard_to_the_end(told: Any) -> None:
    assert "engine core 0 was killed" in told(1, "engine core 0 was killed", 60.0)


@pytest.mark.parametrize(("status", "patience"), [(1, 0.0), (-9, 3600.0)], ids=["silent", "killed"])
def test_a_host_that_has_said_nothing_or_was_killed_is_not_waited_for(
    told: Any, status: int, patience: float
) -> None:
    assert "the engine's host process" in told(status, None, patience)
