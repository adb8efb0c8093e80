"""The dashboard of core ipywidgets, for frontends that cannot load its script: two pictures a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython

from nbengine.client.observe.process_usage import printable
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.errors import NBEngineError
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.dashboard.open_dashboards import BYTES_PER_SECOND, LINE, OPEN, num_watched
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed, Subscribe
from nbengine.widgets.following.feed_answers import abort
from nbengine.widgets.following.feed_state import label_of
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.live import LiveDisplay
from nbengine.widgets.pictures.html import header_part, pictures, requests_part, static_bundle

INTERVAL = 0.5
"""The least seconds between two pictures."""
DRAWING_SHARE = 0.1
"""The share of the time that drawing may take: pictures of a large engine come less often."""
MAX_CHOICES = 200
_NAME_LENGTH = 40
_ALL = -1


class PlainDashboard:
    """A dashboard that follows its engine; at the end a picture of the last state takes its place.

    Args:
        info: the engine.
        owner: the client of this process that has it, if there is one.
        output: the output that shows the view.
        subscribe: the source of messages; the coordinator's publish socket if None.
        clock: a clock in seconds.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        owner: Owner | None = None,
        *,
        output: LiveDisplay | None = None,
        subscribe: Subscribe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._output = output or LiveDisplay(get_ipython())
        self._final: dict[str, str] | None = None
        self._clock = clock
        self._due = 0.0
        self._throttle = Throttle(0.0, BYTES_PER_SECOND, 0.0)
        label = label_of(info)
        name = escape(f"{printable(label.model)} · engine {printable(label.name)}")
        self._header = ipywidgets.HTML(f"<p><b>{name}</b> · no state yet</p>")
        self._pictures = ipywidgets.HTML()
        self._requests = ipywidgets.HTML()
        self._pause = ipywidgets.ToggleButton(
            description="Pause", tooltip="Hold the picture", layout=_layout("90px")
        )
        self._rank = ipywidgets.Dropdown(options=[("all ranks", _ALL)], value=_ALL, layout=_layout("130px"))
        self._choice = ipywidgets.Dropdown(options=[], layout=_layout("340px"))
        self._button = ipywidgets.Button(
            description="Abort", button_style="warning", disabled=True, layout=_layout("90px")
        )
        self._answer = ipywidgets.HTML()
        self._button.on_click(self._on_click)
        self._rank.layout.display = "none"
        controls = [self._pause, self._rank, self._choice, self._button, self._answer]
        self.widget = ipywidgets.VBox(
            [
                self._header,
                ipywidgets.HBox(controls, layout={"flex_flow": "row wrap"}),
                self._pictures,
                self._requests,
            ]
        )
        OPEN.add(self)
        self._feed = EngineFeed.listen(info, self, owner, subscribe)

    @property
    def is_closed(self) -> bool:
        """Return whether the view does not change any more."""
        return self._final is not None

    @property
    def is_watched(self) -> bool:
        """Return whether the view is kept up to date; nothing reports whether it is looked at."""
        return not (self.is_closed or self._pause.value)

    def bundle(self, state: DashboardState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return data by MIME type, and metadata."""
        widget = self.widget._repr_mimebundle_() or {}
        data, metadata = widget if isinstance(widget, tuple) else (widget, {})
        return {**data, **static_bundle(state)}, metadata

    def close(self) -> None:
        """Stop following the engine and keep the last state; a second call does nothing."""
        with self._feed.state() as state:
            self._finish(state)
        self._feed.leave(self)

    def _ipython_display_(self, **_: Any) -> None:
        if self._final is not None:
            self._output.show(self._final, again=True)
            return
        OPEN.add(self)
        OPEN.close_superfluous()
        self._feed.wait_until_known()
        with self._feed.state() as state:
            self.show(state)
            self._output.show(*self.bundle(state), again=True)

    # The feed calls these, with its lock held.

    @property
    def follows(self) -> bool:
        """Return True until the end: nothing reports whether the view is looked at."""
        return not self.is_closed

    def on_state(self, state: DashboardState) -> None:
        """Show a state, if the line to the browser has room; an end is always shown."""
        is_last = state.state == "ended"
        if is_last or (self._throttle.is_due and LINE.is_due):
            self.show(state)
        if is_last:
            self._finish(state)

    def show(self, state: DashboardState) -> int:
        """Show a state, unless it comes too soon or the reader has paused; an end is always shown.

        The caller holds the feed's lock.

        Returns:
            The number of bytes that it sent, roughly; 0 if the state was not shown, or looks the same.
        """
        now = self._clock()
        if self.is_closed or ((now < self._due or self._pause.value) and state.state != "ended"):
            return 0
        size = self._draw(state)
        self._due = now + max(INTERVAL, (self._clock() - now) / DRAWING_SHARE)
        LINE.sent(size)
        # The view's own pause leaves the line to the others.
        self._throttle.sent(size * num_watched())
        return size

    def _draw(self, state: DashboardState) -> int:
        size = self._offer_ranks(state.mirrors)
        if self._rank.value in state.mirrors:
            chosen = self._rank.value
            state = replace(state, mirrors={chosen: state.mirrors[chosen]})
        drawn = "".join(
            f'<div style="line-height:0;margin:4px 0">{svg}</div>'
            for _, svg in pictures(state, standalone=False)
        )
        size += _put(self._header, header_part(state)) + _put(self._pictures, drawn)
        size += _put(self._requests, requests_part(state))
        return size + self._offer_requests(state)

    def _finish(self, state: DashboardState) -> None:
        if self._final is None:
            self._final = static_bundle(state)
            OPEN.discard(self)
            if self._output.shown:
                self._output.show(self._final)
            for control in (self._pause, self._rank, self._choice, self._button):
                control.disabled = True
            _close(self.widget)

    def _offer_ranks(self, mirrors: Mapping[int, TraceMirror]) -> int:
        options = [("all ranks", _ALL), *((f"rank {rank}", rank) for rank in sorted(mirrors))]
        self._rank.layout.display = None if len(mirrors) > 1 else "none"
        return _offer(self._rank, options, _ALL)

    def _offer_requests(self, state: DashboardState) -> int:
        several = len(state.mirrors) > 1
        options = []
        for rank, request in state.requests(MAX_CHOICES):
            if request.ended_at is None and request.state != "finished":
                number = request.added.number
                name = printable(request.added.request_id)
                name = name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"
                place = f"rank {rank} " if several else ""
                options.append((f"{place}#{number} {name}", (rank, number)))
        self._button.disabled = not options
        return _offer(self._choice, options, options[0][1] if options else None)

    def _on_click(self, button: ipywidgets.Button) -> None:  # noqa: ARG002
        if self._choice.value is None:
            return
        rank, number = self._choice.value
        try:
            with self._feed.state() as state:
                abort(self._feed, state, rank, number)
        except NBEngineError as error:
            self._answer.value = escape(printable(f"not aborted: {error}"))
        else:
            self._answer.value = f"abort of #{number} was sent"


def _put(part: ipywidgets.HTML, html: str) -> int:
    """Show HTML in a part, and return how many bytes that sends."""
    if part.value == html:
        return 0
    part.value = html
    return len(html.encode())


def _offer(dropdown: ipywidgets.Dropdown, options: list[tuple[str, Any]], default: object) -> int:
    """Offer other options, keep the chosen one if it is among them, and return how many bytes that sends."""
    if list(dropdown.options) == options:
        return 0
    chosen = dropdown.value
    values = [value for _, value in options]
    with dropdown.hold_sync():
        dropdown.options = options
        if options:
            dropdown.value = chosen if chosen in values else default
    return sum(len(label.encode()) for label, _ in options)


def _layout(width: str) -> dict[str, str]:
    return {"width": width}


def _close(widget: ipywidgets.Widget) -> None:
    """Close a widget and its children."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
