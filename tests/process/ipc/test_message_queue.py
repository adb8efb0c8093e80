"""A message queue between real processes, which are stopped, interrupted and killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_support import queue_end

STREAM = 10_000
NOTICED = 3.0
"""Seconds within which a dead process has to be noticed."""


class Child:
    """A process that runs `queue_end.py`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, queue_end.__file__, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._read()
        self.pid = self._process.pid

    def ask(self, *command: object) -> None:
        """Begin something; returns when the process has begun."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        assert self._read() == {"begins": command[0]}

    def answer(self) -> dict[str, Any]:
        """What came of the last `ask`."""
        return self._read()

    def do(self, *command: object) -> Any:
        self.ask(*command)
        return self.answer()["result"]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def end(self) -> int:
        """End it in an orderly way, from whatever state, and return its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"process {self._process.args} has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


Start = Callable[[int], tuple[Child, list[Child]]]


@pytest.fixture
def directory(private_socket_dir: Path) -> Iterator[Path]:
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() else private_socket_dir
    path = parent / f"nbengine-{private_socket_dir.name}-queues"
    path.mkdir(mode=0o700)
    yield path
    path.rmdir()


@pytest.fixture
def start(no_leftovers: None, directory: Path, private_socket_dir: Path) -> Iterator[Start]:
    """Start a writer and its readers, each in a process of its own."""
    children: list[Child] = []

    def make(num_readers: int) -> tuple[Child, list[Child]]:
        writer = Child("write", directory, private_socket_dir, num_readers)
        children.append(writer)
        for rank in range(num_readers):
            children.append(Child("read", writer.hello["handle"], rank))
        return children[0], children[1:]

    yield make
    for child in children[::-1]:
        child.end()


@pytest.fixture
def ready(start: Start, directory: Path) -> Start:
    """The same, and all of them are ready."""

    def make(num_readers: int) -> tuple[Child, list[Child]]:
        writer, readers = start(num_readers)
        for child in (*readers, writer):
            child.ask("ready", 20)
        assert all("result" in child.answer() for child in (*readers, writer))
        assert list(directory.iterdir()) == []
        return writer, readers

    return make


def disturb(children: list[Child], chooser: random.Random, is_over: Callable[[], bool]) -> None:
    """Stop one process after another for a while, and interrupt readers, until it is over."""
    while not is_over():
        child = chooser.choice(children)
        child.send(signal.SIGSTOP)
        time.sleep(chooser.random() * 0.01)
        child.send(signal.SIGCONT)
        for _ in range(3):
            chooser.choice(children[1:]).send(signal.SIGINT)
            time.sleep(chooser.random() * 0.002)


def test_ten_thousand_messages_arrive_whole_and_in_order_though_all_are_stopped_and_interrupted(
    ready: Start,
) -> None:
    writer, readers = ready(3)
    writer.ask("write_stream", STREAM)
    for reader in readers:
        reader.ask("read_stream", STREAM)
    written: list[dict[str, Any]] = []
    import threading

    waiting = threading.Thread(target=lambda: written.append(writer.answer()))
    waiting.start()
    disturb([writer, *readers], random.Random(5), lambda: not waiting.is_alive())
    waiting.join()
    assert "result" in written[0]
    writer.do("shutdown")
    for reader in readers:
        result = reader.answer()["result"]
        assert (result["count"], result["wrong"]) == (STREAM, [])
        assert result["interrupts"] > 0
