"""The output thread: order, buffers, clients that come, go, or do not read."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import zmq

from nbengine.engine.core import output_thread
from nbengine.engine.core.output_thread import MAX_LARGE_BYTES, OUTPUT_HWM, PATIENCE, OutputThread
from nbengine.engine.core.work import COORDINATOR_INDEX, AbortRequests, GiveUpClient, ThreadFailed, failure
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import AttachClient, DetachClient
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from nbengine.ipc.serial import MsgpackDecoder

TIMEOUT = 60.0


class Rig:
    """An output thread with its queues, and sockets that stand for clients and coordinator."""

    def __init__(self, directory: Path, backlog_limit: int = 64 << 20) -> None:
        self.directory = directory
        self.context = zmq.Context()
        self.output_queue: SimpleQueue = SimpleQueue()
        self.input_queue: SimpleQueue = SimpleQueue()
        self.sockets: list[zmq.Socket] = []
        self.coordinator = self.pull("coordinator")
        self.thread = OutputThread(
            self.context, 3, self.address("coordinator"), self.output_queue, self.input_queue, backlog_limit
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
        return frames[0] if frames[0] == ENGINE_CORE_DEAD else self.decoder.decode(frames)

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
        expected = [f"r{n}" for n in range(start, 200, 2)]
        received: list[str] = []
        while len(received) < len(expected):
            message = rig.receive(socket)
            received += [output.request_id for output in message.outputs]
            assert message.engine_index == 3
        assert received == expected


def test_a_shortage_at_the_start_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, left = output_thread.make_socket, [3]

    def falter(*args: Any, **options: Any) -> zmq.Socket:
        left[0] -= 1
        if left[0] >= 0:
            raise NBEngineError("cannot connect") from OSError(errno.EMFILE, "short")
        return make(*args, **options)

    monkeypatch.setattr(output_thread, "make_socket", falter)
    rig = Rig(tmp_path)
    rig.put((COORDINATOR_INDEX, EngineCoreOutputs(timestamp=5.0)))
    assert rig.receive(rig.coordinator).timestamp == 5.0
    assert rig.input_queue.empty()
    rig.close()


def test_a_shortage_that_does_not_end_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def falter(*args: Any, **options: Any) -> zmq.Socket:
        raise NBEngineError("cannot connect") from OSError(errno.EMFILE, "short")

    monkeypatch.setattr(output_thread, "make_socket", falter)
    monkeypatch.setattr(output_thread, "COORDINATOR_TIMEOUT", 0.05)
    rig = Rig(tmp_path)
    failed = rig.input_queue.get(timeout=TIMEOUT)
    assert isinstance(failed, ThreadFailed)
    assert str(failed.error) == "cannot connect"
    rig.thread.join(TIMEOUT)
    rig.close()


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


def attach_nobody(rig: Rig, client_index: int) -> None:
    """A client whose address nobody binds, so that nothing is ever taken."""
    rig.put(AttachClient(client_index, "", rig.address(f"client{client_index}")))


def tokens_by_request(messages: list[EngineCoreOutputs]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for message in messages:
        for output in message.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_a_client_that_reads_late_gets_everything_once_in_order_and_in_few_messages(rig: Rig) -> None:
    attach_nobody(rig, 1)
    reader = rig.attach(2)
    for token in range(5000):
        rig.put((1, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [token])])))
    answer = UtilityOutput(7, None, "between")
    rig.put((1, EngineCoreOutputs(utility_output=answer)))
    rig.put((1, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5000], FinishReason.STOP)])))
    rig.output(2, "done")
    rig.receive(reader)
    late = rig.pull("client1")
    messages = [rig.receive(late)]
    while not (messages[-1].outputs and messages[-1].outputs[-1].finished):
        messages.append(rig.receive(late))
    assert tokens_by_request(messages) == {"r": list(range(5001))}
    assert len(messages) <= OUTPUT_HWM + 3
    assert [m.utility_output for m in messages if m.utility_output is not None] == [answer]
    assert messages[-2].utility_output == answer
    assert {m.engine_index for m in messages} == {3}
    rig.output(1, "afterwards")
    assert rig.receive(late).outputs[0].request_id == "afterwards"


def test_of_large_messages_few_are_on_their_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backlog_limit=1 << 20)
    try:
        attach_nobody(rig, 1)
        reader = rig.attach(2)
        text = "x" * (1 << 20)
        for number in range(10):
            rig.put((1, EngineCoreOutputs(utility_output=UtilityOutput(number, None, text))))
        # All of it is on its way or waits when the client begins to read.
        rig.output(2, "told")
        assert rig.receive(reader).outputs[0].request_id == "told"
        assert rig.input_queue.get(timeout=TIMEOUT).client_index == 1
        late = rig.pull("client1")
        answers = [rig.receive(late).utility_output for _ in range(10)]
        assert [answer.call_id for answer in answers] == list(range(10))
        whole = [answer for answer in answers if answer.failure_message is None]
        assert len(whole) == MAX_LARGE_BYTES >> 20
        assert all(answer.result == text for answer in whole)
    finally:
        rig.close()


def test_a_client_that_leaves_too_much_unread_is_given_up_and_blocks_nobody(tmp_path: Path, caplog) -> None:
    rig = Rig(tmp_path, backlog_limit=20_000)
    try:
        attach_nobody(rig, 1)
        reader = rig.attach(2)
        for token in range(OUTPUT_HWM + 1000):
            rig.put((1, EngineCoreOutputs(outputs=[EngineCoreOutput("runs", [token])])))
        rig.output(2, "r")
        assert rig.receive(reader).outputs[0].request_id == "r"
        given_up = rig.input_queue.get(timeout=TIMEOUT)
        assert isinstance(given_up, GiveUpClient)
        assert given_up.client_index == 1
        assert "client_backlog_bytes=20000" in given_up.reason
        assert rig.input_queue.empty()
        assert caplog.text.count("client 1 is given up") == 1
        # What the busy loop answers, and a request that comes later.
        rig.put((1, EngineCoreOutputs(outputs=[failure("runs", given_up.reason)])))
        rig.output(1, "new")
        # All of it waits when the client begins to read.
        rig.output(2, "told")
        assert rig.receive(reader).outputs[0].request_id == "told"
        late = rig.pull("client1")
        messages = [rig.receive(late) for _ in range(OUTPUT_HWM + 1)]
        first = tokens_by_request(messages[:OUTPUT_HWM])["runs"]
        assert first == list(range(OUTPUT_HWM))
        end, new = messages[-1].outputs
        assert (end.request_id, end.new_token_ids, end.finish_reason) == ("runs", [], FinishReason.ERROR)
        assert end.error == given_up.reason
        assert (new.request_id, new.new_token_ids) == ("new", [1])
    finally:
        rig.close()


def test_a_client_with_too_many_errors_to_tell_is_detached(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backlog_limit=1000)
    try:
        attach_nobody(rig, 1)
        for number in range(OUTPUT_HWM + 10):
            rig.put((1, EngineCoreOutputs(utility_output=UtilityOutput(number, None, "x" * 300))))
        items = [rig.input_queue.get(timeout=TIMEOUT)]
        while not isinstance(items[-1], AbortRequests):
            items.append(rig.input_queue.get(timeout=TIMEOUT))
        assert items[-1] == AbortRequests(1, None)
    finally:
        rig.close()


def test_what_waits_for_a_slow_reader_still_comes_before_the_end(rig: Rig) -> None:
    attach_nobody(rig, 1)
    reader = rig.attach(2)
    for token in range(1000):
        rig.put((1, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [token])])))
    rig.output(2, "done")
    rig.receive(reader)
    # ZeroMQ tries the address again each tenth of a second, on a busy machine later.
    rig.thread.patience = TIMEOUT
    late = rig.pull("client1")
    rig.put(ENGINE_CORE_DEAD)
    messages = []
    while (message := rig.receive(late)) != ENGINE_CORE_DEAD:
        messages.append(message)
    assert tokens_by_request(messages) == {"r": list(range(1000))}


def test_with_patience_a_client_that_reads_late_gets_everything_and_the_others_do_not_wait(rig: Rig) -> None:
    attach_nobody(rig, 1)
    reader = rig.attach(2)
    for token in range(1000):
        rig.put((1, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [token])])))
    rig.thread.patience = TIMEOUT
    rig.put(ENGINE_CORE_DEAD)
    assert rig.receive(reader) == ENGINE_CORE_DEAD
    # The other one has long been beyond the usual patience when it begins to read.
    time.sleep(2 * PATIENCE)
    late = rig.pull("client1")
    messages = []
    while (message := rig.receive(late)) != ENGINE_CORE_DEAD:
        messages.append(message)
    assert tokens_by_request(messages) == {"r": list(range(1000))}


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
