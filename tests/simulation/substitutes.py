"""Puts what is simulated in the place of the real thing, in every module of the engine, while a world runs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import setproctitle

from nbengine.client.engines import launch, processes
from nbengine.client.link import leaving
from nbengine.engine.host import leases
from nbengine.ipc import liveness
from nbengine.runtime import capacity, directories
from nbengine.runtime.logs import configure_logging
from tests.simulation import clocks, files, outside, state
from tests.simulation.primitives import THREAD_METHODS, SimLock

PACKAGES = (
    "nbengine.client.",
    "nbengine.engine.",
    "nbengine.ipc.",
    "nbengine.kv_cache.",
    "nbengine.runtime.",
    "nbengine.scheduler.",
)
LOADED_LATER = (
    "nbengine.engine.__main__",
    "nbengine.engine.bounds",
    "nbengine.engine.core.main",
    "nbengine.engine.host.main",
    "nbengine.engine.core.dp_core_proc",
    "nbengine.client.engines.directory",
)
"""Modules that the engine imports when it first needs them."""
REAL = frozenset(outside.substitutes())
"""The `id` of each thing that is outside."""
NEED_TORCH = ("nbengine.distributed.", "nbengine.kernels.", "nbengine.models.", "nbengine.worker.")
"""A world runs none of these, but for what reads a model's files or collects garbage."""

NUM_CPUS = 2
MEMORY = 8 << 30
"""The simulated machine has this many CPUs and bytes, whatever the real one has."""

CLOCKS = {time.monotonic: clocks.monotonic, time.time: clocks.wall_time}


class PerProcess:
    """A module-level variable: each simulated process has its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def _value(self) -> Any:
        values = state.process().values
        if id(self) not in values:
            values[id(self)] = self._make()
        return values[id(self)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._value()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._value()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value())

    def __len__(self) -> int:
        return len(self._value())

    def __contains__(self, key: Any) -> bool:
        return key in self._value()

    def __enter__(self) -> Any:
        return self._value().__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._value().__exit__(*error)


class OrderedSet(dict[Any, None]):
    """A set in the order in which things were added."""

    def add(self, item: Any) -> None:
        self[item] = None


def _loaded() -> frozenset[str]:
    """Return the modules that worlds may reach; others may be loaded between two worlds."""
    for name in LOADED_LATER:
        importlib.import_module(name)
    return frozenset(name for name in sys.modules if name.startswith(PACKAGES))


@functools.cache
def _table(loaded: frozenset[str]) -> list[tuple[Any, str, Any]]:
    """List what is replaced in modules: object, attribute, substitute."""
    # What is found out once is found out of the real machine.
    liveness.machine_id()
    liveness._proc_is_ours()
    substitutes = outside.substitutes()
    substitutes[id(configure_logging)] = lambda process: None
    substitutes[id(setproctitle)] = outside.Namespace(setproctitle, setproctitle=lambda title: None)
    substitutes[id(importlib)] = outside.Namespace(importlib, metadata=_installed_packages())
    substitutes[id(capacity.usable_cpus)] = lambda: NUM_CPUS
    substitutes[id(atexit)] = outside.Namespace(atexit, _run_exitfuncs=lambda: None, register=lambda f: f)
    found: list[tuple[Any, str, Any]] = []
    for name, module in sorted((name, sys.modules[name]) for name in loaded):
        for attribute, value in list(vars(module).items()):
            if id(value) in substitutes:
                found.append((module, attribute, substitutes[id(value)]))
            elif isinstance(value, type) and issubclass(value, threading.Thread):
                if value.__module__ == name:
                    found += [(value, method, it) for method, it in THREAD_METHODS.items()]
            elif isinstance(value, type) and value.__module__ == name:
                for function in vars(value).values():
                    if isinstance(function, FunctionType):
                        found += _clocks_of(function)
        if any(isinstance(value, (FunctionType, type)) for value in vars(module).values()):
            found.append((module, "open", files.sim_open))
    found += [
        (launch, "_children", PerProcess(dict)),
        (leaving, "_links", PerProcess(OrderedSet)),
        (processes, "POLL_INTERVAL", 0.05),
        (leases.LeaseTable, "expire", _watched_expire),
        (directories, "SHARED_MEMORY", SHARED_MEMORY),
        (directories, "_noted", PerProcess(OrderedSet)),
        (directories, "_removing", PerProcess(SimLock)),
        (capacity.Capacity, "here", lambda: capacity.Capacity(NUM_CPUS, MEMORY)),
    ]
    return found


def _installed_packages() -> outside.Namespace:
    """`importlib.metadata`, which reads files of the real machine that stay as they are: each once."""
    metadata = importlib.metadata
    version, distribution = functools.cache(metadata.version), functools.cache(metadata.distribution)
    return outside.Namespace(metadata, version=version, distribution=distribution)


def _clocks_of(function: FunctionType) -> list[tuple[Any, str, Any]]:
    """The substitutes of clocks that a function has as defaults of its arguments."""
    found: list[tuple[Any, str, Any]] = []
    by_place, by_name = function.__defaults__, function.__kwdefaults__
    if by_place and any(callable(value) and value in CLOCKS for value in by_place):
        clocks = tuple(CLOCKS.get(value, value) if callable(value) else value for value in by_place)
        found.append((function, "__defaults__", clocks))
    if by_name and any(callable(value) and value in CLOCKS for value in by_name.values()):
        named = {
            name: CLOCKS.get(value, value) if callable(value) else value for name, value in by_name.items()
        }
        found.append((function, "__kwdefaults__", named))
    return found


class _SharedMemory:
    """The folder of tensors, which lies in the world's directory."""

    def __truediv__(self, name: str) -> Path:
        return state.world().directory / "shm" / name


