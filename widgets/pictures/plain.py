"""The dashboard of core ipywidgets, for frontends that do not load its script: pictures anew, twice a second at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets

from nbengine.client.process_usage import printable
from nbengine.client.trace_mirror import TraceMirror
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel
from nbengine.widgets.pictures.html import header_part, pictures, requests_part

INTERVAL = 0.5
"""Seconds between two pictures at least."""
DRAWING_SHARE = 0.1
"""Of the time, that drawing may take: pictures of a large engine come more seldom."""
MAX_CHOICES = 200
_NAME_LENGTH = 40
_ALL = -1

AbortCallback = Callable[[int, int], None]
"""Called with the rank and the request's number, on the thread that takes the frontend's messages."""


class PlainDashboard:
    """Shows the states that it is given; it has no thread and no engine of its own.

    `show` may be called on any thread, by one at a time. `widget` is what is displayed.
    """

    def __init__(self, label: EngineLabel, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due = 0.0
        self._closed = False
        self._abort: AbortCallback | None = None
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

    def on_abort(self, callback: AbortCallback) -> None:
        """Who ends a request when Abort is pressed; what it raises is shown beside the button."""
        self._abort = callback
        self._button.disabled = not self._choice.options

    @property
    def is_paused(self) -> bool:
        """Whether states are passed over."""
        return bool(self._pause.value)

    def show(self, state: DashboardState) -> int:
        """Show a state, unless it comes too soon after the last one or the reader has paused; an end is always shown.

        Returns:
            About how many bytes that has sent; 0 if it was not shown, or looks the same.
        """
        is_last = state.state == "ended"
        with self._lock:
            now = self._clock()
            if self._closed or ((now < self._due or self.is_paused) and not is_last):
                return 0
        size = self._draw(state)
        self._due = now + max(INTERVAL, (self._clock() - now) / DRAWING_SHARE)
        if is_last:
            self._disable()
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

    def close(self) -> None:
        """Show nothing more; what is shown stays. Again does nothing."""
        with self._lock:
            self._closed = True
        self._disable()

    def _disable(self) -> None:
        for control in (self._pause, self._rank, self._choice, self._button):
            control.disabled = True

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
        self._button.disabled = self._abort is None or not options
        return _offer(self._choice, options, options[0][1] if options else None)

    def _on_click(self, button: ipywidgets.Button) -> None:  # noqa: ARG002
        chosen = self._choice.value
        if self._abort is None or chosen is None:
            return
        rank, number = chosen
        try:
            self._abort(rank, number)
        except Exception as error:  # noqa: BLE001 - shown to whoever has pressed the button
            self._answer.value = escape(printable(f"not aborted: {error}"))
        else:
            self._answer.value = f"abort of #{number} was sent"


def _put(part: ipywidgets.HTML, html: str) -> int:
    """Show it, and return how many bytes that sends."""
    if part.value == html:
        return 0
    part.value = html
    return len(html.encode())


def _offer(dropdown: ipywidgets.Dropdown, options: list[tuple[str, Any]], default: object) -> int:
    """Offer other options, and keep what is chosen as long as it is among them; returns how many bytes that sends."""
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
