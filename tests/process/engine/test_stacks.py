"""The stacks of a process that is stuck are had whatever it is stuck in, and ask nothing of who does not know the signal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from process_support.engine_under_test import wait_for

from nbengine.engine.host.stacks import STACKS_SECONDS, StackRequests
from nbengine.runtime.logs import worker_log_path

STUCK = """
import ctypes, threading
from nbengine.runtime.stack_dumps import write_stacks_on_signal

# It is found beforehand: behind the printing, no other function of Python's runs than the one that is stuck.
sleep = ctypes.PyDLL(None).sleep

def stuck_with_the_interpreter():
    print("stuck", flush=True)
    sleep(100)

write_stacks_on_signal()
threading.Thread(target=threading.Event().wait, daemon=True).start()
stuck_with_the_interpreter()
"""
STRANGER = "import time; print('there', flush=True); time.sleep(100)"


@dataclass
class Core:
    group: int | None
    rank: int = 1
    incarnation: int = 2

    def send_signal(self, number: int) -> None:
        raise AssertionError("it is on this machine")


def test_a_worker_stuck_in_native_code_that_holds_the_interpreter_says_where_it_is(
    no_leftovers: None, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text('Thread 0x01 (most recent call first):\n  File "old.py", line 1 in before\n')
    worker_log = worker_log_path(log, 3)
    with open(worker_log, "wb") as file:
        stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=file, stderr=file, process_group=0)
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, process_group=stuck.pid
    )
    try:
        wait_for(lambda: "stuck" in worker_log.read_text(), "the stuck call")
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"there\n"
        requests = StackRequests(str(log), 2)
        requests.ask(Core(os.getpgid(stuck.pid)), now=10.0)
        assert requests.deadline == 10.0 + STACKS_SECONDS
        assert requests.take(10.5) == []
        wait_for(lambda: "stuck_with_the_interpreter" in worker_log.read_text(), "the stacks")
        (gathered,) = requests.take(10.0 + STACKS_SECONDS)
        assert (gathered.rank, gathered.incarnation) == (1, 2)
        first, second, *_ = gathered.stacks.splitlines()
        assert first == "worker 1 is in (innermost call first):"
        assert second.endswith("in stuck_with_the_interpreter")
        assert "old.py" not in gathered.stacks
        assert stranger.poll() is None
    finally:
        for process in (stuck, stranger):
            process.kill()
            process.communicate()
