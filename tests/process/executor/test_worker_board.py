"""The workers' page, written by one process while another reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from process_support.engine_under_test import wait_for

from nbengine.runtime.worker_board import WorkerBoard
from tests.support.thorough import amount

READS = amount(20, thorough=1000)
"""Thousands."""
PATTERNS = (0x0101_0101_0101_0101, 0x7E7E_7E7E_7E7E_7E7E)
"""They have no byte in common, so that any mixture of them is a third value."""
WRITER = f"""
import sys, threading
from nbengine.runtime.worker_board import WorkerBoard

row = WorkerBoard.attach(sys.argv[1], 2).row(1)
row.set_memory({PATTERNS[0]})
print("writing", flush=True)
threading.Thread(target=sys.stdin.read).start()
while threading.active_count() > 1:
    for pattern in {PATTERNS}:
        row.set_memory(pattern)
"""


def test_a_reader_never_sees_half_of_a_value(tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 2)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(board.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    seen: set[int] = set()
    for _ in range(READS):
        seen.update(board.read()[1].memory_bytes for _ in range(1000))
    # The writer may get no processor for a while.
    wait_for(lambda: seen.add(board.read()[1].memory_bytes) or seen >= set(PATTERNS), "both patterns")
    writer.stdin.close()
    assert writer.wait(60) == 0
    writer.stdout.close()
    assert seen == set(PATTERNS)
    assert board.read()[0].memory_bytes == 0
