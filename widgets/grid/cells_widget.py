"""The grid of a comparison in the browser, once all answers are there: cells that open, and what can be done with one.

This module needs anywidget: import it where a widget is about to be shown, and show the static grid where the
import fails.

The script asks for rows as they come into sight; the kernel's side sends custom messages:
```
{"kind": "rows", "rows": [ROW, ...]}              # the answer to {"kind": "rows", "rows": [number, ...]}
{"kind": "cell", "position", "cell": CELL}        # news of one cell
{"kind": "diff", "parts": [["same" | "inserted" | "deleted", text], ...]}
{"kind": "notice", "text"}                        # what the script asked for is not possible
ROW = {"row": number, "labels": [[name, value], ...], "cells": [CELL, ...]}
CELL = {"answers": [text, ...], "error", "foot", "scores": [[text, state], ...], "thumb", "pinned", "code",
        "markdown": [text, ...]}
```
`markdown` has the answers again, to be rendered: Markdown without live HTML. It is empty where they are shown as text.
Besides rows the script asks for `{"kind": "thumb", "position", "thumb"}` (1, -1 or 0),
`{"kind": "pin", "position", "pinned"}`, `{"kind": "again", "position"}` and `{"kind": "diff", "first", "second"}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from nbengine.widgets.comms import answer_at_once
from nbengine.widgets.scripts import bundled, stylesheet


class CellsWidget(anywidget.AnyWidget):
    """The widget of a grid; `receive` gets the script's messages, on the thread that handles them."""

    _esm = bundled("cells")
    _css = stylesheet("cells")

    grid = traitlets.Unicode().tag(sync=True)
    """The id of the table; the table of scores finds it by this."""
    columns: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """The labels of the columns, each a list of names and values."""
    num_rows = traitlets.Int().tag(sync=True)
    first_rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """The first rows, for pages in which no kernel answers."""
    foot = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """The lines below the grid."""

    def __init__(self, receive: Callable[[object], None], **data: Any) -> None:
        """Make the widget with what the script shows at first."""
        super().__init__(**data)
        answer_at_once(self.comm)
        self.on_msg(lambda _widget, content, _buffers: receive(content))

    def mime_bundle(self) -> dict[str, Any]:
        """Return the MIME type that makes a frontend show the widget, to be shown beside the static grid."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }
