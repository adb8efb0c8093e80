"""Sources that can be polled, and pollers: those of `zmq` and, behind its own face, of `select`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import zmq

from tests.simulation import state

HANG_UP = 1 << 8
"""Flag of a poller that is to tell, as `select.poll` always does, that the other end is gone."""


_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


class Source:
    """Something that can be polled."""

    def __init__(self) -> None:
        self.pollers: list[SimPoller] = []

    def readable(self) -> bool:
        """Return whether a poll for input returns at once."""
        raise NotImplementedError

    def writable(self) -> bool:
        """Return whether a poll for output returns at once."""
        return True

    def hung_up(self) -> bool:
        """Return whether the other end is gone."""
        return False

    def changed(self) -> None:
        """Tell those that poll."""
        for poller in self.pollers:
            task = poller.task
            if task is not None and task.waiting:
                task.process.hub.wake(task)


class SimPoller:
    """`zmq.Poller`, and behind `select.poll`."""

    def __init__(self) -> None:
        self._sources: dict[Any, tuple[Any, Source, int]] = {}
        self._input: list[tuple[Any, Callable[[], bool]]] | None = None
        """The sources, if it looks at nothing but whether they can be read."""
        self._sorted = False
        self.task: Any = None
        """The thread that waits in it."""

    def register(self, key: Any, flags: int = zmq.POLLIN | zmq.POLLOUT) -> None:
        """Look at a socket, a descriptor's number, or what has one."""
        flags = int(flags)
        if not flags:
            self.unregister(key)
            return
        known = self._sources.get(key)
        if known is None:
            source = source_of(key)
            source.pollers.append(self)
        else:
            source = known[1]
        self._sources[key] = key, source, flags
        self._sorted = False

    modify = register

    def unregister(self, key: Any) -> None:
        """Look at it no longer."""
        _, source, _ = self._sources.pop(key)
        source.pollers.remove(self)
        self._sorted = False

    def _sort(self) -> None:
        self._sorted = True
        sources = self._sources.values()
        looks_at_input_alone = all(flags == _IN for _, _, flags in sources)
        self._input = [(key, source.readable) for key, source, _ in sources] if looks_at_input_alone else None

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """Wait up to `timeout` milliseconds for something to be ready."""
        hub = state.hub()
        found = self._ready()
        if found or timeout == 0:
            if hub.preemption:
                hub.maybe_preempt()
            return found
        until = math.inf if timeout is None or timeout < 0 else hub.now + timeout / 1000
        self.task = hub.current
        try:
            while not found:
                woken = hub.block(until)
                found = self._ready()
                if not woken:
                    break
        finally:
            self.task = None
        return found

    def _ready(self) -> list[tuple[Any, int]]:
        if not self._sorted:
            self._sort()
        if self._input is not None:
            return [(key, _IN) for key, readable in self._input if readable()]
        found = []
        for key, source, flags in self._sources.values():
            events = _IN if flags & _IN and source.readable() else 0
            if flags & _OUT and source.writable():
                events |= _OUT
            if flags & HANG_UP and source.hung_up():
                events |= HANG_UP
            if events:
                found.append((key, events))
        return found


def source_of(key: Any) -> Source:
    """Find the source that a key of a poller stands for."""
    if isinstance(key, Source):
        return key
    number = key if isinstance(key, int) else key.fileno()
    source = state.process().descriptors[number]
    assert isinstance(source, Source)
    return source
