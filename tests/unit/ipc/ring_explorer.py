"""Every interleaving of a writer and its readers on a ring, and what must hold in all of them.

The ends are little programs whose instructions are the single loads, stores, fences and futex calls of
`nbengine/ipc/queues/shm_ring.py` and `nbengine/ipc/queues/waiting.py`, named after the functions there.
`explore` goes through all states that they can reach, on a machine with one of three kinds of memory:

- `SC`: a store is seen by all at once;
- `TSO`, as x86: a store waits in its core's queue, and later loads of that core may overtake it;
- `PSO`: stores to different places may overtake each other too.

Loads happen in order on all of them, so what is said here of a fence between two loads is only that it does
no harm. A fence, like a system call, waits until the core's stores are out. There is no clock: an end that
sleeps is woken or sleeps for ever, so nothing here is owed to the bound on a sleep. An instruction that
touches nothing but its own core is done at once, since no other core can tell when it happened.

Two things are checked: a reader of a chunk finds the message that is due, whole; and when nothing can move
any more, the writer has written all, and every reader has read all and, if the writer has shut down, knows
that nothing more will come.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

WRITER = 0
"""The writer's index among the ends; reader r has r + 1."""

Cell = tuple[str, int, int]
"""A place in the shared memory: what it is, of which chunk or end, and which of several."""


class Memory(Enum):
    SC = "SC"
    TSO = "TSO"
    PSO = "PSO"


class Step(NamedTuple):
    """One instruction. `cell` is the place it touches in each chunk in turn, the same one everywhere if there
    is one.

    - `load`: go on at `to` if it finds `value`.
    - `expect`: a load that must find the number of the message.
    - `store`: of `value`, or of the number of the message if that is None; then, with `counts`, on to the
      next message.
    - `fence`; `sleep` and `wake` on a word; `goto` `to`; `goto when all are written`; `end`.
    """

    name: str
    kind: str
    cell: tuple[Cell, ...] = ()
    value: int | None = None
    to: str = ""
    counts: bool = False


@dataclass(frozen=True)
class Ring:
    """Sizes of what is explored."""

    messages: int = 3
    chunks: int = 2
    readers: int = 2
    shuts_down: bool = True
    """Otherwise the writer does nothing more after its last message."""

    def of_chunks(self, what: str, index: int = 0) -> tuple[Cell, ...]:
        return tuple((what, chunk, index) for chunk in range(self.chunks))


