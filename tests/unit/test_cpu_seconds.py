"""The plugin that tells the CPU seconds of every file of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUSY = "import time\nwhile time.process_time() < 0.5: pass"
TESTS = f"""
import subprocess, sys
def test_that_starts_a_busy_process():
    subprocess.run([sys.executable, "-c", {BUSY!r}], check=True)
"""


@pytest.mark.parametrize(
    "processes", [[], ["-p", "xdist", "-n", "1"]], ids=["one process", "a process of pytest-xdist"]
)
def test_a_file_is_listed_with_what_its_tests_and_their_processes_have_spent(
    tmp_path: Path, processes: list[str]
) -> None:
    (tmp_path / "test_busy.py").write_text(TESTS)
    (tmp_path / "test_idle.py").write_text("def test_nothing(): pass")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.tools.cpu_seconds",
        f"--rootdir={tmp_path}",
        *processes,
    ]
    # Only what is named: each plugin takes its time to import.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    spent = {
        file: float(seconds)
        for seconds, file in re.findall(r"^ +([0-9.]+)  (test_\w+\.py)$", done.stdout, re.MULTILINE)
    }
    assert spent["test_busy.py"] >= 0.5 > spent["test_idle.py"]
