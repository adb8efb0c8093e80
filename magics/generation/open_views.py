"""The outputs that need their engine: their widgets make it write."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

MOST_OPEN = 100
"""Each keeps its tokens in the kernel and in the page."""


class ClosableView(Protocol):
    """An output with a widget."""

    def close(self) -> None:
        """Put what needs neither script nor engine in the widget's place; again does nothing."""


class OpenViews:
    """Views of engines, to be closed when those are left; beyond `MOST_OPEN` the oldest is closed. It keeps none of them
    alive. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: list[tuple[str, weakref.ref[ClosableView]]] = []

    def add(self, engine: str, view: ClosableView) -> None:
        """Take in a view of an engine."""
        with self._lock:
            views = [known for known in self._views if known[1]() is not None]
            views.append((engine, weakref.ref(view)))
            superfluous, self._views = views[:-MOST_OPEN], views[-MOST_OPEN:]
        _close(superfluous)

    def close(self, engine: str | None = None) -> None:
        """Close the views of an engine, all if None."""
        with self._lock:
            closing = [known for known in self._views if engine in (None, known[0])]
            self._views = [known for known in self._views if engine not in (None, known[0])]
        _close(closing)


def _close(views: list[tuple[str, weakref.ref[ClosableView]]]) -> None:
    for _, reference in views:
        view = reference()
        if view is not None:
            view.close()
