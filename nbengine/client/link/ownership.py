"""The ownership of clients by processes: a forked child has copies of its parent's objects,
and owns none of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from nbengine.errors import NBEngineError

T = TypeVar("T")

_own_pid = os.getpid()
"""The pid of this process. Asking the kernel would cost a microsecond, several times a step."""


class Owner:
    """The process that has made an object; a forked copy of the object still names it."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = _own_pid

    @property
    def is_here(self) -> bool:
        """Tell whether this is that process."""
        return self.pid == _own_pid

    def check(self) -> None:
        """Check that this is that process.

        Raises:
            NBEngineError: this process is a fork of it.
        """
        if not self.is_here:
            raise NBEngineError(
                f"this engine belongs to process {self.pid}, of which this one ({_own_pid}) is a fork: make a new one "
                "here, or become a client of it with AsyncLLM.attach"
            )


class Owned(Generic[T]):
    """An attribute that only the process that has set it can read: a forked copy refuses by name.

    A frontend reaches its engine through such an attribute, so that no way leads past the check.

    Raises:
        NBEngineError: on reading, in a forked child.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: T) -> None:
        instance.__dict__[self._name] = value, Owner()

    @overload
    def __get__(self, instance: None, kind: type) -> Self: ...

    @overload
    def __get__(self, instance: object, kind: type) -> T: ...

    def __get__(self, instance: Any, kind: type) -> Self | T:
        if instance is None:
            return self
        try:
            value, owner = instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if owner.pid != _own_pid:
            owner.check()
        return value  # type: ignore[no-any-return]


def is_forked_copy(instance: Any, attribute: str) -> bool:
    """Return whether `instance` has an `Owned` attribute that another process has set."""
    found = instance.__dict__.get(attribute)
    return found is not None and not found[1].is_here


def finalize(instance: Any, release: Callable[[], object]) -> weakref.finalize[Any, Any]:
    """Call `release` when nobody refers to `instance` any more, or at the interpreter's exit,
    in this process alone."""
    return weakref.finalize(instance, _release, Owner(), release)


def _release(owner: Owner, release: Callable[[], object]) -> None:
    if owner.is_here:
        release()


def _note_fork() -> None:
    global _own_pid
    _own_pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)
