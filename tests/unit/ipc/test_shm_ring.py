"""The ring: its layout, who waits for whom, and what ends the waiting."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nbengine.errors import (
    InvalidArgumentError,
    NBEngineError,
    PeerDiedError,
    QueueClosedError,
    QueueTimeoutError,
)
from nbengine.ipc import liveness
from nbengine.ipc.queues import shm_ring, waiting
from nbengine.ipc.queues.shm_ring import RingReader, RingWriter

MakeRing = Callable[..., tuple[RingWriter, list[RingReader]]]


@pytest.fixture(autouse=True, params=["futex", "polling"])
def way_of_sleeping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "polling":
        monkeypatch.setattr(waiting, "_find_futex", lambda: None)
    return request.param


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def make_ring(directory: Path) -> Iterator[MakeRing]:
    ends: list[RingWriter | RingReader] = []

    def make(num_readers: int = 2, max_chunks: int = 2) -> tuple[RingWriter, list[RingReader]]:
        writer = RingWriter(directory, num_readers, max_chunk_bytes=100, max_chunks=max_chunks)
        readers = [RingReader(writer.handle, rank) for rank in range(num_readers)]
        ends.extend([*readers, writer])
        return writer, readers

    yield make
    for end in ends:
        end.close()
    assert list(directory.iterdir()) == []


def write(writer: RingWriter, message: int, timeout: float | None = 0) -> None:
    with writer.acquire_write(timeout) as chunk:
        chunk[0] = message


def read(reader: RingReader, timeout: float | None = 0) -> int:
    with reader.acquire_read(timeout) as chunk:
        return chunk[0]


def write_and_raise(writer: RingWriter, error: type[BaseException]) -> None:
    with writer.acquire_write(0) as chunk:
        chunk[0] = 1
        raise error


def in_thread(function: Callable[..., object], *arguments: object) -> tuple[threading.Thread, list]:
    """A thread that calls `function`; its result, or what it raised, is put into the list."""
    results: list = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except NBEngineError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def asleep(end: RingWriter | RingReader) -> None:
    """Wait until `end` has announced that it sleeps."""
    deadline = time.monotonic() + 20
    while not end._words[end._end]._word[0]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_file_has_data_then_flags_and_is_its_owners_alone(make_ring: MakeRing) -> None:
    writer, (one, two) = make_ring()
    path = Path(writer.handle.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert writer.handle.max_chunk_bytes == 128

    def flags() -> list[bytes]:
        content = path.read_bytes()
        return [content[256:259], content[259:262]]

    assert flags() == [bytes(3), bytes(3)]
    write(writer, 7)
    write(writer, 8)
    content = path.read_bytes()
    assert (content[0], content[128]) == (7, 8)
    assert flags() == [b"\1\0\0", b"\1\0\0"]
    assert read(two) == 7
    assert flags() == [b"\1\0\1", b"\1\0\0"]
    assert read(one) == 7
    assert flags() == [b"\1\1\1", b"\1\0\0"]
    with writer.acquire_write() as chunk:
        assert flags()[0] == b"\0\1\1"
        chunk[0] = 9
    assert flags()[0] == b"\1\0\0"
    assert [read(one), read(one), read(two), read(two)] == [8, 9, 8, 9]


def test_memory_is_reserved_when_the_ring_is_made(make_ring: MakeRing, directory: Path) -> None:
    writer, _ = make_ring(max_chunks=1000)
    assert Path(writer.handle.path).stat().st_blocks * 512 >= writer.handle.size > 128_000


def test_too_little_shared_memory_is_a_clear_error_and_leaves_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NBEngineError, match=r"no room for a message queue of 8192 KiB in .*--shm-size"):
        RingWriter(directory, 1, max_chunk_bytes=1 << 20, max_chunks=8)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("name", ["num_readers", "max_chunk_bytes", "max_chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_sizes_are_checked(directory: Path, name: str, value: object) -> None:
    sizes = {"num_readers": 1, "max_chunk_bytes": 64, "max_chunks": 1, name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        RingWriter(directory, **sizes)


def test_a_directory_that_others_can_reach_is_refused(directory: Path) -> None:
    directory.chmod(0o755)
    with pytest.raises(NBEngineError, match="not this user's alone"):
        RingWriter(directory, 1)
    with pytest.raises(NBEngineError, match="not here"):
        RingWriter(directory / "missing", 1)


def test_a_reader_attaches_once_to_the_ring_that_was_handed_over(
    make_ring: MakeRing, directory: Path
) -> None:
    writer, _ = make_ring()
    for rank in (-1, 2):
        with pytest.raises(InvalidArgumentError, match="reader_rank"):
            RingReader(writer.handle, rank)
    with pytest.raises(NBEngineError, match="taken before"):
        RingReader(writer.handle, 0)
    with pytest.raises(NBEngineError, match=r"not the file of .* bytes that was handed over"):
        RingReader(replace(writer.handle, max_chunks=4), 0)
    link = directory / "link"
    link.symlink_to(writer.handle.path)
    with pytest.raises(NBEngineError, match="cannot attach"):
        RingReader(replace(writer.handle, path=str(link)), 0)
    link.unlink()
    writer.unlink()
    writer.unlink()
    with pytest.raises(NBEngineError, match="cannot attach"):
        RingReader(writer.handle, 0)


def test_the_memory_outlives_its_file(make_ring: MakeRing) -> None:
    writer, readers = make_ring()
    writer.unlink()
    write(writer, 5)
    assert [read(reader) for reader in readers] == [5, 5]


def test_every_reader_gets_every_message_in_order(make_ring: MakeRing) -> None:
    writer, readers = make_ring(num_readers=3, max_chunks=3)
    threads = [in_thread(lambda r=reader: [read(r, 20) for _ in range(250)]) for reader in readers]
    for message in range(250):
        write(writer, message, 20)
    for thread, results in threads:
        thread.join()
        assert results == [list(range(250))]


def test_the_slowest_reader_holds_the_writer_up_and_a_timeout_leaves_all_usable(make_ring: MakeRing) -> None:
    writer, (one, two) = make_ring()
    for timeout in (0, 0.01):
        with pytest.raises(QueueTimeoutError, match="no message within"):
            one.acquire_read(timeout)
    write(writer, 1)
    write(writer, 2)
    assert [read(one), read(one)] == [1, 2]
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="no free chunk within"):
            writer.acquire_write(timeout)
    thread, results = in_thread(write, writer, 3, 20)
    asleep(writer)
    assert read(two) == 1
    thread.join()
    assert results == [None]
    assert [read(two), read(two), read(one)] == [2, 3, 3]


def test_a_waiting_reader_is_woken_by_a_message(make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LONGEST_SLEEP", 20.0)
    writer, readers = make_ring()
    threads = [in_thread(read, reader, 60) for reader in readers]
    for reader in readers:
        asleep(reader)
    start = time.monotonic()
    write(writer, 4)
    for thread, results in threads:
        thread.join()
        assert results == [4]
    assert time.monotonic() - start < 10


def test_nothing_is_published_after_an_exception(make_ring: MakeRing) -> None:
    writer, (one, two) = make_ring()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            write_and_raise(writer, error)
    with pytest.raises(QueueTimeoutError):
        read(one)
    write(writer, 2)
    assert (read(one), read(two)) == (2, 2)


def test_an_error_counts_as_reading_and_an_interrupt_does_not(make_ring: MakeRing) -> None:
    writer, (one, _) = make_ring()
    write(writer, 1)
    write(writer, 2)
    with pytest.raises(KeyboardInterrupt), one.acquire_read():
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), one.acquire_read() as chunk:
        assert 1 // (chunk[0] - 1)
    assert read(one) == 2


def test_shutting_the_writer_down_wakes_readers_who_have_read_all(make_ring: MakeRing) -> None:
    writer, readers = make_ring()
    write(writer, 1)
    assert read(readers[0]) == 1
    thread, results = in_thread(read, readers[0], 60)
    asleep(readers[0])
    writer.shutdown()
    thread.join()
    assert "writer" in str(results[0])
    assert read(readers[1]) == 1
    with pytest.raises(QueueClosedError, match="the writer"):
        read(readers[1])
    with pytest.raises(QueueClosedError, match="this end"):
        writer.acquire_write()


def test_shutting_a_reader_down_wakes_it_and_the_writer(make_ring: MakeRing) -> None:
    writer, readers = make_ring()
    thread, results = in_thread(read, readers[1], 60)
    asleep(readers[1])
    readers[1].shutdown()
    thread.join()
    assert isinstance(results[0], QueueClosedError)
    assert "this end" in str(results[0])
    with pytest.raises(QueueClosedError, match="reader 1"):
        writer.acquire_write()


def test_shutting_a_reader_down_wakes_a_writer_who_waits_for_it(make_ring: MakeRing) -> None:
    writer, readers = make_ring(max_chunks=1)
    write(writer, 1)
    thread, results = in_thread(write, writer, 2, 60)
    asleep(writer)
    readers[0].shutdown()
    thread.join()
    assert "reader 0" in str(results[0])


def test_closing_again_does_nothing_and_a_closed_end_says_so(make_ring: MakeRing) -> None:
    writer, readers = make_ring()
    for end in (writer, readers[0]):
        end.close()
        end.close()
        end.shutdown()
    with pytest.raises(QueueClosedError, match="this end"):
        writer.acquire_write()
    with pytest.raises(QueueClosedError, match="this end"):
        readers[0].acquire_read()


def test_a_dead_writer_is_named_when_all_is_read_and_a_dead_reader_when_its_room_is_needed(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        pid = 4711

        def __init__(self, *_: object) -> None:
            pass

        def gone(self) -> bool:
            return True

        def close(self) -> None:
            pass

    monkeypatch.setattr(shm_ring, "ProcessWatch", Gone)
    monkeypatch.setattr(waiting, "LONGEST_SLEEP", 0.001)
    writer, readers = make_ring(max_chunks=1)
    write(writer, 1)
    with pytest.raises(PeerDiedError, match=r"reader 0.*4711"):
        writer.acquire_write(60)
    assert [read(reader) for reader in readers] == [1, 1]
    with pytest.raises(PeerDiedError, match=r"the writer.*4711"):
        readers[0].acquire_read(60)


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    own, parent = liveness.this_process(), liveness.identity_of(os.getppid())
    assert parent is not None
    later = liveness.ProcessIdentity(parent.pid, parent.started + 1)
    watches = [liveness.ProcessWatch(process) for process in (own, parent, later)]
    assert [watch.gone() for watch in watches] == [False, False, True]
    for watch in watches:
        watch.close()
        watch.close()
