"""The page that workers write what they measure to, and the engine core reads."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.metrics.stats import WorkerStats
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.worker import meter
from nbengine.worker.meter import WorkerMeter


def test_a_new_board_has_a_row_of_zeros_for_each_worker() -> None:
    assert WorkerBoard.private(3).read() == [WorkerStats(rank, 0, 0, 0.0) for rank in range(3)]


def test_what_a_worker_writes_is_read_through_another_mapping(tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 3)
    assert board.path is not None
    there = WorkerBoard.attach(board.path, 3)
    there.row(2).set_memory(1 << 40)
    row = there.row(1)
    for seconds in (0.25, 0.125):
        row.end_step(seconds)
    assert board.read() == [
        WorkerStats(0, 0, 0, 0.0),
        WorkerStats(1, 0, 2, 0.125),
        WorkerStats(2, 1 << 40, 0, 0.0),
    ]


def test_the_file_is_private_and_gone_once_it_is_unlinked(tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 2)
    assert board.path is not None
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o600
    attached = WorkerBoard.attach(board.path, 2)
    board.unlink()
    board.unlink()
    assert list(tmp_path.iterdir()) == []
    attached.row(1).set_memory(7)
    assert board.read()[1].memory_bytes == 7


def test_workers_that_write_at_once_leave_each_others_rows_alone(tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 4)
    path = board.path
    assert path is not None

    def work(rank: int) -> None:
        row = WorkerBoard.attach(path, 4).row(rank)
        for step in range(500):
            row.set_memory(1000 * rank + step)
            row.end_step(rank + step / 1000)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read() == [WorkerStats(r, 1000 * r + 499, 500, r + 0.499) for r in range(4)]


@pytest.mark.parametrize("num_workers", [0, -1, 4097, 1 << 60])
def test_an_impossible_number_of_workers_is_refused(tmp_path: Path, num_workers: int) -> None:
    for make in (
        lambda: WorkerBoard.private(num_workers),
        lambda: WorkerBoard.create(tmp_path, num_workers),
        lambda: WorkerBoard.attach(tmp_path / "board", num_workers),
    ):
        with pytest.raises(InvalidArgumentError, match="num_workers must be from 1 to 4096"):
            make()
    with pytest.raises(InvalidTypeError):
        WorkerBoard.private(True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_without_a_row_is_refused(rank: int) -> None:
    with pytest.raises(InvalidArgumentError, match="rank must be from 0 to 1"):
        WorkerBoard.private(2).row(rank)


def test_a_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    """Storing beyond the end of a mapped file would end the process."""
    board = WorkerBoard.create(tmp_path, 2)
    assert board.path is not None
    for size in (0, 1, 64, 129, 1 << 20):
        os.truncate(board.path, size)
        with pytest.raises(NBEngineError, match="is not the file of 128 bytes that was handed over"):
            WorkerBoard.attach(board.path, 2)


def test_neither_a_link_nor_a_missing_file_nor_a_directory_is_mapped(tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 1)
    assert board.path is not None
    link = tmp_path / "link"
    link.symlink_to(board.path)
    for path in (link, tmp_path / "missing", tmp_path):
        with pytest.raises(NBEngineError, match="cannot be opened"):
            WorkerBoard.attach(path, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    return now


def test_a_step_takes_as_long_as_its_parts_and_not_what_lies_between(clock: list[float]) -> None:
    board = WorkerBoard.private(1)
    worker = WorkerMeter(board.row(0), torch.device("cpu"))
    clock[0] = 102.0
    worker.ran(100.0, is_over=False)
    assert board.read()[0].num_steps == 0
    clock[0] = 110.5
    worker.ran(110.0, is_over=True)
    assert (board.read()[0].num_steps, board.read()[0].step_seconds) == (1, 2.5)
    clock[0] = 111.0
    worker.ran(110.75, is_over=True)
    assert (board.read()[0].num_steps, board.read()[0].step_seconds) == (2, 0.25)


def test_steps_at_once_count_each_and_share_the_time(clock: list[float]) -> None:
    board = WorkerBoard.private(1)
    worker = WorkerMeter(board.row(0), torch.device("cpu"))
    clock[0] = 103.5
    worker.ran(100.0, is_over=False)
    clock[0] = 104.5
    worker.ran(104.0, is_over=True, num_steps=4)
    assert (board.read()[0].num_steps, board.read()[0].step_seconds) == (4, 1.0)


def test_memory_is_measured_at_most_once_a_second(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    board = WorkerBoard.private(1)
    worker = WorkerMeter(board.row(0), torch.device("cpu"))
    measured: list[float] = []
    monkeypatch.setattr(worker, "_process", FakeProcess(clock, measured))
    for tenth in range(25):
        clock[0] = 100 + tenth / 10
        worker.ran(clock[0], is_over=True)
    assert measured == [100.0, 101.0, 102.0]
    assert board.read()[0].memory_bytes == 102


def test_memory_is_that_of_the_process() -> None:
    board = WorkerBoard.private(1)
    worker = WorkerMeter(board.row(0), torch.device("cpu"))
    worker.measure_memory()
    before = board.read()[0].memory_bytes
    # New pages: an allocation may be given memory that the process has, and has freed.
    with mmap.mmap(-1, 64 << 20) as held:
        held.write(os.urandom(1 << 20) * 64)
        worker.measure_memory()
        assert board.read()[0].memory_bytes - before > len(held) // 2


class FakeProcess:
    def __init__(self, clock: list[float], measured: list[float]) -> None:
        self.clock, self.measured = clock, measured

    def memory_info(self) -> FakeProcess:
        self.measured.append(self.clock[0])
        return self

    @property
    def rss(self) -> int:
        return int(self.clock[0])
