"""The ring's protocol holds in every interleaving, faults are found, and the code does what was explored."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbengine.errors import QueueClosedError
from nbengine.ipc.queues import waiting
from nbengine.ipc.queues.shm_ring import RingReader, RingWriter, ShmRingBuffer

sys.path.insert(0, str(Path(__file__).parent))

from ring_explorer import Broken, Cell, Explorer, Memory, Ring

from tests.support.thorough import amount

TORN = "is due message"
LOST = "sleeps for ever"
MISSED = "has come to its end with"


@pytest.mark.parametrize(
    "ring",
    [Ring(), Ring(chunks=1, shuts_down=False), Ring(messages=5, readers=1, shuts_down=False)],
    ids=str,
)
def test_every_message_is_read_whole_and_once_and_nobody_sleeps_for_ever(ring: Ring) -> None:
    # The weakest memory does all that the others do.
    assert Explorer(ring, Memory.PSO).explore() > 1000


@pytest.mark.parametrize(
    ("fault", "memory", "ring", "symptom"),
    [
        ("swap the flags", Memory.SC, Ring(), TORN),
        ("swap the looks", Memory.SC, Ring(), f"{MISSED}|{TORN}"),
        ("look again", Memory.SC, Ring(), LOST),
        ("fence after announcing", Memory.TSO, Ring(), LOST),
        ("publish: fence before waking", Memory.TSO, Ring(shuts_down=False), LOST),
        ("release: fence before waking", Memory.TSO, Ring(chunks=1), LOST),
        ("shutdown: fence before waking", Memory.TSO, Ring(), LOST),
        ("fence before written", Memory.PSO, Ring(), TORN),
        ("fence before filling", Memory.PSO, Ring(), TORN),
    ],
)
def test_a_fault_is_found(fault: str, memory: Memory, ring: Ring, symptom: str) -> None:
    with pytest.raises(Broken, match=symptom):
        Explorer(ring, memory, {fault}).explore()


class Lockstep:
    """Lets the ends, a thread each, do one step at a time, in the order of a walk, and compares what they do."""

    def __init__(self, ends: int) -> None:
        self.running = True
        self._turn = [threading.Semaphore(0) for _ in range(ends)]
        self._done = threading.Semaphore(0)
        self._seen: tuple[str, Cell | None, int] | None = None

    def do(
        self, end: int, kind: str, cell: Cell | None = None, perform: Callable[[], int] = lambda: 1
    ) -> int:
        """Return what `perform` did when it was the end's turn; an end calls this for each of its steps."""
        if not self.running:
            return perform()
        assert self._turn[end].acquire(timeout=60)
        value = perform()
        if self.running:
            self._seen = kind, cell, value
            self._done.release()
        return value

    def expect(self, end: int, kind: str, cell: Cell | None, value: int) -> None:
        self._turn[end].release()
        assert self._done.acquire(timeout=60), f"end {end} does nothing, where {kind} of {cell} is due"
        assert self._seen == (kind, cell, value if kind in ("load", "store", "expect") else 1)

    def stop(self) -> None:
        self.running = False
        for turn in self._turn:
            turn.release(1000)


class TracedMemory:
    """The ring's memory as one end uses it: its flags step by step, the rest as it is."""

    def __init__(self, lockstep: Lockstep, end: int, ring: ShmRingBuffer) -> None:
        self._lockstep = lockstep
        self._end = end
        self._memory = ring._memory
        handle = ring.handle
        self._cells: dict[int, Cell] = {}
        for chunk in range(handle.max_chunks):
            first = handle.metadata + chunk * (1 + handle.num_readers)
            self._cells[first] = ("written", chunk, 0)
            self._cells |= {first + 1 + r: ("read", chunk, r) for r in range(handle.num_readers)}
        self._closed = handle.closed

    def __getitem__(self, place: int) -> int:
        cell = self._cells.get(place)
        if place == self._closed and self._end:
            cell = ("closed", 0, 0)
        if cell is None:
            return self._memory[place]
        return self._lockstep.do(self._end, "load", cell, lambda: self._memory[place])

    def __setitem__(self, place: int, value: int) -> None:
        def store() -> int:
            self._memory[place] = value
            return value

        cell = ("closed", 0, 0) if place == self._closed else self._cells.get(place)
        if cell is None:
            store()
        else:
            self._lockstep.do(self._end, "store", cell, store)

    def find(self, what: bytes, start: int, stop: int) -> int:
        return next((place for place in range(start, stop) if self[place] == what[0]), -1)

    def close(self) -> None:
        self._memory.close()


