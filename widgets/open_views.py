"""The outputs of a process that go on with their engines until they are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary


class ClosableView(Protocol):
    """An output that goes on with its engine."""

    def close(self) -> None:
        """Put a form in its place that needs neither script nor engine; a second call does nothing."""


V = TypeVar("V", bound=ClosableView)


class OpenViews(Generic[V]):
    """The views that are open, `most` of them at most; they are held weakly. Safe on any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._engines: WeakKeyDictionary[V, str] = WeakKeyDictionary()
        """The engine of each view, in the order in which somebody looked at the views."""

    def add(self, view: V, engine: str = "") -> None:
        """Add a view that was opened, or note that somebody looks at it."""
        with self._lock:
            self._engines.pop(view, None)
            self._engines[view] = engine

    def open(self, engine: str, view: V) -> None:
        """Add a view of an engine, and close superfluous ones."""
        self.add(view, engine)
        self.close_superfluous()

    def discard(self, view: V) -> None:
        """Remove a view that was closed; a second call does nothing."""
        with self._lock:
            self._engines.pop(view, None)

    def close(self, engine: str | None = None) -> None:
        """Close the views of an engine, or all views if `engine` is None."""
        with self._lock:
            closing = [view for view, name in self._engines.items() if engine in (None, name)]
        self._close(closing)

    def close_superfluous(self) -> None:
        """Close the views that nobody has looked at for the longest time, beyond `most`."""
        self._close(list(self)[: -self.most])

    def _close(self, views: list[V]) -> None:
        for view in views:
            self.discard(view)
            view.close()

    def __iter__(self) -> Iterator[V]:
        with self._lock:
            return iter(list(self._engines))
