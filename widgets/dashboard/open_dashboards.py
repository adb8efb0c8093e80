"""The dashboards of a process that are open: the way to the browser that they share, and how many of them there may be."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet

from nbengine.widgets.dashboard.throttle import Throttle

BYTES_PER_SECOND = 300_000
"""Of all dashboards of a process together: a notebook's server drops what is above a million."""
SLACK = 0.2
"""Seconds of the way that were not used and may be used at once: an engine's dashboards are told one right after the other."""
MOST_OPEN = 16
"""A cell that is run again leaves its dashboard behind, and nobody says that its output is gone."""


class OpenDashboard(Protocol):
    """A view of an engine that goes on until it is closed."""

    @property
    def is_watched(self) -> bool:
        """Whether it is kept up to date."""

    @property
    def looked_at(self) -> float:
        """When somebody has last looked, as far as that is known, on `time.monotonic()`."""

    def close(self) -> None:
        """Put a picture in its place; again does nothing."""


class OpenDashboards:
    """Keeps none of them alive. Safe on any thread."""

    def __init__(self) -> None:
        self.line = Throttle(0.0, BYTES_PER_SECOND, SLACK)
        """The way to the browser."""
        self._lock = threading.Lock()
        self._views: WeakSet[OpenDashboard] = WeakSet()

    def add(self, view: OpenDashboard) -> None:
        """It is open."""
        with self._lock:
            self._views.add(view)

    def discard(self, view: OpenDashboard) -> None:
        """It is not; again does nothing."""
        with self._lock:
            self._views.discard(view)

    @property
    def num_watched(self) -> int:
        """How many share the way."""
        return sum(view.is_watched for view in self._all())

    def close_superfluous(self) -> None:
        """Beyond `MOST_OPEN`, close those that nobody has looked at for the longest time."""
        views = sorted(self._all(), key=lambda view: view.looked_at)
        for view in views[:-MOST_OPEN]:
            view.close()

    def _all(self) -> list[OpenDashboard]:
        with self._lock:
            return list(self._views)


OPEN = OpenDashboards()
"""Of this process."""