class TracedWord:
    """A wake word as one end uses it; `sleep` returns when the walk says that the end goes on."""

    polls = False

    def __init__(self, lockstep: Lockstep, end: int, owner: int, word: waiting.WakeWord) -> None:
        self._lockstep = lockstep
        self._end = end
        self._cell = ("word", owner, 0)
        self._word = word

    def _store(self, value: int) -> None:
        def store() -> int:
            self._word._word[0] = value
            return value

        self._lockstep.do(self._end, "store", self._cell, store)

    def announce(self) -> None:
        self._store(1)

    def withdraw(self) -> None:
        self._store(0)

    def sleep(self, seconds: float) -> None:
        self._lockstep.do(self._end, "sleep", self._cell)

    def wake(self) -> None:
        if self._lockstep.do(self._end, "load", self._cell, lambda: self._word._word[0]):
            self._store(0)
            self._lockstep.do(self._end, "wake", self._cell)

    def release(self) -> None:
        self._word.release()


def trace(ring: ShmRingBuffer, end: int, lockstep: Lockstep) -> None:
    ring._memory = TracedMemory(lockstep, end, ring)
    ring._fence = lambda: lockstep.do(end, "fence")
    ring._words = [TracedWord(lockstep, end, owner, word) for owner, word in enumerate(ring._words)]
    ring._waiter = waiting.Waiter(ring._words[end], ring._fence, lambda: None)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Ring, Lockstep, RingWriter, list[RingReader]]]:
    tmp_path.chmod(0o700)
    ring = Ring(messages=5)
    lockstep = Lockstep(1 + ring.readers)
    writer = RingWriter(tmp_path, ring.readers, max_chunk_bytes=64, max_chunks=ring.chunks)
    readers = [RingReader(writer.handle, rank) for rank in range(ring.readers)]
    for end, real in enumerate([writer, *readers]):
        trace(real, end, lockstep)
    yield ring, lockstep, writer, readers
    lockstep.stop()
    for real in (*readers, writer):
        real.close()


def write(ring: Ring, lockstep: Lockstep, writer: RingWriter) -> None:
    for message in range(ring.messages):
        with writer.acquire_write() as chunk:
            for half in range(2):

                def store(half: int = half, message: int = message, chunk: memoryview = chunk) -> int:
                    chunk[half] = message + 1
                    return message + 1

                lockstep.do(0, "store", ("data", message % ring.chunks, half), store)
    writer.shutdown()


def read(ring: Ring, lockstep: Lockstep, reader: RingReader, rank: int) -> None:
    with contextlib.suppress(QueueClosedError):
        for message in itertools.count():
            with reader.acquire_read() as chunk:
                for half in range(2):
                    cell = ("data", message % ring.chunks, half)
                    lockstep.do(1 + rank, "expect", cell, lambda half=half, chunk=chunk: chunk[half])


SEEDS = range(amount(8, thorough=25))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_code_does_step_by_step_what_the_explored_programs_do(ends, seed: int, monkeypatch) -> None:
    monkeypatch.setattr(waiting.Waiter, "_look_when_due", lambda *_: False)
    ring, lockstep, writer, readers = ends
    threads = [threading.Thread(target=write, args=(ring, lockstep, writer), daemon=True)]
    threads += [
        threading.Thread(target=read, args=(ring, lockstep, reader, rank), daemon=True)
        for rank, reader in enumerate(readers)
    ]
    for thread in threads:
        thread.start()
    explorer = Explorer(ring)
    for end, step, cell, value in explorer.walk(random.Random(seed)):
        lockstep.expect(end, step.kind, cell, value)
    lockstep.running = False
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_walks_go_through_every_instruction() -> None:
    explorer = Explorer(Ring(messages=5))
    seen = {(end, step.name) for seed in SEEDS for end, step, _, _ in explorer.walk(random.Random(seed))}
    expected = {
        (end, step.name)
        for end, program in enumerate(explorer.programs)
        for step in program.steps
        if not step.kind.startswith(("goto", "end"))
    }
    assert seen == expected
