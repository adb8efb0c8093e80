"""The open dashboards of a process, and the line to the browser that they share."""

from __future__ import annotations

from typing import Protocol

from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.open_views import ClosableView, OpenViews

BYTES_PER_SECOND = 300_000
"""The most bytes of all dashboards of a process: a notebook's server drops output above a million."""
SLACK = 0.2
"""Seconds of unused line that may be used at once: an engine's dashboards are called in quick succession."""
MOST_OPEN = 16
"""The most open dashboards: a cell that runs again leaves its dashboard behind, and nothing reports that."""


class OpenDashboard(ClosableView, Protocol):
    """A view of an engine that goes on until it is closed."""

    @property
    def is_watched(self) -> bool:
        """Return whether the view is kept up to date."""


OPEN = OpenViews[OpenDashboard](MOST_OPEN)
"""The open dashboards of this process."""
LINE = Throttle(0.0, BYTES_PER_SECOND, SLACK)
"""The line to the browser."""


def num_watched() -> int:
    """Count the dashboards that share the line."""
    return sum(view.is_watched for view in OPEN)
