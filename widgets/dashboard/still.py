"""The picture beside a live dashboard that saved notebooks show, and pages made of them."""

from __future__ import annotations

import time

from IPython.core.interactiveshell import InteractiveShell

from nbengine.widgets.dashboard.open_dashboards import LINE
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.live import LiveDisplay
from nbengine.widgets.pictures.html import static_bundle

STILL_INTERVAL = 10.0
"""The least seconds between two pictures."""
STILL_SHARE = 0.01
"""The share of the time that drawing them may take."""
_NOTHING = {"text/html": "<div hidden></div>", "text/plain": ""}


class Still:
    """An output below a dashboard, which the style sheet hides while the dashboard's script runs.

    It is an output of its own because a notebook loads a widget again whenever the widget's own output changes.
    """

    def __init__(self, shell: InteractiveShell | None) -> None:
        self._output = LiveDisplay(shell)
        self._due = time.monotonic() + STILL_INTERVAL
        self._time = 0.0
        """The time of the state that it shows."""

    def show(self, state: DashboardState) -> None:
        """Show it in the running cell."""
        self._put(state, again=True)

    def renew(self, state: DashboardState, *, at_once: bool = False) -> None:
        """Show a later state, if it is shown anywhere and there is time for that."""
        now = time.monotonic()
        is_due = now >= self._due and LINE.is_due and state.time != self._time
        if self._output.shown and (at_once or is_due):
            LINE.sent(self._put(state))
            self._due = now + max(STILL_INTERVAL, (time.monotonic() - now) / STILL_SHARE)

    def clear(self) -> None:
        """Show nothing from now on: the picture stands in the dashboard's place."""
        if self._output.shown:
            self._output.show(_NOTHING)

    def _put(self, state: DashboardState, *, again: bool = False) -> int:
        bundle = static_bundle(state)
        self._time = state.time
        html = f'<div class="nbe-still">{bundle["text/html"]}</div>'
        return self._output.show({**bundle, "text/html": html}, again=again)
