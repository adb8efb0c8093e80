"""A process at one end of a message queue: does what it is told and says what came of it, a JSON line each.

    python queue_end.py write DIRECTORY SOCKET_DIRECTORY NUM_READERS    prints the handle first
    python queue_end.py read HANDLE RANK

It imports no torch, and so starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from nbengine.errors import NBEngineError, QueueClosedError
from nbengine.ipc.queues.message_queue import MessageQueue

CHUNK = 4096
CHUNKS = 2
DELAY = 1e-3
"""Seconds: the longest of the delays that a stream has now and then."""


def size_of(index: int) -> int:
    """Bytes of message `index`: a third small, a third about a chunk's size, a third up to three chunks."""
    chooser = random.Random(index)
    low, high = ((0, 200), (CHUNK - 100, CHUNK + 100), (0, 3 * CHUNK))[index % 3]
    return chooser.randint(low, high)


def message_of(index: int) -> tuple[int, bytes]:
    return index, random.Random(-index).randbytes(size_of(index))


def delay(chooser: random.Random) -> None:
    if chooser.random() < 0.02:
        time.sleep(chooser.random() * DELAY)


class QueueEnd:
    """The commands that an end of a queue takes; each method's result is printed."""

    def __init__(self, queue: MessageQueue, rank: int) -> None:
        self.queue = queue
        self.chooser = random.Random(rank)
        self.interrupts = 0

    def ready(self, timeout: float) -> None:
        self.queue.wait_until_ready(timeout)

    def enqueue(self, size: int, timeout: float | None = None) -> None:
        self.queue.enqueue(b"m" * size, timeout)

    def fill(self) -> None:
        """Enqueue until the queue ends."""
        while True:
            self.queue.enqueue(b"m")

    def dequeue(self, timeout: float | None = None) -> int:
        return len(self.queue.dequeue(timeout))

    def write_stream(self, count: int) -> None:
        for index in range(count):
            delay(self.chooser)
            self.queue.enqueue(message_of(index))

    def read_stream(self, count: int) -> dict[str, object]:
        """Read a stream to its end and compare; a SIGINT inside the queue interrupts it there."""
        signal.signal(signal.SIGINT, self._interrupt)
        wrong = []
        index = 0
        while True:
            try:
                message = self.queue.dequeue()
            except KeyboardInterrupt:
                continue
            except QueueClosedError:
                break
            if message != message_of(index):
                wrong.append((index, message[0], len(message[1])))
            delay(self.chooser)
            index += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return {"count": index, "wrong": wrong[:3], "interrupts": self.interrupts}

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals["__name__"] == "nbengine.ipc.queues.message_queue":
                self.interrupts += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def cpu_seconds(self) -> float:
        return time.process_time()

    def shutdown(self) -> None:
        self.queue.shutdown()


def serve(end: QueueEnd) -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        method: Callable[..., object] = getattr(end, name)
        print(json.dumps({"begins": name}), flush=True)
        start = time.monotonic()
        try:
            answer = {"result": method(*arguments)}
        except NBEngineError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer | {"seconds": time.monotonic() - start}), flush=True)


def main() -> None:
    # An interrupt may come as soon as a stream has been said to begin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, *arguments = sys.argv[1:]
    if role == "write":
        directory, sockets, readers = arguments
        queue = MessageQueue(
            int(readers),
            directory=directory,
            socket_directory=sockets,
            max_chunk_bytes=CHUNK,
            max_chunks=CHUNKS,
        )
        print(
            json.dumps({"handle": pickle.dumps(queue.export_handle()).hex(), "pid": os.getpid()}), flush=True
        )
        rank = -1
    else:
        queue = MessageQueue.create_from_handle(pickle.loads(bytes.fromhex(arguments[0])), int(arguments[1]))
        rank = int(arguments[1])
        print(json.dumps({"pid": os.getpid()}), flush=True)
    with contextlib.closing(queue):
        serve(QueueEnd(queue, rank))


if __name__ == "__main__":
    main()
