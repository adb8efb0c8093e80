"""The owner of a remote process hears of its start, words and end; no cluster is needed to test it."""

from __future__ import annotations

import signal
from typing import cast

import msgspec
import pytest

from nbengine.cluster.messages import (
    End,
    Exited,
    Failed,
    Line,
    Lost,
    OwnerToBridge,
    OwnerToKeeper,
    Placed,
    Release,
    Signal,
    Started,
    ToKeeper,
)
from nbengine.cluster.remote import LOST, Cluster, News, RemoteProcess
from nbengine.cluster.worker import RemoteWorker

PLACE = Placed("n", "host", "10.0.0.2", 20001, "/run", "/dev/shm/x", "marker", "/log")


class FakeCluster:
    def __init__(self) -> None:
        self.told: list[OwnerToBridge] = []

    def tell(self, message: OwnerToBridge) -> None:
        self.told.append(message)

    def release(self, group: int) -> None:
        self.tell(Release(group))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def heard() -> list[News]:
    return []


@pytest.fixture
def process(cluster: FakeCluster, heard: list[News]) -> RemoteProcess:
    return RemoteProcess(cast(Cluster, cluster), 3, 1, lambda _, message: heard.append(message))


def to_keeper(message: OwnerToBridge) -> OwnerToKeeper:
    assert isinstance(message, ToKeeper)
    assert (message.group, message.index) == (3, 1)
    return cast(OwnerToKeeper, msgspec.msgpack.decode(message.message, type=OwnerToKeeper))


def test_a_process_that_runs_gets_its_signals_through_its_keeper(
    process: RemoteProcess, cluster: FakeCluster
) -> None:
    process.note(PLACE)
    process.note(Started(77))
    process.send_signal(signal.SIGTERM)
    process.finish()
    assert [to_keeper(message) for message in cluster.told] == [Signal(signal.SIGTERM), End()]


@pytest.mark.parametrize("has_place", [False, True])
def test_a_process_that_has_not_started_is_given_up_instead_of_signalled(
    process: RemoteProcess, cluster: FakeCluster, has_place: bool
) -> None:
    if has_place:
        process.note(PLACE)
    process.send_signal(signal.SIGKILL)
    process.finish()
    assert cluster.told == [Release(3), Release(3)]


@pytest.mark.parametrize(
    ("news", "status", "end"),
    [
        ([PLACE, Started(77), Exited(-9, "tail")], -9, "was killed by signal 9 (SIGKILL)"),
        ([PLACE, Started(77), Exited(0, "")], 0, "exited with status 0"),
        ([PLACE, Failed("no python")], LOST, "could not be started on host (10.0.0.2): no python"),
        ([Lost(3, None, "no room")], LOST, "could not be started: no room"),
        ([PLACE, Started(77), Lost(3, 1, "it died")], LOST, "was lost on host (10.0.0.2): it died"),
    ],
)
def test_the_end_is_told_once(
    process: RemoteProcess, heard: list[News], news: list[News], status: int, end: str
) -> None:
    for message in [*news, Lost(3, 1, "its keeper has ended")]:
        process.note(message)
    assert heard == news
    assert process.wait(0)
    assert process.status == status
    assert process.end.startswith(end)


def test_a_worker_hears_its_line_and_then_its_end(cluster: FakeCluster) -> None:
    worker = RemoteWorker()
    process = RemoteProcess(cast(Cluster, cluster), 0, 0, worker.note)
    process.note(PLACE)
    assert worker.place() == PLACE
    process.note(Started(77))
    process.note(Line(b"said"))
    process.note(Line(b""))
    assert worker.connection.recv_bytes() == b"said"
    with pytest.raises(EOFError):
        worker.connection.recv_bytes()
    assert worker.poll() is None
    process.note(Exited(3, "a\nb"))
    assert (worker.pid, worker.wait(0), worker.log_tail(0)) == (77, 3, "a\nb")
    worker.connection.close()


def test_a_worker_without_a_place_is_not_waited_for(cluster: FakeCluster) -> None:
    worker = RemoteWorker()
    RemoteProcess(cast(Cluster, cluster), 0, 0, worker.note).note(Lost(0, None, "no room"))
    assert worker.place() is None
    assert worker.wait(0) == LOST
    worker.connection.close()
