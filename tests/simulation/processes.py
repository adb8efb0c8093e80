"""Processes in memory: their descriptors, signals, children and ends."""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from tests.simulation.hub import Task
from tests.simulation.polling import Source
from tests.simulation.primitives import Waiters

if TYPE_CHECKING:
    from tests.simulation.sockets import Descriptor, SimContext
    from tests.simulation.world import World

Program = Callable[[list[str]], int | None]
INIT = 1
FIRST_NUMBER = 1_000_000
"""Of simulated descriptors: real ones are smaller."""
FATAL = frozenset((signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL))
_BOOT = 5000.0
"""Seconds for which the machine has been running when a world begins."""


class End(Source):
    """One end of a pipe or of a pair of sockets; `references` counts the descriptors of it in all processes."""

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.other: End | None = None
        self.blocks = True
        self.buffer = bytearray()
        self.references = 0
        self.number = -1

    def readable(self) -> bool:
        other = self.other
        return bool(self.buffer) or other is None or not other.references

    @property
    def is_at_end(self) -> bool:
        """Return whether nobody can write to the other end any more."""
        return self.other is None or self.other.references == 0

    def hung_up(self) -> bool:
        return self.is_at_end

    def write(self, data: bytes) -> int:
        if self.is_at_end or self.other is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.other.buffer += data
        self.other.changed()
        return len(data)

    def read(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    def close(self) -> None:
        """Note that a descriptor of it is closed."""
        self.references -= 1
        if not self.references and self.other is not None:
            self.other.changed()


class Process:
    """A process of the simulated machine."""

    def __init__(self, world: World, pid: int, parent: Process | None, argv: list[str]) -> None:
        self.world = world
        self.hub = world.hub
        self.faults = world.faults
        self.pid = pid
        self.parent_pid = INIT if parent is None else parent.pid
        self.session = self.group = pid
        self.argv = argv
        self.role = f"p{pid}"
        """Its part in this world: client0, host, core0, …"""
        self.environment: dict[str, str] = {}
        self.started = world.hub.now + _BOOT
        """Seconds after the start of the machine."""
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.descriptors: dict[int, Any] = {}
        self.real_files: set[int] = set()
        self.contexts: list[SimContext] = []
        self.status: int | None = None
        """The way in which it ended, as in `Popen.returncode`; None while it runs."""
        self.ended_at = math.inf
        self.reaped = False
        self.ended = Waiters()
        self.handlers: dict[int, Any] = {}
        self.wakeup_fd = -1
        self.pending_signals: list[int] = []
        self.is_stopped = False
        self.on_continue: list[Callable[[], None]] = []
        self.held_until = 0.0
        """The time until which something holds the interpreter's lock."""
        self.files_short_until = 0.0
        """The time until which somebody in it holds all descriptors that it may have."""
        self.free_files = 0
        """The number of free descriptors meanwhile: those that were left, and that it has closed since."""
        self.is_dead = False
        self.frozen_events: list[tuple[Task, int, bool]] = []
        self.values: dict[int, Any] = {}
        """The values of substituted module-level variables in it."""
        self.at_exit: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"{self.role} (pid {self.pid})"

    @property
    def is_frozen(self) -> bool:
        """Return whether the process's threads cannot run."""
        return self.is_stopped or self.held_until > self.hub.now

    @property
    def has_no_files_left(self) -> bool:
        """Return whether the process can open nothing now."""
        return self.free_files < 1 and self.files_short_until > self.hub.now

    def hold_file(self, number: int) -> None:
        """Note that the process has opened a real file."""
        self.free_files -= 1
        self.real_files.add(number)

    def release_file(self, number: int) -> None:
        """Note that a real file is closed, or that something else sees to that from now on."""
        if number in self.real_files:
            self.free_files += 1
            self.real_files.remove(number)

    def start(self, program: Program) -> None:
        """Run a program on the main thread."""

        def body() -> None:
            try:
                status = program(self.argv) or 0
                for function in self.at_exit:
                    function()
            except GreenletExit:
                raise
            except SystemExit as error:
                status = int(error.code or 0)
            except Exception as error:  # noqa: BLE001 (it is judged)
                self.world.on_uncaught(self, error)
                status = 1
            self.end(status)

        self.main = self.hub.spawn(self, "main", body)

    # Calls to the outside.

    def outside(self, what: str, *, opens: int = 0, error: Callable[[], Exception] | None = None) -> None:
        """A thread of it is about to call something outside, which needs `opens` descriptors: it may be interrupted, end,
        or fail there."""
        hub = self.hub
        if hub.closed or self.is_dead:
            raise GreenletExit
        if self.faults.has_deadly_calls:
            self.faults.on_call(self, what)
        if opens and opens > self.free_files and self.files_short_until > hub.now:
            hub.say(f"{what}: EMFILE")
            self.world.faults.note_effect("files", self)
            raise OSError(errno.EMFILE, "Too many open files") if error is None else error()
        if hub.preemption:
            hub.maybe_preempt()

    def open_number(self, thing: End | Descriptor) -> int:
        """Open a descriptor of something."""
        number = next(self.world.descriptor_numbers)
        self.descriptors[number] = thing
        if thing.number < 0:
            thing.number = number
        if isinstance(thing, End):
            thing.references += 1
        self.free_files -= 1
        return number

    def close_number(self, number: int) -> None:
        """Do what `close(2)` does."""
        thing = self.descriptors.pop(number, None)
        if thing is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self.free_files += 1
        thing.close()

    # Signals.

    def kill(self, number: int) -> None:
        """Send it a signal."""
        if self.status is not None or not number:
            return
        self.hub.say(f"{self} gets {signal.Signals(number).name}")
        if number == signal.SIGKILL:
            self.end(-number)
        elif number == signal.SIGSTOP:
            self.is_stopped = True
        elif number == signal.SIGCONT:
            self.resume()
        elif number in self.handlers:
            handler = self.handlers[number]
            if handler == signal.SIG_DFL:
                self._default(number)
            elif handler != signal.SIG_IGN:
                self.pending_signals.append(number)
                if self.wakeup_fd in self.descriptors:
                    self.descriptors[self.wakeup_fd].write(bytes([number]))
                # The main thread handles it between two instructions, or when its wait is interrupted.
                if self.main is not None and self.main.waiting and self.hub.random.random() < 0.5:
                    self.hub.call_later(self.hub.delay, self._interrupt)
        else:
            self._default(number)

    def _interrupt(self) -> None:
        if self.pending_signals and self.main is not None and not self.is_dead and not self.is_frozen:
            self.hub.interrupt(self.main)

    def _default(self, number: int) -> None:
        if number in FATAL:
            self.end(-number)

    def handle_signals(self) -> None:
        """Run the handlers of what has come, on the main thread."""
        pending, self.pending_signals = self.pending_signals, []
        # A handler does not wait for anything.
        preemption, self.hub.preemption = self.hub.preemption, 0.0
        for number in pending:
            handler = self.handlers.get(number)
            if callable(handler):
                handler(number, None)
        self.hub.preemption = preemption

    def resume(self) -> None:
        """Go on after a stop."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        waiting, self.on_continue = self.on_continue, []
        for function in waiting:
            self.hub.call_later(self.hub.delay * self.hub.random.random(), function)
        self.hub.thaw(self)

    def hold(self, seconds: float) -> None:
        """Hold the interpreter's lock for a while."""
        self.held_until = max(self.held_until, self.hub.now + seconds)
        self.hub.call_at(self.held_until + 1e-6, self._release)

    def _release(self) -> None:
        if not self.is_frozen:
            self.hub.thaw(self)

    # The end.

    def end(self, status: int) -> None:
        """End the process, with all its threads, where they stand."""
        if self.status is not None:
            return
        hub = self.hub
        hub.say(f"{self} ends with status {status}")
        self.status, self.ended_at = status, hub.now
        self.is_dead = True
        for context in self.contexts:
            for socket in list(context.sockets):
                socket.die()
            for link, _ in context.lingering:
                link.give_up()
        for thing in list(self.descriptors.values()):
            thing.close()
        self.descriptors.clear()
        for number in sorted(self.real_files):
            os.close(number)
        self.real_files.clear()
        table = self.world.processes
        for child in table.values():
            if child.parent_pid == self.pid:
                child.parent_pid = INIT
                child.reaped = child.reaped or child.status is not None
        parent = table.get(self.parent_pid)
        if parent is None or parent.status is not None:
            self.reaped = True
        else:
            hub.call_later(hub.delay * hub.random.random(), parent.kill, signal.SIGCHLD)
        self.ended.wake_all()
        self.world.on_end(self)
        if hub.current is not None and hub.current.process is self:
            hub.park()

    def wait(self, until: float) -> int | None:
        """Wait for its end, as its parent; None if it has not come in time."""
        while self.status is None:
            if not self.ended.wait(until):
                return None
        self.reaped = True
        return self.status

    @property
    def exists(self) -> bool:
        """Return whether the process's pid is taken."""
        return not (self.status is not None and self.reaped)


def make_pipe() -> tuple[End, End]:
    """A pipe: the end to read, the end to write."""
    reader, writer = End(), End(reads=False)
    reader.other, writer.other = writer, reader
    return reader, writer


def make_pair() -> tuple[End, End]:
    """Two connected sockets."""
    one, two = End(), End()
    one.other, two.other = two, one
    return one, two


def descriptor_numbers() -> itertools.count[int]:
    """Numbers of descriptors; none comes twice, so that one that is used after it was closed is noticed."""
    return itertools.count(FIRST_NUMBER)