class Program:
    """Instructions of one end. `faults` names those that are left out, or "swap the flags"."""

    def __init__(self, ring: Ring, end: int, faults: Collection[str]) -> None:
        self.ring = ring
        self.end = end
        self.faults = faults
        self.steps: list[Step] = []
        self.labels: dict[str, int] = {}
        self._written = ring.of_chunks("written")
        self._word = (("word", end, 0),)

    def label(self, name: str) -> None:
        self.labels[name] = len(self.steps)

    def add(
        self, name: str, kind: str, cell: tuple[Cell, ...] = (), value: int | None = 0, **more: object
    ) -> None:
        if name not in self.faults:
            self.steps.append(Step(name, kind, cell, value, **more))

    def wake(self, name: str, ends: range) -> None:
        """`WakeWord.wake` of each of `ends`."""
        self.add(f"{name}: fence before waking", "fence")
        for end in ends:
            cell, after = (("word", end, 0),), f"{name}: {end} is awake"
            self.add("wake: load", "load", cell, 0, to=after)
            self.add("wake: store", "store", cell, 0)
            self.add("wake: futex", "wake", cell)
            self.label(after)

    def announce(self) -> None:
        """The beginning of a turn of `Waiter._sleep`; a look at what is waited for follows."""
        self.label("wait")
        self.add("announce", "store", self._word, 1)
        self.add("fence after announcing", "fence")

    def sleep(self) -> None:
        """The end of a turn of `Waiter._sleep`, and its way out."""
        self.add("sleep", "sleep", self._word)
        self.add("again", "goto", to="wait")
        self.label("withdraw")
        self.add("withdraw", "store", self._word, 0)

    def writer(self) -> Program:
        """`RingWriter.acquire_write` and `publish` of every message, then `shutdown`."""
        flags = [self.ring.of_chunks("read", reader) for reader in range(self.ring.readers)]
        self.label("top")
        self.add("all written", "goto when all are written", to="shutdown")
        self.add("_writable: written", "load", self._written, 0, to="acquire")
        for flag in flags:
            self.add("_writable: read", "load", flag, 0, to="wait")
        self.add("free", "goto", to="acquire")
        self.announce()
        if "look again" not in self.faults:
            self.add("_writable: written", "load", self._written, 0, to="withdraw")
            for flag in flags:
                self.add("_writable: read", "load", flag, 0, to="sleep")
            self.add("free", "goto", to="withdraw")
        self.label("sleep")
        self.sleep()
        self.label("acquire")
        self.add("acquire_write", "store", self._written, 0)
        self.add("fence before filling", "fence")
        for half in range(2):
            self.add("fill", "store", self.ring.of_chunks("data", half), None)
        self._publish(flags)
        self.wake("publish", range(1, 1 + self.ring.readers))
        self.add("next", "goto", to="top")
        self.label("shutdown")
        if self.ring.shuts_down:
            self.add("shutdown", "store", (("closed", WRITER, 0),), 1)
            self.wake("shutdown", range(1 + self.ring.readers))
        self.add("end", "end")
        return self

    def _publish(self, flags: list[tuple[Cell, ...]]) -> None:
        swapped = "swap the flags" in self.faults
        if swapped:
            self.add("publish: written", "store", self._written, 1)
        for flag in flags:
            self.add("publish: read", "store", flag, 0, counts=swapped and flag is flags[-1])
        self.add("fence before written", "fence")
        if not swapped:
            self.add("publish: written", "store", self._written, 1, counts=True)

    def reader(self) -> Program:
        """`RingReader.acquire_read` and `release_read` until the writer has shut down and all is read."""
        own = self.ring.of_chunks("read", self.end - 1)
        self.label("top")
        self._readable(own, "wait")
        self.add("message", "goto", to="acquire")
        self.announce()
        if "look again" not in self.faults:
            self._readable(own, "look for the end")
            self.add("message", "goto", to="withdraw")
            self.label("look for the end")
            self.add("_readable_or_closed: closed", "load", (("closed", WRITER, 0),), 1, to="withdraw")
        self.sleep()
        self.add("fence after waiting", "fence")
        self._readable(own, "end")
        self.label("acquire")
        self.add("fence before reading", "fence")
        for half in range(2):
            self.add("decode", "expect", self.ring.of_chunks("data", half))
        self.add("fence after reading", "fence")
        self.add("release_read", "store", own, 1, counts=True)
        self.wake("release", range(1))
        self.add("next", "goto", to="top")
        self.label("end")
        self.add("end", "end")
        return self

    def _readable(self, own: tuple[Cell, ...], otherwise: str) -> None:
        looks = [("_readable: read", own, 1), ("_readable: written", self._written, 0)]
        if "swap the looks" in self.faults:
            looks.reverse()
        for number, (name, cell, value) in enumerate(looks):
            if number:
                self.add("fence between looks", "fence")
            self.add(name, "load", cell, value, to=otherwise)


class End(NamedTuple):
    """One end: where it is, how many messages it has done with, its stores not yet out, whether it sleeps."""

    place: int = 0
    done: int = 0
    stores: tuple[tuple[int, int], ...] = ()
    asleep: bool = False


class Broken(Exception):
    """A property of the ring does not hold."""


