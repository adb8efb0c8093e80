"""The run store under processes that are killed, that write at once, and whose disk is full."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from runs_made import made_run

from nbengine.frontend.runs.run import Limits, RunFilter
from nbengine.frontend.runs.store import RunStore
from tests.support.thorough import amount

SUPPORT = Path(__file__).parents[2] / "support"
KEEPER = Path(__file__).parents[1] / "process_support" / "run_keeper.py"
IS_ROOT = os.geteuid() == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}


def keeper(*arguments: object) -> subprocess.Popen[str]:
    """Start a process that keeps runs."""
    return subprocess.Popen(
        [sys.executable, str(KEEPER), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def reported(process: subprocess.Popen[str], number: int) -> list[str]:
    """Read that many lines of a process."""
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(number)]


def prompts(path: Path) -> list[str]:
    return [row["prompt"] for row in RunStore(path).select(RunFilter())]


def is_sound(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()


@pytest.mark.timeout(300)
def test_a_writer_killed_at_any_moment_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    told: list[str] = []
    for life in range(amount(6, thorough=60)):
        # Each life ends at another moment: during its first writes, or with the log of many behind it.
        process = keeper(path, f"life{life}", 0, 200_000 if life % 2 else 100)
        told += reported(process, (1, 40, 7)[life % 3])
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        told += rest.split()
    assert len(told) >= 6
    assert is_sound(path)
    assert set(told) <= set(prompts(path))
    assert len(set(prompts(path))) == len(prompts(path))
    for row in RunStore(path).select(RunFilter()):
        number = int(row["prompt"].partition("-")[2])
        assert row["scores"] == {"number": number} or (row["scores"] == {} and row["prompt"] not in told)


def test_a_process_killed_before_its_first_run_leaves_a_store_that_others_use(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    path.touch(0o600)  # as it is between its making and its table
    RunStore(path).add([made_run(prompt="first")], Limits())
    assert prompts(path) == ["first"]


def test_processes_that_make_the_store_and_write_at_once_keep_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    processes = [keeper(path, f"process{index}", 40) for index in range(3)]
    told = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    expected = [f"process{index}-{number}" for index in range(3) for number in range(40)]
    assert [prompt for lines in told for prompt in lines] == expected
    assert sorted(prompts(path)) == sorted(expected)
    for index in range(3):
        own = [prompt for prompt in prompts(path) if prompt.startswith(f"process{index}-")]
        assert own == told[index]
    assert is_sound(path)


@pytest.mark.skipif(not IS_ROOT, reason="mounts a small disk")
def test_a_full_disk_and_one_that_cannot_be_written_cost_runs_and_nothing_else(tmp_path: Path) -> None:
    script = f"""
set -e
mount -t tmpfs -o size=2m none {tmp_path}
{sys.executable} {KEEPER} {tmp_path}/runs.sqlite small 3
{sys.executable} {KEEPER} {tmp_path}/runs.sqlite large 3 3000000
{sys.executable} {KEEPER} {tmp_path}/runs.sqlite again 2
mount -o remount,ro {tmp_path}
{sys.executable} {KEEPER} {tmp_path}/runs.sqlite never 2
NBENGINE_RUNS_DIR={tmp_path} {sys.executable} -c 'import nbengine; print([r["prompt"] for r in nbengine.runs()])'
mkdir {tmp_path}/none 2>/dev/null || NBENGINE_RUNS_DIR={tmp_path}/none {sys.executable} -c \
 'import nbengine; print(len(nbengine.runs()))'
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["small-0", "small-1", "small-2"]
    # What keeps runs from being written is told once, and then there is silence.
    assert "a run is not kept" in lines[3]
    assert "database or disk is full" in lines[3]
    assert lines[4:6] == ["large-1", "large-2"]
    assert lines[6:8] == ["again-0", "again-1"]
    assert "a run is not kept" in lines[8]
    assert "its directory cannot be written" in lines[8]
    assert lines[9] == "never-1"
    assert lines[10] == "['small-0', 'small-1', 'small-2', 'again-0', 'again-1']"
    assert lines[11] == "0"


def test_a_limit_on_the_size_of_files_costs_runs_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    RunStore(path).add([made_run(prompt="before")], Limits())
    limited = subprocess.run(
        [
            "prlimit",
            f"--fsize={path.stat().st_size + 100_000}",
            sys.executable,
            str(KEEPER),
            str(path),
            "r",
            "3",
            "300000",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=True,
    )
    first, *others = limited.stdout.splitlines()
    assert "a run is not kept" in first
    assert others == ["r-1", "r-2"]
    assert prompts(path) == ["before"]
    RunStore(path).add([made_run(prompt="after")], Limits())
    assert prompts(path) == ["before", "after"]
    assert is_sound(path)
