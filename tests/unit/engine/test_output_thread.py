"""The output thread: order, buffers, clients that come, go, or do not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import zmq

from nbengine.engine.output_thread import OutputThread
from nbengine.engine.work import COORDINATOR_INDEX, AbortRequests, ThreadFailed
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    AttachClient,
    DetachClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    UtilityOutput,
)
from nbengine.ipc.serial import MsgpackDecoder

TIMEOUT = 5.0


class Rig:
    """An output thread with its queues, and sockets that stand for clients and coordinator."""

    def __init__(self, directory: Path, output_hwm: int = 1000) -> None:
        self.directory = directory
        self.context = zmq.Context()
        self.output_queue: SimpleQueue = SimpleQueue()
        self.input_queue: SimpleQueue = SimpleQueue()
        self.sockets: list[zmq.Socket] = []
        self.coordinator = self.pull("coordinator")
        self.thread = OutputThread(
            self.context, 3, self.address("coordinator"), self.output_queue, self.input_queue, output_hwm
        )
        self.thread.start()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)

    def address(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}"

    def pull(self, name: str) -> zmq.Socket:
        socket = self.context.socket(zmq.PULL)
        socket.bind(self.address(name))
        self.sockets.append(socket)
        return socket

    def attach(self, client_index: int) -> zmq.Socket:
        socket = self.pull(f"client{client_index}")
        self.put(AttachClient(client_index, "", self.address(f"client{client_index}")))
        return socket

    def put(self, item) -> None:
        self.output_queue.put(item)

    def output(self, client_index: int, request_id: str) -> None:
        self.put((client_index, EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [1])])))

    def receive(self, socket: zmq.Socket):
        assert socket.poll(int(TIMEOUT * 1000)), "nothing came"
        frames = socket.recv_multipart()
        return frames[0] if frames == [ENGINE_CORE_DEAD] else self.decoder.decode(frames)

    def end(self) -> None:
        self.put(ENGINE_CORE_DEAD)
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()

    def close(self) -> None:
        if self.thread.is_alive():
            self.end()
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_outputs_go_to_their_client_in_order_with_the_engines_index(rig: Rig) -> None:
    first, second = rig.attach(1), rig.attach(2)
    for number in range(200):
        rig.output(1 + number % 2, f"r{number}")
    for start, socket in enumerate((first, second)):
        received = [rig.receive(socket) for _ in range(100)]
        assert [message.outputs[0].request_id for message in received] == [
            f"r{n}" for n in range(start, 200, 2)
        ]
        assert {message.engine_index for message in received} == {3}


def test_statistics_go_to_the_coordinator(rig: Rig) -> None:
    rig.put((COORDINATOR_INDEX, EngineCoreOutputs(timestamp=5.0)))
    assert rig.receive(rig.coordinator).timestamp == 5.0


def test_large_messages_and_arrays_survive_buffer_reuse(rig: Rig) -> None:
    client = rig.attach(1)
    arrays = [np.full(100_000, number) for number in range(20)]
    for number, array in enumerate(arrays):
        text = str(number) * 100_000
        rig.put((1, EngineCoreOutputs(utility_output=UtilityOutput(number, None, [text, array]))))
    for number in range(20):
        text, array = rig.receive(client).utility_output.result
        assert text == str(number) * 100_000
        assert (array == number).all()


def test_what_is_for_a_client_that_left_is_dropped(rig: Rig) -> None:
    client, other = rig.attach(1), rig.attach(2)
    rig.output(1, "before")
    rig.receive(client)
    rig.put(DetachClient(1))
    rig.output(1, "after")
    rig.output(9, "never attached")
    rig.output(2, "last")
    assert rig.receive(other).outputs[0].request_id == "last"
    assert not client.poll(50)


def test_every_clients_last_message_is_engine_core_dead_and_the_coordinators_is_not(rig: Rig) -> None:
    clients = [rig.attach(1), rig.attach(2)]
    rig.output(1, "r")
    rig.end()
    assert rig.receive(clients[0]).outputs[0].request_id == "r"
    assert [rig.receive(client) for client in clients] == [ENGINE_CORE_DEAD] * 2
    assert not rig.coordinator.poll(50)


def test_a_client_that_does_not_read_is_given_up_and_blocks_nobody(tmp_path: Path, caplog) -> None:
    rig = Rig(tmp_path, output_hwm=10)
    try:
        # Nobody binds this address, so nothing is ever taken.
        rig.put(AttachClient(1, "", rig.address("nobody")))
        reader = rig.attach(2)
        for number in range(50):
            rig.output(1, f"r{number}")
        rig.output(2, "r")
        assert rig.receive(reader).outputs[0].request_id == "r"
        assert rig.input_queue.get(timeout=TIMEOUT) == AbortRequests(1, None)
        assert rig.input_queue.empty()
        assert caplog.text.count("client 1 does not read its outputs") == 1
    finally:
        rig.close()


def test_a_bad_output_address_harms_nobody(rig: Rig, caplog) -> None:
    rig.put(AttachClient(1, "", "nonsense://"))
    rig.output(1, "r")
    other = rig.attach(2)
    rig.output(2, "s")
    assert rig.receive(other).outputs[0].request_id == "s"
    assert "no outputs for client 1" in caplog.text


def test_a_failure_of_the_thread_is_reported_and_still_ends_every_stream(rig: Rig, caplog) -> None:
    client = rig.attach(1)
    rig.put((1, EngineCoreOutputs(utility_output=UtilityOutput(1, None, object()))))
    failed = rig.input_queue.get(timeout=TIMEOUT)
    assert isinstance(failed, ThreadFailed)
    assert failed.thread == "nbengine-output"
    assert rig.receive(client) == ENGINE_CORE_DEAD
    assert "the output thread failed" in caplog.text