SHARED_MEMORY = _SharedMemory()
_real_expire = leases.LeaseTable.expire


def _watched_expire(self: leases.LeaseTable, now: float) -> list[leases.EndedLease]:
    ended = _real_expire(self, now)
    for item in ended:
        state.world().judge.lease_ended(item)
    return ended


_MISSING = object()


def _own(thing: Any, name: str) -> Any:
    """An attribute that a thing has itself, not its class."""
    return getattr(thing, name) if isinstance(thing, FunctionType) else vars(thing).get(name, _MISSING)


@functools.cache
def _before(loaded: frozenset[str]) -> list[tuple[Any, str, Any]]:
    """Return the real things, in the form of `_table`."""
    return [(thing, name, _own(thing, name)) for thing, name, _ in _table(loaded)]


def real_things_left() -> list[str]:
    """Name the modules that a world can reach and that have something of the real outside.

    With the real `os` a world would signal processes of this machine, and remove its directories.
    """
    todo = [name for name in sys.modules if name.startswith(PACKAGES)]
    reached = set(todo)
    while todo:
        things = list(vars(sys.modules[todo.pop()]).values())
        names = [thing.__name__ if isinstance(thing, ModuleType) else _home_of(thing) for thing in things]
        new = {name for name in names if name.startswith("nbengine.") and name in sys.modules} - reached
        reached |= new
        todo += new
    having = [
        name for name in reached if any(id(thing) in REAL for thing in vars(sys.modules[name]).values())
    ]
    return sorted(name for name in having if not name.startswith(NEED_TORCH))


def _home_of(thing: object) -> str:
    home = getattr(thing, "__module__", None)
    return home if isinstance(home, str) else ""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Substitute everything, for one world or for several one after another.

    Raises:
        RuntimeError: something real is left within a world's reach; no world may run then.
    """
    loaded = _loaded()
    before = _before(loaded)
    for thing, name, substitute in _table(loaded):
        setattr(thing, name, substitute)
    try:
        if left := real_things_left():
            raise RuntimeError(f"worlds would reach the real machine through {', '.join(left)}: see PACKAGES")
        yield
    finally:
        for thing, name, value in reversed(before):
            if value is _MISSING:
                delattr(thing, name)
            else:
                setattr(thing, name, value)
