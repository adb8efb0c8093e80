"""Workers of an executor in a script or notebook, which has no host: they and their files end with its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_processes import is_running
from process_support.engine_under_test import wait_for

pytestmark = pytest.mark.fresh_processes

NOTICED = 60.0
SCRIPT = """
import json, os, sys, time
from process_support.fake_worker import FakeWorkersExecutor, fake_workers_config

executor = FakeWorkersExecutor(fake_workers_config(2))
if {fork}:
    # Holds the parent's ends of all lines open, without knowing of them.
    if os.fork() == 0:
        time.sleep(60)
executor.collective_rpc("late", ("x", 0.0))
executor.collective_rpc("trouble", {kinds}, non_block=True)
pids = [worker.process.pid for worker in executor._workers]
print(json.dumps([pids, executor._own_directories.paths]), flush=True)
sys.stdin.read()
"""


class Script:
    """A script with an executor, which waits until its input ends."""

    def __init__(self, kinds: tuple[str, ...] = ("", ""), *, fork: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(kinds=kinds, fork=fork)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        pids, directories = json.loads(self.process.stdout.readline())
        self.workers = [psutil.Process(pid) for pid in pids]
        self.directories = [Path(directory) for directory in directories]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.mark.parametrize("kind", ["", "busy", "native"])
def test_workers_and_their_files_end_with_the_process_that_is_killed(kind: str) -> None:
    script = Script(("", kind))
    assert all(directory.is_dir() for directory in script.directories)
    script.process.kill()
    expect_nothing_left(script)


def test_a_notebooks_kernel_that_is_killed_with_its_group_leaves_nothing() -> None:
    script = Script(("native", ""))
    os.killpg(script.process.pid, signal.SIGKILL)
    expect_nothing_left(script)


@pytest.mark.parametrize("kind", ["", "native"])
def test_a_process_that_was_forked_does_not_keep_the_workers_alive(kind: str) -> None:
    script = Script((kind, kind), fork=True)
    child = psutil.Process(script.process.pid).children()
    (forked,) = [process for process in child if process not in script.workers]
    script.process.kill()
    expect_nothing_left(script)
    assert is_running(forked)
    forked.kill()


def test_a_script_that_ends_without_shutting_down_leaves_nothing() -> None:
    script = Script()
    script.process.stdin.close()
    assert script.process.wait(NOTICED) == 0
    expect_nothing_left(script)


def test_an_interrupt_ends_no_worker() -> None:
    script = Script()
    for worker in script.workers:
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGHUP)
    with pytest.raises(psutil.TimeoutExpired):
        script.workers[0].wait(0.2)
    assert all(map(is_running, script.workers))
    script.process.kill()
    expect_nothing_left(script)


def expect_nothing_left(script: Script) -> None:
    start = time.monotonic()
    wait_for(lambda: not any(map(is_running, script.workers)), "the end of the workers", NOTICED)
    wait_for(lambda: not any(d.exists() for d in script.directories), "the end of the files", NOTICED)
    assert time.monotonic() - start < NOTICED
    script.close()
