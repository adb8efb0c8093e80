"""Queues, events, locks and threads to wait for: substitutes of those of `threading` and `queue`."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty
from typing import Any, Generic, Self, TypeVar

from tests.simulation import state
from tests.simulation.hub import Task

T = TypeVar("T")


def deadline_of(timeout: float | None) -> float:
    """The moment until which a call with this time-out may wait."""
    return math.inf if timeout is None else state.hub().now + timeout


class Waiters:
    """Threads that wait for one thing."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self, until: float) -> bool:
        """Wait to be woken; False if `until` came first."""
        hub = state.hub()
        task = hub.current
        assert task is not None
        self._tasks.append(task)
        try:
            return hub.block(until)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def wake_one(self) -> None:
        """Wake the one that has waited longest."""
        if self._tasks:
            state.hub().wake(self._tasks.pop(0))

    def wake_all(self) -> None:
        """Wake all."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            state.hub().wake(task)


class SimQueue(Generic[T]):
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiters = Waiters()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._waiters.wake_one()
        hub = state.hub()
        if hub.preemption:
            hub.maybe_preempt()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        if not self._items and not block:
            raise Empty
        until = deadline_of(timeout)
        while not self._items:
            if not self._waiters.wait(until) and not self._items:
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class SimEvent:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = deadline_of(timeout)
        while not self._set and self._waiters.wait(until):
            continue
        return self._set


class SimLock:
    """`threading.Lock` and `threading.RLock`."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters = Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        hub = state.hub()
        task = hub.current
        if self._owner is not None and self._reentrant and self._owner is task:
            self._depth += 1
            return True
        until = deadline_of(None if timeout < 0 else timeout)
        while self._owner is not None:
            if not blocking or (not self._waiters.wait(until) and self._owner is not None):
                return False
        self._owner, self._depth = task, 1
        if hub.preemption:
            hub.maybe_preempt()
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiters.wake_one()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def sim_rlock() -> SimLock:
    """`threading.RLock`."""
    return SimLock(reentrant=True)


class SimCondition:
    """`threading.Condition`."""

    def __init__(self, lock: SimLock | None = None) -> None:
        self._lock = lock or sim_rlock()
        self._waiters = Waiters()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._waiters.wait(deadline_of(timeout))
        finally:
            self._lock.acquire()

    def notify(self, n: int = 1) -> None:
        for _ in range(n):
            self._waiters.wake_one()

    def notify_all(self) -> None:
        self._waiters.wake_all()


# Threads. Classes of the project that derive from `threading.Thread` get these methods while a world runs.


def thread_start(self: Any) -> None:
    """`Thread.start`."""
    hub = state.hub()
    process = state.process()
    process.outside("thread")
    self._sim_task = hub.spawn(process, self.name, self.run)
    self._sim_task.thread = self
    hub.maybe_preempt()


def thread_join(self: Any, timeout: float | None = None) -> None:
    """`Thread.join`."""
    hub, task = state.hub(), self._sim_task
    until = deadline_of(timeout)
    while not task.ended:
        if hub.current is task:
            raise RuntimeError("cannot join current thread")
        task.watchers.append(hub.current)
        if not hub.block(until):
            return


def thread_ident(self: Any) -> int | None:
    """`Thread.ident`."""
    task = getattr(self, "_sim_task", None)
    return None if task is None else id(task)


def thread_is_alive(self: Any) -> bool:
    """`Thread.is_alive`."""
    task = getattr(self, "_sim_task", None)
    return task is not None and not task.ended


THREAD_METHODS: dict[str, Any] = {
    "start": thread_start,
    "join": thread_join,
    "ident": property(thread_ident),
    "native_id": property(thread_ident),
    "is_alive": thread_is_alive,
}


class SimThread:
    """`threading.Thread` with a target."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or "thread"
        self.daemon = bool(daemon)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)


for _name, _method in THREAD_METHODS.items():
    setattr(SimThread, _name, _method)


def current_thread() -> Any:
    """`threading.current_thread`."""
    task = state.hub().current
    return threading.main_thread() if task is None or task.thread is None else task.thread
