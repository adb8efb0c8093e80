"""The requests that this notebook waits for."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from nbengine.magics.answers.kept import Answers
from nbengine.magics.generation.result import Handle
from nbengine.widgets.open_views import ClosableView, OpenViews
from nbengine.widgets.stop.buttons import StopButtons

MOST_VIEWS = 100
"""The most views that stay open: each keeps its tokens in the kernel and in the page."""


class OngoingRequests:
    """The notebook's requests that have not ended, by engine request id; safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._foreground: dict[str, bool] = {}
        self._background: WeakSet[Handle[Any]] = WeakSet()
        self.answers = Answers()
        """The answers of all requests, also of those that have ended."""
        self.views = OpenViews[ClosableView](MOST_VIEWS)
        """The outputs whose widgets may ask their engines for more."""
        self.stops = StopButtons()
        """The buttons beside the answers that are being written."""

    def add(self, engine_request_id: str, *, foreground: bool) -> None:
        """Note a request; `foreground` says that the running cell waits for it."""
        with self._lock:
            self._foreground[engine_request_id] = foreground

    def discard(self, engine_request_id: str) -> None:
        """Forget a request."""
        with self._lock:
            self._foreground.pop(engine_request_id, None)

    def snapshot(self) -> dict[str, bool]:
        """Return whether the running cell waits for each request, by engine request id."""
        with self._lock:
            return self._foreground.copy()

    def words(self) -> dict[str, tuple[str, list[str]]]:
        """Return what each request asks, as it was typed, and its answers so far, by engine request id."""
        return {
            answer.request_id: (answer.result.prompt, [output.text for output in answer.result.outputs])
            for answer in self.answers.newest_first()
        }

    def add_background(self, handle: Handle[Any]) -> None:
        """Note a generation that goes on while no cell waits for it."""
        with self._lock:
            self._background.add(handle)

    def cancel_background(self) -> None:
        """Cancel all generations that no cell waits for."""
        with self._lock:
            handles = list(self._background)
        for handle in handles:
            handle.cancel()
