"""Virtual time, and who runs when: threads are greenlets, and only the hub's random numbers decide between them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tests.simulation.processes import Process

MAX_EVENTS = 400_000
"""A world that has more events is taken for one that does not end."""


WALL_OFFSET = 1_000_000_000.0
"""Seconds that the wall clock is ahead of the monotonic one at the beginning."""
INTERRUPTED = object()
_NEVER = math.inf
_push, _pop = heapq.heappush, heapq.heappop


_idle: list[greenlet] = []
"""Greenlets whose threads have ended: a new one would get memory from the system for its frames."""


class Violation(AssertionError):
    """Something happened that never may."""


class Task:
    """A thread of a simulated process."""

    __slots__ = (
        "body",
        "ended",
        "greenlet",
        "name",
        "num_waits",
        "process",
        "switch",
        "thread",
        "waiting",
        "watchers",
    )

    def __init__(self, process: Process, name: str, body: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.body = body
        self.greenlet: greenlet | None = None
        self.switch: Any = None
        self.waiting = True
        self.num_waits = 0
        self.ended = False
        self.thread: Any = None
        """The result of `threading.current_thread` in it."""
        self.watchers: list[Task] = []
        """The tasks that wait for its end."""

    def __repr__(self) -> str:
        return f"{self.process.role}/{self.name}"


def _serve(hub: Hub) -> None:
    """Run threads one after another, of whatever world; between two of them the greenlet is idle."""
    place = getcurrent()
    assert place.parent is not None
    to_hub = place.parent.switch
    while True:
        hub._run_task()
        _idle.append(place)
        hub = to_hub()


def drop_idle_greenlets() -> None:
    """End the greenlets that no thread has."""
    while _idle:
        _idle.pop().throw(GreenletExit)


class Hub:
    """The event loop of a world.

    Every event has a moment in virtual time; time stands still while code runs. A thread that becomes ready goes on after
    a random delay, so that the order in which threads notice what has happened is any order that could be.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Seconds of the monotonic clock."""
        self.wall_offset = WALL_OFFSET
        """Seconds that the wall clock is ahead."""
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.num_events = 0
        self.current: Task | None = None
        self.trace: Callable[[str], None] | None = None
        self.stopped = False
        """Set where `run` is to return."""
        self.delay = 20e-6
        """Seconds that a thread takes at most, as a rule, from being ready to running."""
        self.long_delay = 0.0
        self.long_delay_chance = 0.0
        """The probability that it takes up to `long_delay`."""
        self.preemption = 0.0
        """The probability that a thread is interrupted where it can be."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._greenlet = getcurrent()
        self._switch = self._greenlet.switch
        self._tasks: list[Task] = []
        self.closed = False

    # Events.

    def call_at(self, when: float, function: Callable[..., None], *args: Any) -> None:
        """Call a function at a moment, which is not past; it must not block."""
        self._num_scheduled = count = self._num_scheduled + 1
        _push(self._events, (when, count, function, args))

    def call_later(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Call a function after some time; it must not block."""
        self._num_scheduled = count = self._num_scheduled + 1
        _push(self._events, (self.now + seconds, count, function, args))

    def run(self, deadline: float = math.inf) -> None:
        """Let the world go on until it is stopped, nothing is left to happen, or the deadline has come."""
        self.stopped = self.failure is not None
        events, num_events = self._events, self.num_events
        try:
            while events and not self.stopped:
                if events[0][0] > deadline:
                    self.now = deadline
                    return
                self.now, _, function, args = _pop(events)
                function(*args)
                num_events += 1
                if num_events > MAX_EVENTS:
                    raise Violation(
                        f"{MAX_EVENTS} events in {self.now:.0f} s: something goes round in circles"
                    )
        finally:
            self.num_events = num_events

    def say(self, text: str) -> None:
        """Note something in the trace."""
        if self.trace is not None:
            self.trace(f"{self.now:12.6f}  {self.current or '-'}: {text}")

    # Threads.

    def spawn(self, process: Process, name: str, body: Callable[[], object]) -> Task:
        """Start a thread of a process; it begins a little later."""
        task = Task(process, name, body)
        task.switch = partial(self._begin, task)
        self._tasks.append(task)
        process.tasks.append(task)
        self.call_at(self.now + self.jitter(), self._resume, task, task.num_waits, True)
        return task

    def block(self, until: float = math.inf) -> bool:
        """Have the current thread wait for `wake`; False if the moment `until` came first."""
        task = self.current
        if task is None or self.closed or task.process.is_dead:
            raise GreenletExit
        process = task.process
        number = task.num_waits = task.num_waits + 1
        task.waiting = True
        if until != _NEVER:
            now = self.now
            self._num_scheduled = count = self._num_scheduled + 1
            when = max(now, until)
            _push(self._events, (when, count, self._resume, (task, number, False)))
        woken = self._switch()
        while woken is INTERRUPTED:
            process.handle_signals()
            woken = self._switch()
        if self.closed or process.is_dead:
            raise GreenletExit
        # It may have got signals meanwhile.
        if process.pending_signals and task is process.main:
            process.handle_signals()
        return bool(woken)

    def park(self) -> NoReturn:
        """Never go on with the current thread: its process is gone, and nothing that would clean up runs any more."""
        self._switch()
        raise GreenletExit

    def interrupt(self, task: Task) -> None:
        """Have a main thread that waits handle signals, and wait on."""
        if task.waiting and task.greenlet is not None:
            self.current = task
            task.switch(INTERRUPTED)
            self.current = None

    def wake(self, task: Task) -> None:
        """Have a thread that waits go on, soon."""
        if task.waiting:
            task.waiting = False
            self._num_scheduled = count = self._num_scheduled + 1
            _push(self._events, (self.now + self.jitter(), count, self._resume, (task, task.num_waits, True)))

    def sleep(self, seconds: float) -> None:
        """Have the current thread wait."""
        self.block(self.now + seconds)

    def maybe_preempt(self) -> None:
        """Let others run, perhaps, before the current thread goes on."""
        if self.preemption and self.current is not None and self._draw() < self.preemption:
            self.block(self.now + self.jitter())

    def thaw(self, process: Process) -> None:
        """Let a process run again, and its threads that have become ready meanwhile."""
        frozen, process.frozen_events = process.frozen_events, []
        for event in frozen:
            self.call_later(self.jitter(), self._resume, *event)

    def close(self) -> None:
        """End every thread where it stands."""
        self.closed = True
        for task in self._tasks:
            if task.greenlet is not None:
                self.current = task
                task.greenlet.throw(GreenletExit)
            # Each has the other.
            task.greenlet = task.switch = None
        self.current = None
        self._tasks.clear()
        self._events.clear()

    # The rest.

    def jitter(self) -> float:
        """Return the seconds that a thread takes this time from being ready to running."""
        draw = self._draw
        if self.long_delay_chance and draw() < self.long_delay_chance:
            return draw() * self.long_delay
        return draw() * self.delay

    def _resume(self, task: Task, num_waits: int, woken: bool) -> None:
        if task.ended or task.num_waits != num_waits:
            return
        process = task.process
        if process.is_dead:
            return
        if process.is_stopped or process.held_until > self.now:
            process.frozen_events.append((task, num_waits, woken))
            return
        # Whatever else would end this wait comes too late.
        task.num_waits += 1
        task.waiting = False
        self.current = task
        task.switch(woken)
        self.current = None

    def _begin(self, task: Task, woken: bool) -> None:
        """Run a thread's body, on a greenlet whose last thread has ended if there is one."""
        place = (
            _idle.pop() if _idle and _idle[-1].parent is self._greenlet else greenlet(_serve, self._greenlet)
        )
        task.greenlet, task.switch = place, place.switch
        task.switch(self)

    def _run_task(self) -> None:
        task = self.current
        assert task is not None
        try:
            task.body()
        except GreenletExit:
            pass
        except Exception as error:  # noqa: BLE001 (it is a violation)
            if not self.closed:
                self.fail(f"an exception escaped the thread {task}: {error!r}", error)
        finally:
            task.ended = True
            # It serves other threads from now on.
            task.greenlet = None
            if not self.closed:
                for watcher in task.watchers:
                    self.wake(watcher)

    failure: Violation | None = None

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Note the first violation."""
        self.stopped = True
        if self.failure is None:
            self.failure = Violation(reason)
            self.failure.__cause__ = cause
            self.say(f"VIOLATION: {reason}")
