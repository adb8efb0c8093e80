"""Which requests this notebook waits for."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from nbengine.magics.generation.answers import Answers
from nbengine.magics.generation.open_views import OpenViews
from nbengine.magics.generation.result import Handle


class OngoingRequests:
    """The notebook's requests that have not ended, by engine request id. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._foreground: dict[str, bool] = {}
        self._background: WeakSet[Handle[Any]] = WeakSet()
        self.answers = Answers()
        """Those of requests that have ended, too."""
        self.views = OpenViews()
        """In which more can be asked for."""

    def add(self, engine_request_id: str, *, foreground: bool) -> None:
        """Note a request; `foreground`: the cell that is running waits for it."""
        with self._lock:
            self._foreground[engine_request_id] = foreground

    def discard(self, engine_request_id: str) -> None:
        """Forget a request."""
        with self._lock:
            self._foreground.pop(engine_request_id, None)

    def snapshot(self) -> dict[str, bool]:
        """Whether the running cell waits for it, by engine request id."""
        with self._lock:
            return self._foreground.copy()

    def add_background(self, handle: Handle[Any]) -> None:
        """Note what is written while no cell waits for it."""
        with self._lock:
            self._background.add(handle)

    def cancel_background(self) -> None:
        """End all that is written while no cell waits for it."""
        with self._lock:
            handles = list(self._background)
        for handle in handles:
            handle.cancel()
