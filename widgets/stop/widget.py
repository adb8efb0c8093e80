"""The widget behind the stop buttons: it has no view, and its script puts a button beside each output that is marked.

This module needs anywidget: import it where there may be a button, and do without one where the import fails.

An output is marked by an element with the attribute `data-nbe-stream`, whose value is one of the keys in
`streams`. The script sends `{"kind": "stop", "stream": KEY}`, and is answered with the same `kind` and `stream`;
without an answer it interrupts the kernel through the notebook's server, as the toolbar does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from nbengine.widgets.comms import answer_at_once, interrupt_path
from nbengine.widgets.scripts import bundled, stylesheet


class StopWidget(anywidget.AnyWidget):
    """The widget of all buttons of a kernel; `stop` is called with a key, on the thread that handles messages."""

    _esm = bundled("stop")
    _css = stylesheet("stop")

    streams = traitlets.Dict().tag(sync=True)
    """The keys of the answers that are being written, each with whether the running cell waits for it."""
    interrupt_path = traitlets.Unicode("").tag(sync=True)

    def __init__(self, stop: Callable[[str], None]) -> None:
        super().__init__(interrupt_path=interrupt_path())
        answer_at_once(self.comm)
        self._stop = stop
        self.on_msg(lambda _widget, content, _buffers: self._receive(content))

    def _receive(self, content: Any) -> None:
        if not isinstance(content, dict) or content.get("kind") != "stop":
            return
        key = content.get("stream")
        if isinstance(key, str) and key in self.streams:
            self.send({"kind": "stop", "stream": key})
            self._stop(key)
