"""Messages of every size and kind arrive once, whole and in order, whatever goes wrong on either side."""

from __future__ import annotations

import itertools
import pickle
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import zmq

from nbengine.errors import (
    InvalidArgumentError,
    NBEngineError,
    PeerDiedError,
    QueueClosedError,
    QueueTimeoutError,
    WireError,
)
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.queues.frames import INLINE_BYTES, decode, encode
from nbengine.ipc.queues.message_queue import Handle, MessageQueue

CHUNK = 256 << 10
ANY_PORT = "tcp://127.0.0.1:*"

MakeQueue = Callable[..., tuple[MessageQueue, list[MessageQueue]]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def make_writer(directory: Path) -> Iterator[Callable[..., MessageQueue]]:
    queues: list[MessageQueue] = []

    def make(num_readers: int = 2, num_local_readers: int | None = None, **options: Any) -> MessageQueue:
        sizes = {"max_chunk_bytes": CHUNK, "max_chunks": 2} | options
        queue = MessageQueue(
            num_readers,
            num_local_readers,
            directory=directory,
            socket_directory=directory,
            remote_address=ANY_PORT,
            **sizes,
        )
        queues.append(queue)
        return queue

    yield make
    for queue in queues:
        queue.close()
    assert list(directory.iterdir()) == []


@pytest.fixture
def make_queue(make_writer: Callable[..., MessageQueue]) -> Iterator[MakeQueue]:
    """Make a queue and its readers, all of them ready."""
    ends: list[MessageQueue] = []

    def make(*arguments: Any, **options: Any) -> tuple[MessageQueue, list[MessageQueue]]:
        writer = make_writer(*arguments, **options)
        handle = pickle.loads(pickle.dumps(writer.export_handle()))
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(handle.num_readers)]
        ends.extend(readers)
        threads = [threading.Thread(target=reader.wait_until_ready, args=(20,)) for reader in readers]
        for thread in threads:
            thread.start()
        writer.wait_until_ready(20)
        for thread in threads:
            thread.join()
        return writer, readers

    yield make
    for end in ends:
        end.close()


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(same(one[key], other[key]) for key in one | other)
    return one == other


