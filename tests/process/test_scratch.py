"""A run of tests that is killed leaves nothing that the next run does not remove."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import wait_for

from tests.tools import scratch
from tests.tools.imports import ROOT

HANGING = """
import json, os, signal
from pathlib import Path

def test_it(start_engine, tmp_path):
    engine = start_engine()
    engine.wait_ready()
    notes = {
        "pids": [process.pid for process in engine.processes()],
        "paths": [str(engine.run_dir), engine.info.tensor_dir, str(tmp_path), os.environ["NBENGINE_SCRATCH"]],
    }
    path = Path(__file__).with_name("notes")
    path.with_suffix(".new").write_text(json.dumps(notes))
    path.with_suffix(".new").rename(path)
    signal.pause()
"""
DEADLINE = 100.0


def pytest_command(*arguments: str) -> list[str]:
    plugins = ["-p", "tests.conftest", "-p", "tests.process.conftest"]
    return [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes do not tell their environment")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    file, notes = str(tmp_path / "test_hanging.py"), tmp_path / "notes"
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(
        pytest_command("-n", workers, file), cwd=ROOT, start_new_session=True, text=True, **quiet
    ) as run:
        try:
            wait_for(lambda: notes.exists() or run.poll() is not None, "the engine", DEADLINE)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
        assert notes.exists(), run.stdout and run.stdout.read()
    left = json.loads(notes.read_text())
    paths = [Path(path) for path in left["paths"]]
    # The engine is not bound to the run, and its files are there, though the run is not.
    assert all(map(is_running, left["pids"]))
    assert [path for path in paths if not path.exists()] == []
    assert paths[-1].parent == Path(os.environ[scratch.VARIABLE])

    collect = pytest_command("--collect-only", file)
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [pid for pid in left["pids"] if is_running(pid)] == []
    assert [path for path in paths if path.exists()] == []
    folders = paths[-1].parent.glob("nbt-*")
    assert [path for path in folders if scratch.is_abandoned(path)] == []
