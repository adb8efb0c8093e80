"""A worker's profile: a bounded number of steps, a trace that a viewer can read, a true summary."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.errors import UtilityError
from nbengine.scheduler.output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from nbengine.worker.profiler import WorkerProfiler, _summary
from nbengine.worker.worker import Worker


def event(name: str, start: float, duration: float, cat: str = "cpu_op", thread: int = 1) -> dict:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": {"x": 1},
    }


def rows(summary: str) -> dict[str, tuple[int, float, str]]:
    """Return calls, milliseconds and share by operation."""
    cells = [line.split() for line in summary.splitlines()[1:]]
    return {name: (int(calls), float(time), share) for name, calls, time, share in cells}


def summary_of(events: list[dict]) -> dict[str, tuple[int, float, str]]:
    return rows(_summary(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))


def test_an_operation_counts_for_the_time_in_which_no_other_ran_inside_it() -> None:
    events = [
        event("outer", 0, 10_000),
        event("inner", 1000, 2000),
        event("innermost", 1500, 500),
        event("inner", 4000, 1000),
        event("outer", 10_000, 5000),
        event("elsewhere", 500, 9000, thread=2),
        {"ph": "M", "name": "process_name"},
    ]
    assert summary_of(events) == {
        "outer": (2, 12.0, "50.0%"),
        "elsewhere": (1, 9.0, "37.5%"),
        "inner": (2, 2.5, "10.4%"),
        "innermost": (1, 0.5, "2.1%"),
    }


def test_where_a_gpu_worked_its_kernels_are_what_counts() -> None:
    events = [event("aten::mm", 0, 9000), event("gemm", 100, 400, cat="kernel", thread=7)]
    assert summary_of(events) == {"gemm": (1, 0.4, "100.0%")}


def test_recording_ends_by_itself(tmp_path: Path) -> None:
    profiler = WorkerProfiler(str(tmp_path / "new"), 3, torch.device("cpu"))
    for _ in range(5):
        profiler.begin_step()
        torch.ones(4).neg()
    report = profiler.stop()
    assert report.num_steps == 3
    (path,) = (tmp_path / "new").iterdir()
    assert report.path == str(path)
    with gzip.open(path) as file:
        names = [e.get("name") for e in json.load(file)["traceEvents"]]
    assert names.count("aten::neg") == 3
    assert {f"ProfilerStep#{number}" for number in (1, 2, 3)} <= set(names)
    assert rows(report.summary)["aten::neg"][0] == 3


def test_a_profile_of_a_cpu_does_not_load_the_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from nbengine.worker.profiler import WorkerProfiler\n"
        f"profiler = WorkerProfiler({str(tmp_path)!r}, 1, torch.device('cpu'))\n"
        "profiler.begin_step()\n"
        "profiler.stop()\n"
        "sys.exit('torch._inductor' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_files_of_several_workers_are_told_apart(tmp_path: Path) -> None:
    report = WorkerProfiler(str(tmp_path), 1, torch.device("cpu"), "rank1").stop()
    assert "-rank1-" in Path(report.path).name


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UtilityError, match="no profile can be written to"):
        WorkerProfiler(str(tmp_path / "file" / "below"), 3, torch.device("cpu"))


def test_a_profile_that_there_is_no_room_for_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes = Path.write_bytes

    def write_half(self: Path, data: bytes) -> int:
        write_bytes(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    profiler = WorkerProfiler(str(tmp_path), 1, torch.device("cpu"))
    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(UtilityError, match="No space left"):
        profiler.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_records_one_profile_at_a_time(tiny_config: EngineConfig, tmp_path: Path) -> None:
    worker = Worker(tiny_config)
    worker.init_device()
    with pytest.raises(UtilityError, match="start_profile first"):
        worker.stop_profile()
    worker.start_profile(str(tmp_path), 3)
    with pytest.raises(UtilityError, match="stop_profile first"):
        worker.start_profile(str(tmp_path), 3)
    assert worker.stop_profile().num_steps == 0


def test_a_worker_counts_each_of_the_steps_that_it_computes_at_once(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tiny_config)
    worker.init_device()
    answer = ModelRunnerOutput(["r"], [[1, 2, 3, 4]], step_ends=[1.0, 2.0, 3.0])
    runner = SimpleNamespace(execute_model=lambda _: None, sample_tokens=lambda _: answer)
    monkeypatch.setattr(worker, "model_runner", runner, raising=False)
    worker.start_profile(str(tmp_path), 6)
    plan = SchedulerOutput([], CachedRequestData(), {"r": 1}, 1, set(), num_steps=8)
    for _ in range(3):
        assert worker.execute_model(plan) is None
        worker.sample_tokens()
    assert worker.board.read()[0].num_steps == 12
    # The third plan comes when the six steps have been recorded.
    assert worker.stop_profile().num_steps == 8
