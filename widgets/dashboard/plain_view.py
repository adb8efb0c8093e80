"""The dashboard of core ipywidgets, kept up to date: where the script of the other one cannot be loaded."""

from __future__ import annotations

import time
from typing import Any

import ipywidgets

from nbengine.client.connection import ConnectionInfo
from nbengine.widgets.dashboard.open_dashboards import BYTES_PER_SECOND, OPEN
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed, Subscribe
from nbengine.widgets.following.feed_answers import abort
from nbengine.widgets.following.feed_state import label_of
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.output import ReplaceableOutput
from nbengine.widgets.pictures.html import static_bundle
from nbengine.widgets.pictures.plain import PlainDashboard


class PlainView:
    """A `PlainDashboard` that follows its engine; at the end a picture of the last state takes its place.

    Args:
        info: the engine.
        owner: the client of this process that has it, if there is one.
        output: what it is shown in.
        subscribe: where messages come from; the coordinator's publish socket if None.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        owner: Owner | None = None,
        *,
        output: ReplaceableOutput | None = None,
        subscribe: Subscribe | None = None,
    ) -> None:
        self._info = info
        self._output = output or ReplaceableOutput()
        self._final: dict[str, str] | None = None
        self._plain = PlainDashboard(label_of(info))
        self._plain.on_abort(self._abort)
        self._throttle = Throttle(0.0, BYTES_PER_SECOND, 0.0)
        self._shown_at = time.monotonic()
        OPEN.add(self)
        self._feed = EngineFeed.listen(info, self, owner, subscribe)

    @property
    def info(self) -> ConnectionInfo:
        """The engine."""
        return self._info

    @property
    def is_closed(self) -> bool:
        """Whether what is shown does not change any more."""
        return self._final is not None

    @property
    def is_watched(self) -> bool:
        """Whether it is kept up to date: nobody says whether it is looked at."""
        return not (self.is_closed or self._plain.is_paused)

    @property
    def looked_at(self) -> float:
        """When it was last displayed."""
        return self._shown_at

    @property
    def feed(self) -> EngineFeed:
        """What it follows."""
        return self._feed

    def bundle(self, state: DashboardState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Data by MIME type, and metadata."""
        widget = self._plain.widget._repr_mimebundle_() or {}
        data, metadata = widget if isinstance(widget, tuple) else (widget, {})
        return {**data, **static_bundle(state)}, metadata

    def close(self) -> None:
        """Stop following the engine and show the last state for good; again does nothing."""
        with self._feed.state() as state:
            self._finish(state)
        self._feed.leave(self)

    def _ipython_display_(self, **_: Any) -> None:
        if self._final is not None:
            self._output.show(self._final, {})
            return
        self._shown_at = time.monotonic()
        OPEN.close_superfluous()
        self._feed.wait_until_known(1.0)
        with self._feed.state() as state:
            self._show(state)
            self._output.show(*self.bundle(state))

    # What the feed tells.

    @property
    def follows(self) -> bool:
        """Until the end: nobody says whether it is looked at."""
        return not self.is_closed

    def on_state(self, state: DashboardState) -> None:
        """Show it, if there is room on the way to the browser."""
        is_last = state.state == "ended"
        if is_last or (self._throttle.is_due and OPEN.line.is_due):
            self._show(state)
        if is_last:
            self._finish(state)

    def _show(self, state: DashboardState) -> None:
        size = self._plain.show(state)
        OPEN.line.sent(size)
        # Its own pause leaves the line to the others.
        self._throttle.sent(size * OPEN.num_watched)

    def _finish(self, state: DashboardState) -> None:
        if self._final is None:
            self._final = static_bundle(state)
            OPEN.discard(self)
            self._output.replace(self._final)
            self._plain.close()
            _close(self._plain.widget)

    def _abort(self, rank: int, number: int) -> None:
        with self._feed.state() as state:
            abort(self._feed, state, rank, number)


def _close(widget: ipywidgets.Widget) -> None:
    """Close a widget and what is in it."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