MESSAGES: list[object] = [
    None,
    b"",
    ("execute_model", ({"a": 1.5},), {}),
    *(bytes([size % 256]) * size for size in (1, 1000, INLINE_BYTES - 1, INLINE_BYTES, CHUNK)),
    *(b"x" * (CHUNK - spare) for spare in range(20, 60)),
    b"y" * (3 * CHUNK),
    np.arange(10),
    np.arange(INLINE_BYTES // 8 + 1),
    {"a": np.zeros(INLINE_BYTES, np.uint8), "b": np.ones((300, 400), np.float16), "c": [1, 2]},
    {"a": np.arange(CHUNK), "b": np.arange(CHUNK // 2, dtype=np.int8)},
    np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
    np.arange(100_000)[::2],
    bytearray(b"z" * 100_000),
]


@pytest.mark.parametrize("num_local", [2, 1, 0], ids=["local", "local and remote", "remote"])
def test_every_kind_and_size_arrives_in_order(make_queue: MakeQueue, num_local: int) -> None:
    writer, readers = make_queue(2, num_local)
    received: list[list[object]] = [[], []]

    def receive(reader: MessageQueue, into: list[object]) -> None:
        into.extend(reader.dequeue(20) for _ in MESSAGES)

    threads = [threading.Thread(target=receive, args=pair) for pair in zip(readers, received, strict=True)]
    for thread in threads:
        thread.start()
    for message in MESSAGES:
        writer.enqueue(message, 20)
    for thread in threads:
        thread.join()
    for messages in received:
        assert len(messages) == len(MESSAGES)
        assert all(map(same, MESSAGES, messages))
    for reader in readers:
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(0)


@pytest.mark.parametrize("size", [INLINE_BYTES * 2, CHUNK * 2], ids=["in the chunk", "over the socket"])
def test_what_arrives_belongs_to_its_receiver(make_queue: MakeQueue, size: int) -> None:
    writer, (reader,) = make_queue(1)
    arrays = []
    for value in range(4):
        writer.enqueue(np.full(size, value, np.uint8))
        arrays.append(reader.dequeue(20))
    for value, array in enumerate(arrays):
        assert (array == value).all()
        array += 1


def test_large_buffers_are_beside_the_pickle_and_small_ones_in_it() -> None:
    large, small = np.zeros(INLINE_BYTES, np.uint8), np.zeros(INLINE_BYTES - 1, np.uint8)
    parts = encode([large, small])
    assert len(parts) == 4
    assert np.shares_memory(np.frombuffer(parts[3], np.uint8), large)
    assert all(map(same, decode(memoryview(b"".join(parts))), [large, small]))


def test_files_are_private_and_gone_when_all_are_ready(
    make_writer: Callable[..., MessageQueue], make_queue: MakeQueue, directory: Path
) -> None:
    writer = make_writer()
    files = list(directory.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    writer.close()
    make_queue()
    assert list(directory.iterdir()) == []


def test_the_handle_shows_no_secret(make_writer: Callable[..., MessageQueue]) -> None:
    handle = make_writer(1, 0).export_handle()
    assert isinstance(handle, Handle)
    assert handle.remote is not None
    assert handle.remote.keys.client_secret not in repr(handle)
    assert handle.remote.keys.server_public not in repr(handle)


def test_a_full_queue_times_out_and_is_usable_afterwards(make_queue: MakeQueue) -> None:
    writer, (reader,) = make_queue(1)
    for message in (b"1", b"2" * 2 * CHUNK):
        writer.enqueue(message, 0)
    for timeout in (0, 0.01):
        for message in (b"lost", b"lost" * CHUNK):
            with pytest.raises(QueueTimeoutError):
                writer.enqueue(message, timeout)
    assert reader.dequeue(20) == b"1"
    writer.enqueue(b"3" * 2 * CHUNK, 0)
    assert reader.dequeue(20) == b"2" * 2 * CHUNK
    assert reader.dequeue(20) == b"3" * 2 * CHUNK
    with pytest.raises(TimeoutError):
        reader.dequeue(0)


class Unreadable:
    """Can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


@pytest.mark.parametrize("num_local", [1, 0], ids=["local", "remote"])
def test_what_cannot_be_pickled_or_unpickled_costs_only_itself(make_queue: MakeQueue, num_local: int) -> None:
    writer, (reader,) = make_queue(1, num_local)
    for _ in range(3):
        with pytest.raises(WireError, match="cannot be pickled"):
            writer.enqueue(lambda: None, 0)
        writer.enqueue(Unreadable(), 0)
        with pytest.raises(WireError, match="invalid literal"):
            reader.dequeue(20)
        writer.enqueue((Unreadable(), bytes(CHUNK)), 0)
        with pytest.raises(WireError, match="invalid literal"):
            reader.dequeue(20)
        writer.enqueue("good", 0)
        assert reader.dequeue(20) == "good"


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place where CPython runs signal handlers: as a call begins or ends."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event in ("call", "c_return") and module.startswith("nbengine.ipc"):
            self._left -= 1
            if self._left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupted(at: int, function: Callable[..., object], *arguments: object) -> tuple[bool, object]:
    """Call a function and interrupt it at place `at`; return whether that happened, and else what it
    returned."""
    try:
        with Interrupt(at):
            return False, function(*arguments)
    except KeyboardInterrupt:
        return True, None


@pytest.mark.parametrize("num_local", [1, 0], ids=["local", "remote"])
@pytest.mark.parametrize("size", [10, 2 * CHUNK], ids=["small", "large"])
def test_an_interrupt_anywhere_in_dequeue_loses_nothing(
    make_queue: MakeQueue, num_local: int, size: int
) -> None:
    writer, (reader,) = make_queue(1, num_local)
    for at in itertools.count():
        message = at, bytes(size)
        writer.enqueue(message, 20)
        was_interrupted, received = interrupted(at, reader.dequeue, 20)
        if was_interrupted:
            received = reader.dequeue(20)
        assert received == message
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(0)
        if not was_interrupted:
            break
    assert at > 10


@pytest.mark.parametrize("size", [10, 2 * CHUNK], ids=["small", "large"])
def test_an_interrupt_anywhere_in_enqueue_sends_all_or_nothing(make_queue: MakeQueue, size: int) -> None:
    writer, (reader,) = make_queue(1)
    sent = 0
    for at in itertools.count():
        message = at, bytes(size)
        was_interrupted, _ = interrupted(at, writer.enqueue, message, 20)
        writer.enqueue("next", 20)
        received = reader.dequeue(20)
        if received != "next":
            sent += was_interrupted
            assert received == message
            assert reader.dequeue(20) == "next"
        elif not was_interrupted:
            pytest.fail("a message was lost")
        if not was_interrupted:
            break
    assert at > 10
    assert sent


@pytest.mark.parametrize("num_local", [1, 0], ids=["local", "remote"])
def test_who_waits_is_woken_by_a_shutdown_of_either_end(make_queue: MakeQueue, num_local: int) -> None:
    for which in range(2):
        writer, (reader,) = make_queue(1, num_local)
        results: list[object] = []

        def receive(reader: MessageQueue = reader, results: list[object] = results) -> None:
            try:
                results.append(reader.dequeue())
            except QueueClosedError as error:
                results.append(str(error))

        thread = threading.Thread(target=receive)
        thread.start()
        if which:
            writer.close()
        else:
            reader.shutdown()
        thread.join(60)
        assert results == [
            "the writer of a message queue has shut down"
            if which
            else "this end of a message queue has shut down"
        ]


def test_a_writer_who_waits_is_woken_by_its_own_shutdown(make_queue: MakeQueue) -> None:
    writer, _ = make_queue(1)
    writer.enqueue(1)
    writer.enqueue(2)
    results: list[str] = []

    def send() -> None:
        try:
            writer.enqueue(3)
        except QueueClosedError as error:
            results.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    writer.close()
    thread.join(60)
    assert results == ["this end of a message queue has shut down"]


@pytest.mark.parametrize("num_local", [2, 1, 0], ids=["local", "local and remote", "remote"])
def test_what_was_sent_before_closing_is_received(make_queue: MakeQueue, num_local: int) -> None:
    writer, readers = make_queue(2, num_local)
    writer.enqueue("small")
    writer.enqueue(bytes(3 * CHUNK))
    writer.close()
    for reader in readers:
        assert reader.dequeue(20) == "small"
        assert reader.dequeue(20) == bytes(3 * CHUNK)
        for _ in range(2):
            with pytest.raises(QueueClosedError, match="the writer"):
                reader.dequeue(20)


@pytest.mark.parametrize("num_local", [2, 1], ids=["local", "remote"])
def test_the_writer_learns_that_a_reader_has_closed(make_queue: MakeQueue, num_local: int) -> None:
    writer, readers = make_queue(2, num_local)
    readers[1].close()

    def exchange() -> None:
        for _ in range(200):
            writer.enqueue(1, 20)
            readers[0].dequeue(20)

    with pytest.raises(QueueClosedError, match="reader 1"):
        exchange()


def test_closed_ends_say_so(make_queue: MakeQueue) -> None:
    for num_local in (0, 1):
        writer, (reader,) = make_queue(1, num_local)
        for end in (writer, reader):
            end.close()
            end.close()
            end.shutdown()
        for call in (writer.wait_until_ready, reader.wait_until_ready, reader.dequeue):
            with pytest.raises(QueueClosedError, match="this end"):
                call()
        with pytest.raises(QueueClosedError, match="this end"):
            writer.enqueue(1)


def test_each_end_does_its_own_thing(make_queue: MakeQueue) -> None:
    writer, (reader,) = make_queue(1)
    with pytest.raises(NBEngineError, match="reading end"):
        reader.enqueue(1)
    with pytest.raises(NBEngineError, match="writing end"):
        writer.dequeue()


def test_waiting_for_ends_that_do_not_come_names_them(make_writer: Callable[..., MessageQueue]) -> None:
    writer = make_writer(3, 2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 1)
    with pytest.raises(QueueTimeoutError, match="reader 0"):
        writer.wait_until_ready(0.3)
    with pytest.raises(QueueTimeoutError, match="writer"):
        reader.wait_until_ready(0.05)
    reader.close()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "num_readers"),
        (("2",), "num_readers"),
        ((1, 2), "num_local_readers"),
        ((1, -1), "num_local_readers"),
    ],
)
def test_numbers_of_readers_are_checked(
    make_writer: Callable[..., MessageQueue], arguments: tuple[Any, ...], name: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        make_writer(*arguments)


@pytest.mark.parametrize("address", [None, "ipc:///tmp/x", "inproc://x"])
def test_readers_elsewhere_need_an_address(directory: Path, address: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match="remote_address"):
        MessageQueue(2, 1, directory=directory, socket_directory=directory, remote_address=address)


def test_a_queue_that_cannot_be_made_leaves_nothing(directory: Path) -> None:
    with pytest.raises(NBEngineError, match="cannot bind"):
        MessageQueue(
            2, 1, directory=directory, socket_directory=directory, remote_address="tcp://no.such.host.:1"
        )
    assert list(directory.iterdir()) == []
    directory.chmod(0o755)
    with pytest.raises(NBEngineError, match="not this user's alone"):
        MessageQueue(1, directory=directory, socket_directory=directory)


def test_a_reader_without_the_keys_gets_nothing(make_queue: MakeQueue) -> None:
    writer, readers = make_queue(1, 0)
    handle = writer.export_handle()
    assert handle.remote is not None
    wrong = make_curve_keys()
    stranger = MessageQueue.create_from_handle(replace(handle, remote=replace(handle.remote, keys=wrong)), 0)
    with zmq.Context() as context, context.socket(zmq.SUB) as plain:
        plain.linger = 0
        plain.connect(handle.remote.address)
        plain.subscribe(b"")
        with pytest.raises((QueueTimeoutError, PeerDiedError)):
            stranger.wait_until_ready(0.3)
        writer.enqueue("secret", 20)
        assert readers[0].dequeue(20) == "secret"
        assert not plain.poll(100)
    with pytest.raises((QueueTimeoutError, PeerDiedError)):
        stranger.dequeue(0.1)
    stranger.close()
