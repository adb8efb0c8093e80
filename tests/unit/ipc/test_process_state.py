"""The time that a process waited for a processor is what the system counted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest

from nbengine.ipc import process_state
from nbengine.ipc.process_state import seconds_in_line

SPIN = "import os; os.sched_setaffinity(0, {%d}); print(flush=True)\nwhile True: pass"
IN_LINE = 0.05


@pytest.mark.skipif(seconds_in_line(os.getpid()) is None, reason="this system does not count it")
def test_two_processes_with_one_processor_stand_in_line() -> None:
    code = SPIN % min(os.sched_getaffinity(0))
    spinning = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        before = []
        for process in spinning:
            assert process.stdout is not None
            process.stdout.readline()
            before.append(seconds_in_line(process.pid) or 0.0)
        # Each has to wait for the other, for as long as both run.
        while any(
            (seconds_in_line(p.pid) or 0.0) < b + IN_LINE for p, b in zip(spinning, before, strict=True)
        ):
            time.sleep(0.01)
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def test_a_process_that_is_gone_has_no_count() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert seconds_in_line(process.pid) is None


@pytest.mark.parametrize(
    ("written", "seconds"), [(b"7 1500000000 3\n", 1.5), (b"7 0 3\n", 0.0), (b"0 0 0\n", None), (b"", None)]
)
def test_zeros_of_a_system_that_does_not_count_are_no_count(
    monkeypatch: pytest.MonkeyPatch, written: bytes, seconds: float | None
) -> None:
    monkeypatch.setattr(process_state, "open", lambda *_: io.BytesIO(written), raising=False)
    assert seconds_in_line(17) == seconds
