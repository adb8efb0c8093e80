"""The I/O threads of an engine core go on after a shortage, and lose no client and no output to it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from nbengine.engine.core import input_thread, output_thread
from nbengine.engine.core.input_thread import InputThread
from nbengine.engine.core.output_thread import OutputThread
from nbengine.engine.core.work import COORDINATOR_INDEX, AbortRequests, ThreadFailed
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import AttachClient, DetachClient
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.sockets import make_socket

TIMEOUT_MS = 5000

Bind = Callable[[int, str], zmq.Socket]


class Scarce:
    """`make_socket`, which finds no descriptors for `failures` of the sockets to `address`."""

    def __init__(self, address: str, failures: int) -> None:
        self.address, self.failures = address, failures

    def __call__(self, context: zmq.Context, address: str, kind: int, **options: Any) -> zmq.Socket:
        if address == self.address and self.failures:
            self.failures -= 1
            raise NBEngineError(f"cannot connect {address}") from OSError(errno.EMFILE, "short")
        return make_socket(context, address, kind, **options)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def bound(context: zmq.Context) -> Iterator[Bind]:
    """Bind sockets; they are closed after the test."""
    sockets: list[zmq.Socket] = []

    def bind(kind: int, address: str) -> zmq.Socket:
        sockets.append(context.socket(kind))
        sockets[-1].bind(address)
        return sockets[-1]

    yield bind
    for socket in sockets:
        socket.close(linger=0)


def received(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(TIMEOUT_MS), "nothing came"
    return socket.recv_multipart()


class Input:
    """An input thread, with what it is connected to."""

    def __init__(self, context: zmq.Context, bound: Bind, directory: Path) -> None:
        self.host = bound(zmq.DEALER, f"ipc://{directory}/core.sock")
        control = make_socket(context, f"ipc://{directory}/core.sock", zmq.DEALER, bind=False)
        self.address = f"ipc://{directory}/c.in"
        self.client = bound(zmq.ROUTER, self.address)
        self.input_queue: SimpleQueue = SimpleQueue()
        self.output_queue: SimpleQueue = SimpleQueue()
        self.interrupted = threading.Event()
        """Set when steps that are computed at once are to end."""
        self.thread = InputThread(
            context,
            control,
            0,
            lambda request: (request, 0),
            self.input_queue,
            SimpleQueue(),
            self.output_queue,
            self.interrupted.set,
        )
        self.control = control

    def attach(self) -> None:
        self.host.send(encode_control(AttachClient(1, self.address, "ipc://nowhere")))

    def abort(self, name: str, *more: bytes) -> None:
        frames = [*MsgpackEncoder().encode([name]), *more]
        self.client.send_multipart([engine_identity(0), EngineCoreRequestType.ABORT.value, *frames])


@pytest.fixture
def inputs(context: zmq.Context, bound: Bind, tmp_path: Path) -> Iterator[Input]:
    inputs = Input(context, bound, tmp_path)
    yield inputs
    inputs.thread.stop()
    inputs.control.close(linger=0)


def test_a_client_that_there_is_no_descriptor_for_is_attached_later(
    inputs: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(inputs.address, 3)
    monkeypatch.setattr(input_thread, "make_socket", scarce)
    inputs.thread.start()
    inputs.attach()
    assert received(inputs.client)[0] == engine_identity(0)
    assert scarce.failures == 0
    assert isinstance(inputs.output_queue.get(timeout=60), AttachClient)
    # The client is greeted on its outputs, too.
    assert inputs.output_queue.get(timeout=60) == (1, EngineCoreOutputs())
    inputs.abort("r")
    assert inputs.input_queue.get(timeout=60) == AbortRequests(1, ["r"])


def test_the_ends_that_a_client_has_found_itself_are_read_beside_the_others(inputs: Input) -> None:
    inputs.thread.start()
    inputs.attach()
    received(inputs.client)
    inputs.abort("r", *MsgpackEncoder().encode(["r", "s"]))
    assert inputs.input_queue.get(timeout=60) == AbortRequests(1, ["r"], ("r", "s"))
    inputs.abort("r", b"no msgpack")
    inputs.abort("last")
    assert inputs.input_queue.get(timeout=60) == AbortRequests(1, ["last"])


def test_what_has_come_does_not_wait_for_steps_that_are_computed_at_once(inputs: Input) -> None:
    inputs.thread.start()
    inputs.attach()
    received(inputs.client)
    assert inputs.interrupted.wait(60)
    inputs.interrupted.clear()
    inputs.abort("r")
    assert inputs.interrupted.wait(60)
    # It is set behind what it announces.
    assert inputs.input_queue.get_nowait() == AbortRequests(1, ["r"])


def test_a_client_that_leaves_before_it_was_attached_is_not_attached_any_more(
    inputs: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(inputs.address, 1)
    monkeypatch.setattr(input_thread, "make_socket", scarce)
    monkeypatch.setattr("nbengine.ipc.shortage.FIRST_PAUSE", 30.0)
    inputs.thread.start()
    inputs.attach()
    inputs.host.send(encode_control(DetachClient(1)))
    assert isinstance(inputs.input_queue.get(timeout=60), DetachClient)
    assert inputs.thread._to_attach == {}
    assert inputs.output_queue.empty()


def fail_once(errors: list[Exception], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes the error out of `errors` and raises it, and does `then` when there is none."""

    def call(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return then(*args)

    return call


def test_an_input_thread_whose_poll_meets_a_shortage_goes_on(
    inputs: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller = inputs.thread._poller
    errors: list[Exception] = [zmq.ZMQError(errno.ENOMEM)]
    monkeypatch.setattr(poller, "poll", fail_once(errors, poller.poll))
    inputs.thread.start()
    inputs.attach()
    assert received(inputs.client)
    assert not errors


def test_an_input_thread_with_a_bug_ends_the_core(inputs: Input, monkeypatch: pytest.MonkeyPatch) -> None:
    poller = inputs.thread._poller
    monkeypatch.setattr(poller, "poll", fail_once([RuntimeError("a bug")], poller.poll))
    inputs.thread.start()
    failed = inputs.input_queue.get(timeout=60)
    assert isinstance(failed, ThreadFailed)
    assert str(failed.error) == "a bug"


def test_outputs_of_a_client_that_there_is_no_descriptor_for_wait_for_it(
    context: zmq.Context, bound: Bind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("coordinator", "c.out", "d.out")}
    pulls = {name: bound(zmq.PULL, address) for name, address in addresses.items()}
    scarce = Scarce(addresses["c.out"], 3)
    monkeypatch.setattr(output_thread, "make_socket", scarce)
    output_queue: SimpleQueue = SimpleQueue()
    thread = OutputThread(context, 0, addresses["coordinator"], output_queue, SimpleQueue())
    thread.start()
    output_queue.put(AttachClient(1, "", addresses["c.out"]))
    output_queue.put(AttachClient(2, "", addresses["d.out"]))
    for index in (1, 2):
        for token in range(5):
            output_queue.put((index, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [token])])))
    decoder = MsgpackDecoder(EngineCoreOutputs)
    for name in ("d.out", "c.out"):
        tokens: list[int] = []
        while len(tokens) < 5:
            for output in decoder.decode(received(pulls[name])).outputs:
                tokens += output.new_token_ids
        assert tokens == list(range(5))
    assert scarce.failures == 0
    output_queue.put((COORDINATOR_INDEX, EngineCoreOutputs()))
    output_queue.put(ENGINE_CORE_DEAD)
    thread.join(60)
    assert [received(pulls[name])[0] for name in ("c.out", "d.out")] == [ENGINE_CORE_DEAD] * 2


def test_a_client_without_a_socket_can_leave_and_the_end_does_not_wait_for_it(
    context: zmq.Context, bound: Bind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(zmq.PULL, f"ipc://{tmp_path}/coordinator")
    monkeypatch.setattr(output_thread, "make_socket", Scarce("ipc://late", 1 << 30))
    output_queue: SimpleQueue = SimpleQueue()
    thread = OutputThread(context, 0, f"ipc://{tmp_path}/coordinator", output_queue, SimpleQueue())
    thread.start()
    for index in (1, 2):
        output_queue.put(AttachClient(index, "", "ipc://late"))
        output_queue.put((index, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])])))
    output_queue.put(DetachClient(1))
    output_queue.put(ENGINE_CORE_DEAD)
    thread.join(60)
    assert not thread.is_alive()
