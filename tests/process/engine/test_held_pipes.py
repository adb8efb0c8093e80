"""A process that somebody's parent has forked holds the parent's pipes for longer than the parent lives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from process_support.engine_under_test import SUPPORT_PATH, wait_for

from nbengine.runtime.lifeline import Lifeline

PARENT = """
import os, subprocess, sys, time
{start}
# With all that this process has open.
held = subprocess.Popen(["sleep", "60"], close_fds=False)
print(held.pid, *pids, flush=True)
time.sleep(60)
"""
START_HOST = """
from process_support.engine_under_test import EngineUnderTest, fake_config
engine, pipe = EngineUnderTest.with_parent_pipe(fake_config(bound=True))
os.set_inheritable(pipe, True)
pids = [engine.host.pid, engine.log_path]
"""
START_KEEPER = """
import socket
from nbengine.runtime.processes import engine_command
theirs, ours = socket.socketpair()
ours.set_inheritable(True)
command = engine_command("keeper", str(theirs.fileno()), "node", "127.0.0.1", "held")
subprocess.run(command, pass_fds=(theirs.fileno(),), start_new_session=True, check=True)
theirs.close()
pids = []
"""


@contextlib.contextmanager
def parent(start: str) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """A process, and what it prints: the pid of one that holds its pipes, then what `start` says."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(start=start)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": SUPPORT_PATH},
    )
    assert process.stdout is not None
    said = process.stdout.readline().split()
    try:
        yield process, said
    finally:
        process.kill()
        process.communicate()


def test_a_host_does_not_wait_for_a_pipe_that_a_forked_process_holds() -> None:
    with parent(START_HOST) as (process, (held, host, log)):
        wait_for(lambda: "ready: engine core 0" in Path(log).read_text(), "readiness")
        try:
            process.kill()
            process.wait()
            wait_for(lambda: not psutil.pid_exists(int(host)), "the end of the host")
            assert psutil.pid_exists(int(held))
        finally:
            os.kill(int(held), signal.SIGKILL)


def keepers() -> list[psutil.Process]:
    titles = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [process for process, title in titles if " ".join(title).startswith("nbengine: keeper held")]


def test_a_keeper_ends_with_its_owner_though_a_forked_process_holds_the_line() -> None:
    with parent(START_KEEPER) as (process, (held,)):
        wait_for(keepers, "the keeper")
        try:
            process.kill()
            process.wait()
            wait_for(lambda: not keepers(), "the end of the keeper")
            assert psutil.pid_exists(int(held))
        finally:
            os.kill(int(held), signal.SIGKILL)


def test_a_lifeline_takes_nothing_that_is_meant_for_others_and_sees_the_end() -> None:
    theirs, ours = socket.socketpair()
    lifeline = Lifeline(ours.fileno(), lambda: None)
    waiting = threading.Thread(target=lifeline._wait_for_end)
    theirs.send(b"a message")
    waiting.start()
    lifeline._signal_writer.send(b"\0")
    woken = threading.Event()
    lifeline._wake = woken.set
    lifeline._signal_writer.send(b"\0")
    assert woken.wait(60)
    assert ours.recv(100) == b"a message"
    assert waiting.is_alive()
    theirs.close()
    waiting.join(60)
    assert not waiting.is_alive()
    for end in (ours, lifeline._signals, lifeline._signal_writer):
        end.close()
