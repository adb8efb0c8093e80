"""The answers that are being written and that a button can end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from nbengine.widgets.live import in_kernel

if TYPE_CHECKING:
    from nbengine.widgets.stop.widget import StopWidget

logger = logging.getLogger(__name__)

_SESSION_VARIABLE = "JPY_SESSION_NAME"
"""The environment variable that Jupyter's server gives a kernel whose notebook is open; a program that runs notebooks does
not set it."""
_EDITOR_NAME = "__vsc_ipynb_file__"
"""The variable that VS Code puts into a notebook's namespace."""


def mark(key: str) -> str:
    """Render the element that marks an output in which an answer is being written; no key, no mark."""
    return f'<div hidden data-nbe-stream="{key}"></div>' if key else ""


class StopButtons:
    """The notebook's answers that are being written, by the key that marks their outputs; safe on any thread.

    A button belongs to a person who looks at the notebook. Where a program runs it, no widget is made, so that
    the notebook has the same contents as ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[str, tuple[Callable[[], object], bool]] = {}
        self._widget: StopWidget | None = None
        self._has_widgets = True

    @contextmanager
    def offer(self, key: str, stop: Callable[[], object], *, foreground: bool) -> Iterator[None]:
        """Let a button beside the output that is marked by `key` call `stop` while the block runs, on any thread.

        `foreground` says that the running cell waits for the answer. Without a key there is no button.
        """
        if not key or not _is_looked_at():
            yield
            return
        with self._lock:
            self._stops[key] = stop, foreground
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                del self._stops[key]
                self._tell()

    def close(self) -> None:
        """Remove all buttons; later answers have buttons again."""
        with self._lock:
            widget, self._widget = self._widget, None
        if widget is not None:
            widget.close()

    def _tell(self) -> None:
        if self._widget is None and self._has_widgets:
            try:
                from nbengine.widgets.stop.widget import StopWidget
            except ImportError as error:
                logger.info("answers have no stop buttons: %s", error)
                self._has_widgets = False
                return
            self._widget = StopWidget(self._stop)
        if self._widget is not None:
            self._widget.streams = {key: foreground for key, (_, foreground) in self._stops.items()}

    def _stop(self, key: str) -> None:
        with self._lock:
            stop, _ = self._stops.get(key, (None, False))
        if stop is not None:
            stop()


def _is_looked_at() -> bool:
    """Return whether the notebook is open before a person, as far as a kernel can know."""
    shell = get_ipython()
    if shell is None or not in_kernel(shell):
        return False
    return _SESSION_VARIABLE in os.environ or _EDITOR_NAME in shell.user_ns