class Explorer:
    """The machine. A state is the memory's content and each `End`."""

    def __init__(self, ring: Ring, memory: Memory = Memory.SC, faults: Collection[str] = ()) -> None:
        self.ring = ring
        self.memory = memory
        ends = range(1 + ring.readers)
        programs = [Program(ring, end, faults) for end in ends]
        self.programs = [p.reader() if p.end else p.writer() for p in programs]
        cells = {cell: None for p in self.programs for step in p.steps for cell in step.cell}
        self.cells = {cell: index for index, cell in enumerate(cells)}
        self._ahead: dict[tuple[int, End], End] = {}

    def start(self) -> tuple[tuple[int, ...], tuple[End, ...]]:
        content = (0,) * len(self.cells)
        return content, tuple(self._run_ahead(index, End()) for index in range(len(self.programs)))

    def explore(self) -> int:
        """Go through every state, and return how many there are.

        Raises:
            Broken: with the steps that led there.
        """
        start = self.start()
        came_from: dict = {start: None}
        stack = [start]
        while stack:
            state = stack.pop()
            try:
                followers = list(self.moves(state))
            except Broken as error:
                raise Broken(f"{error}\n" + "\n".join(self._path(came_from, state))) from None
            if not followers:
                self._check_end(came_from, state)
            for label, follower in followers:
                if follower not in came_from:
                    came_from[follower] = state, label
                    stack.append(follower)
        return len(came_from)

    def walk(self, chooser: random.Random) -> Iterator[tuple[int, Step, Cell | None, int]]:
        """One way to the end: which end did which step, on which cell, and the value that was there or is now."""
        state = self.start()
        while moves := list(self.moves(state)):
            (end, step), follower = chooser.choice(moves)
            cell = step.cell[state[1][end].done % len(step.cell)] if step.cell else None
            before = 0 if cell is None else state[0][self.cells[cell]]
            after = 0 if cell is None else follower[0][self.cells[cell]]
            yield end, step, cell, after if step.kind == "store" else before
            state = follower

    def moves(self, state):
        """Yield what can happen next: the end and its step, and the state after it.

        Raises:
            Broken: some end reads what it should not.
        """
        content, ends = state
        for index, end in enumerate(ends):
            for number, (cell, value) in enumerate(end.stores):
                first = all(cell != earlier for earlier, _ in end.stores[:number])
                if number == 0 or (self.memory is Memory.PSO and first):
                    flushed = end._replace(stores=end.stores[:number] + end.stores[number + 1 :])
                    label = index, _reaching(value, cell)
                    yield label, self._with(_set(content, cell, value), ends, index, flushed)
            if not end.asleep:
                step = self.programs[index].steps[end.place]
                if step.kind != "end" and not (end.stores and step.kind not in ("load", "expect")):
                    yield (index, step), self._do(content, ends, index, step)

    def _do(self, content, ends, index, step):
        end = ends[index]
        after = end._replace(place=end.place + 1)
        cell = self.cells[step.cell[end.done % len(step.cell)]] if step.cell else -1
        if step.kind in ("load", "expect"):
            value = next((value for stored, value in reversed(end.stores) if stored == cell), content[cell])
            if step.kind == "expect" and value != end.done + 1:
                raise Broken(f"reader {index - 1} is due message {end.done + 1} and finds {value}")
            if step.kind == "load" and value == step.value:
                after = after._replace(place=self.programs[index].labels[step.to])
        elif step.kind == "store":
            content = _set(content, cell, self._value(step, end))
            after = after._replace(done=end.done + step.counts)
        elif step.kind == "sleep" and content[cell] == 1:
            after = after._replace(asleep=True)
        elif step.kind == "wake":
            sleeper = step.cell[0][1]
            if ends[sleeper].asleep:
                ends = (*ends[:sleeper], ends[sleeper]._replace(asleep=False), *ends[sleeper + 1 :])
                woken = self._run_ahead(sleeper, ends[sleeper])
                ends = (*ends[:sleeper], woken, *ends[sleeper + 1 :])
        return self._with(content, ends, index, after)

    def _run_ahead(self, index: int, end: End) -> End:
        """Do what only this end can see; it is the same whatever the others do."""
        ahead = self._ahead.get((index, end))
        if ahead is None:
            ahead = self._ahead[index, end] = self._go_on(index, end)
        return ahead

    def _go_on(self, index: int, end: End) -> End:
        program = self.programs[index]
        while not end.asleep:
            step = program.steps[end.place]
            all_written = end.done == self.ring.messages
            if step.kind == "goto" or (step.kind == "goto when all are written" and all_written):
                end = end._replace(place=program.labels[step.to])
            elif step.kind == "goto when all are written" or (
                step.kind == "fence" and not end.stores and self.memory is not Memory.SC
            ):
                end = end._replace(place=end.place + 1)
            elif step.kind == "store" and self.memory is not Memory.SC:
                cell = self.cells[step.cell[end.done % len(step.cell)]]
                stores = (*end.stores, (cell, self._value(step, end)))
                end = end._replace(place=end.place + 1, done=end.done + step.counts, stores=stores)
            else:
                break
        return end

    def _with(self, content, ends, index, end):
        return content, (*ends[:index], self._run_ahead(index, end), *ends[index + 1 :])

    def _value(self, step: Step, end: End) -> int:
        return end.done + 1 if step.value is None else step.value

    def _check_end(self, came_from: dict, state) -> None:
        for index, end in enumerate(state[1]):
            at_end = self.programs[index].steps[end.place].kind == "end"
            may_sleep = index != WRITER and not self.ring.shuts_down
            if end.done != self.ring.messages or not (at_end or (end.asleep and may_sleep)):
                name = f"reader {index - 1}" if index else "the writer"
                what = "sleeps for ever" if end.asleep else "has come to its end"
                path = "\n".join(self._path(came_from, state))
                raise Broken(f"{name} {what} with {end.done} of {self.ring.messages} messages\n{path}")

    def _path(self, came_from: dict, state) -> list[str]:
        path = []
        while came_from[state] is not None:
            state, (index, step) = came_from[state]
            path.append(f"  end {index}: {step.name}")
        return path[::-1]


@cache
def _reaching(value: int, cell: int) -> Step:
    return Step(f"store {value} reaches {cell}", "flush")


def _set(content: tuple[int, ...], cell: int, value: int) -> tuple[int, ...]:
    return (*content[:cell], value, *content[cell + 1 :])
