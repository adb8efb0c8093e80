"""Files that cannot be written: what is not essential ends nothing, says so once and is tried again."""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path

import pytest

from nbengine.client.engines import launch
from nbengine.config import EngineConfig, ParallelConfig
from nbengine.engine.host.connection_record import ConnectionRecord
from nbengine.engine.host.events import RecordFailed, RecordReady
from nbengine.engine.host.main import write_files
from nbengine.engine.host.state import RECORD_PAUSE
from nbengine.engine.lossy_output import LossyOutput
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.ipc import private, shm_tensors
from nbengine.ipc.private import FULL
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.runtime import connection, processes
from nbengine.runtime.connection import ConnectionInfo, connection_file, read_connection
from nbengine.runtime.worker_board import WorkerBoard
from tests.unit.engine.host_rig import Host, kill, only, ready, started, tick

FAILURES = sorted(FULL)


def error_of(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), None if path is None else str(path))


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConnectionInfo:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path / "runtime"))
    run_dir = tmp_path / "run"
    run_dir.mkdir(0o700)
    return ConnectionInfo(
        name="n",
        run_dir=str(run_dir),
        log_path=str(tmp_path / "log"),
        host_pid=1,
        host_started=0,
        config=EngineConfig(),
    )


class Disk:
    """A stand-in for `os.fsync`, which brings every private file to the disk, while the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.tries = 0
        monkeypatch.setattr(private.os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self.tries += 1
        if self.error:
            raise error_of(self.error)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


# The connection file of a running engine.


@pytest.mark.parametrize("number", FAILURES)
def test_the_connection_file_stays_as_it_was_says_so_once_and_is_written_later(
    info: ConnectionInfo, disk: Disk, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.INFO)
    record = ConnectionRecord(info)
    assert record.note_ready([ready(0)], 1)
    before = connection_file("n").read_bytes()
    disk.error = number
    assert [record.note_ready([ready(0), ready(1)], 2) for _ in range(5)] == [False] * 5
    assert connection_file("n").read_bytes() == before
    assert [entry.name for entry in connection_file("n").parent.iterdir()] == ["nbengine-n.json"]
    disk.error = 0
    assert record.note_ready([ready(0), ready(1)], 2)
    assert read_connection(connection_file("n")).ready == [ready(0), ready(1)]
    assert read_connection(connection_file("n")).config.parallel.data_parallel_size == 2
    said = [message for message in caplog.messages if "connection file" in message]
    assert len(said) == 2
    assert os.strerror(number) in said[0]
    assert "nbengine-n.json" in said[0]
    assert "up to date again" in said[1]


def test_a_directory_of_connection_files_that_is_gone_is_a_failure_like_a_full_disk(
    info: ConnectionInfo, tmp_path: Path
) -> None:
    record = ConnectionRecord(info)
    (tmp_path / "runtime").write_text("no directory")
    assert not record.note_ready([ready(0)], 1)
    (tmp_path / "runtime").unlink()
    assert record.note_ready([ready(0)], 1)


def test_what_cannot_be_written_of_a_stall_is_written_with_what_comes_later(
    info: ConnectionInfo, disk: Disk
) -> None:
    record = ConnectionRecord(info)
    assert record.note_ready([ready(0)], 1)
    disk.error = errno.ENOSPC
    assert not record.note_stalled([0])
    disk.error = 0
    assert record.note_ready([ready(0)], 1)
    assert read_connection(connection_file("n")).stalled == [0]


def test_a_shortage_of_descriptors_is_left_to_the_host_who_tries_again_at_once(
    info: ConnectionInfo, disk: Disk
) -> None:
    disk.error = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        ConnectionRecord(info).note_ready([ready(0)], 1)


def test_an_engine_that_still_starts_is_not_written_down_as_ready() -> None:
    host = Host(ranks=2).greet()
    host.core(ready(0), 0)
    fail(host)
    assert not only(host.at(host.now + RECORD_PAUSE), RecordReady)


def fail(host: Host) -> list:
    return host.state.handle(RecordFailed(), host.now)


def test_the_file_is_written_again_after_a_pause_for_which_the_host_wakes_up() -> None:
    host = Host(ranks=2).start()
    assert fail(host) == []
    for _ in range(3):
        assert host.state.next_deadline() == host.now + RECORD_PAUSE
        assert not only(host.at(host.now + RECORD_PAUSE / 2), RecordReady)
        (record,) = only(host.at(host.state.next_deadline()), RecordReady)
        assert record == RecordReady([ready(0), ready(1)], 2)
        # Until it is known how that went.
        assert host.state.next_deadline() > host.now + RECORD_PAUSE
        fail(host)


def test_a_later_change_is_written_at_once_and_replaces_the_one_that_waits() -> None:
    host = started(3)
    fail(host)
    (record,) = only(kill(host, 2), RecordReady)
    assert record.engines == [ready(0), ready(1)]
    assert not only(tick(host), RecordReady)


def test_an_engine_that_ends_does_not_write_where_it_is() -> None:
    host = started(2)
    fail(host)
    host.stop()
    fail(host)
    assert not only(host.at(host.now + RECORD_PAUSE), RecordReady)


def test_a_record_that_fails_before_the_first_client_does_not_delay_the_idle_end() -> None:
    host = Host(ranks=1, keep_alive=100.0).start()
    fail(host)
    assert host.state.next_deadline() == RECORD_PAUSE
    host.at(RECORD_PAUSE)
    assert host.state.next_deadline() == 100.0


# The start of an engine.


@pytest.mark.parametrize("number", FAILURES)
def test_a_host_that_cannot_write_where_it_is_says_what_and_what_to_do(
    info: ConnectionInfo, disk: Disk, number: int
) -> None:
    disk.error = number
    with pytest.raises(EngineStartError) as caught:
        write_files(info)
    message = caught.value.cause
    assert str(connection_file("n")) in message
    assert os.strerror(number) in message
    assert "NBENGINE_RUNTIME_DIR" in message
    assert caught.value.__cause__ is None


def test_the_file_that_engine_cores_read_is_essential_too(
    info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_own(path: Path, content: bytes) -> None:
        if path.name == "engine.json":
            raise error_of(errno.ENOSPC, path)

    monkeypatch.setattr(connection, "write_own", write_own)
    with pytest.raises(EngineStartError, match=r"engine\.json: No space left"):
        write_files(info)


def test_a_launch_on_a_full_disk_starts_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_start_host", lambda info: pytest.fail("a process was started"))
    disk.error = errno.ENOSPC
    with pytest.raises(EngineStartError, match=r"at .*engine\.json: No space left on device; make room"):
        launch.launch_engine(EngineConfig())
    assert not list(tmp_path.glob("nbe-*"))


# Logs.


def test_a_worker_without_room_for_a_log_writes_into_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = []

    class Process:
        def __init__(self, command: list[str], *, stdout: int | None, **_: object) -> None:
            outputs.append(stdout)

    def no_room(path: object, *_: object, **__: object) -> int:
        raise error_of(errno.ENOSPC, path)

    monkeypatch.setattr(processes.subprocess, "Popen", Process)
    monkeypatch.setattr(processes.os, "open", no_room)
    worker = processes.start_worker(tmp_path / "log")
    worker.connection.close()
    assert outputs == [None]
    assert "No space left on device" in caplog.text


def test_what_is_printed_to_a_full_device_is_lost_without_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        output = LossyOutput(full.fileno())
        stream = io.TextIOWrapper(io.BufferedWriter(output), "utf-8", line_buffering=True)
        for _ in range(10_000):
            print("x" * 100, file=stream)
        stream.close()
        assert output._lost == 10_000 * len("x" * 100 + "\n")


def test_a_log_says_how_much_of_it_is_missing_as_soon_as_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as file, open("/dev/full", "wb", buffering=0) as full:
        place = os.dup(file.fileno())
        output = LossyOutput(place)
        stream = io.TextIOWrapper(io.BufferedWriter(output), "utf-8", line_buffering=True)
        print("one", file=stream)
        os.dup2(full.fileno(), place)
        print("two", file=stream)
        print("three", file=stream)
        os.dup2(file.fileno(), place)
        print("four", file=stream)
        print("five", file=stream)
        stream.close()
        os.close(place)
    assert path.read_text() == ("one\n(10 bytes are missing here: No space left on device)\nfour\nfive\n")


# Shared memory.


def test_a_client_without_room_for_tensors_sends_them_through_the_socket_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "tensors"
    directory.mkdir(0o700)
    sender = ShmTensorSender(directory, 0, threshold=1, capacity=1 << 16)
    data = memoryview(bytes(1000))
    allocate = os.posix_fallocate

    def no_room(*_: object) -> None:
        raise error_of(errno.ENOSPC)

    monkeypatch.setattr(shm_tensors.os, "posix_fallocate", no_room)
    assert [sender(data) for _ in range(3)] == [None] * 3
    assert caplog.text.count("No space left on device") == 1
    monkeypatch.setattr(shm_tensors.os, "posix_fallocate", allocate)
    assert sender(data) is not None
    sender.close()


def test_workers_go_without_a_board_that_there_is_no_room_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> WorkerBoard:
        raise error_of(errno.ENOSPC)

    monkeypatch.setattr(WorkerBoard, "create", no_room)
    seen = []

    class Executor(MultiprocExecutor):
        def _start_processes(self, specs, on_start) -> None:
            seen.append(specs[0].files.board)
            raise NBEngineError("enough")

    with pytest.raises(NBEngineError, match="enough"):
        Executor(EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2)))
    assert seen == [None]
    assert caplog.text.count("no statistics of the workers") == 1
