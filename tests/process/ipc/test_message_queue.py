"""A message queue between real processes, which are stopped, interrupted and killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_support import queue_end
from stopping import stop

from tests.support.thorough import amount

STREAM = amount(3000, thorough=10_000)
NOTICED = 60.0
"""Seconds within which a dead process has to be noticed."""


class Child:
    """A process that runs `queue_end.py`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, queue_end.__file__, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.hello: dict[str, Any] = {}
        """The first thing that it says."""

    def greet(self) -> None:
        """Wait for what it says first."""
        self.hello = self._read()

    def ask(self, *command: object) -> None:
        """Begin something; returns when the process has begun."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        assert self._read() == {"begins": command[0]}

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last `ask`."""
        return self._read()

    def do(self, *command: object) -> Any:
        self.ask(*command)
        return self.answer()["result"]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def end(self) -> int:
        """End it in an orderly way, from whatever state, and return its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            return self._process.wait(60)
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
    shutil.rmtree(path)


@pytest.fixture
def sockets(private_socket_dir: Path) -> Iterator[Path]:
    path = private_socket_dir / "queues"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(no_leftovers: None, directory: Path, sockets: Path) -> Iterator[Start]:
    """Start a writer and its readers, each in a process of its own."""
    children: list[Child] = []

    def make(num_readers: int) -> tuple[Child, list[Child]]:
        children.append(Child("write", directory, sockets, num_readers))
        children[0].greet()
        children.extend(Child("read", children[0].hello["handle"], rank) for rank in range(num_readers))
        for reader in children[1:]:
            reader.greet()
        return children[0], children[1:]

    yield make
    for child in children[::-1]:
        child.end()


@pytest.fixture
def ready(start: Start, directory: Path, sockets: Path) -> Start:
    """The same, and all of them are ready."""

    def make(num_readers: int) -> tuple[Child, list[Child]]:
        writer, readers = start(num_readers)
        for child in (*readers, writer):
            child.ask("ready", 20)
        assert all("result" in child.answer() for child in (*readers, writer))
        assert [*directory.iterdir(), *sockets.iterdir()] == []
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


def test_thousands_of_messages_arrive_whole_and_in_order_though_all_are_stopped_and_interrupted(
    ready: Start,
) -> None:
    writer, readers = ready(3)
    writer.ask("write_stream", STREAM)
    for reader in readers:
        reader.ask("read_stream", STREAM)
    written: list[dict[str, Any]] = []
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


def test_what_a_dead_writer_has_sent_is_received_and_then_its_death_is_noticed(ready: Start) -> None:
    writer, readers = ready(2)
    for size in (10, 3 * queue_end.CHUNK):
        writer.do("enqueue", size)
    readers[0].ask("dequeue", 20)
    assert readers[0].answer()["result"] == 10
    assert readers[0].do("dequeue", 20) == 3 * queue_end.CHUNK
    readers[0].ask("dequeue")
    writer.kill()
    answer = readers[0].answer()
    assert answer["error"] == "PeerDiedError"
    assert f"the writer of a message queue is gone: process {writer.pid}" in answer["message"]
    assert answer["seconds"] < NOTICED
    assert readers[1].do("dequeue", 20) == 10
    assert readers[1].do("dequeue", 20) == 3 * queue_end.CHUNK
    readers[1].ask("dequeue")
    assert readers[1].answer()["error"] == "PeerDiedError"


def test_a_writer_who_waits_for_room_notices_that_a_reader_is_dead(ready: Start) -> None:
    writer, readers = ready(2)
    writer.ask("fill")
    for _ in range(queue_end.CHUNKS):
        assert readers[0].do("dequeue", 20) == 1
    readers[1].kill()
    answer = writer.answer()
    assert answer["error"] == "PeerDiedError"
    assert f"reader 1 of a message queue is gone: process {readers[1].pid}" in answer["message"]
    writer.do("shutdown")
    readers[0].ask("dequeue")
    assert readers[0].answer()["error"] == "QueueClosedError"


def test_who_waits_is_woken_when_another_end_shuts_down(ready: Start) -> None:
    writer, readers = ready(2)
    readers[0].ask("dequeue")
    writer.ask("fill")
    while "result" in (answer := readers[0].answer()):
        readers[0].ask("dequeue", 0.2)
    assert answer["error"] == "QueueTimeoutError"
    readers[1].do("shutdown")
    assert "reader 1" in writer.answer()["message"]
    readers[0].ask("dequeue")
    writer.do("shutdown")
    # A writer that got no processor for a while may have written more after the reader's last wait.
    while "result" in (answer := readers[0].answer()):
        readers[0].ask("dequeue")
    assert answer["error"] == "QueueClosedError"


@pytest.mark.parametrize("victim", [0, 1], ids=["writer", "reader"])
def test_a_death_before_all_are_ready_is_noticed(start: Start, victim: int) -> None:
    writer, readers = start(2)
    if victim == 0:
        writer.kill()
        survivors = readers
    else:
        # Dead before it has connected to the socket, or after.
        readers[0].kill()
        survivors = [writer]
    for child in survivors:
        child.ask("ready", 20)
        answer = child.answer()
        assert answer["error"] == "PeerDiedError"
        assert answer["seconds"] < NOTICED


def test_a_stopped_process_only_delays_and_a_sleeping_one_costs_next_to_nothing(ready: Start) -> None:
    writer, (reader,) = ready(1)
    reader.ask("dequeue")
    stop(writer.pid)
    time.sleep(1.0)
    writer.send(signal.SIGCONT)
    writer.do("enqueue", 10)
    assert reader.answer()["result"] == 10
    before = reader.do("cpu_seconds")
    reader.ask("dequeue", 1.0)
    assert reader.answer()["error"] == "QueueTimeoutError"
    assert reader.do("cpu_seconds") - before < 0.1
