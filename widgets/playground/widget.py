"""The playground in the browser: an editor, its variables, and two sides with settings and answers.

This module needs anywidget. The kernel's side sends custom messages:
```
{"kind": "reset", "variables": [NAME, ...], "error": "", "engines": [NAME, ...], "sides": [SIDE, SIDE]}
{"kind": "read", "variables": [NAME, ...], "error": ""}            # what a text that was edited asks for
{"kind": "side", "side": 0, "running": true, "start": [n, ...], "texts": [TEXT, ...], "footer": "", "error": ""}
{"kind": "code", "what": "cell" or "python", "text": "", "note": ""}
{"kind": "notice", "text": "", "error": false}
SIDE = the message "side" without its kind, from the beginning of each text
```
A side's `texts` are those of its completions, and go on where `start` says, which is where the last ones ended.

The script sends `{"kind": "hello"}` when it is mounted, `{"kind": "read", "text"}` when the text has changed,
`{"kind": "run", "side", "state"}`, `{"kind": "stop", "side"}`, `{"kind": "keep", "state"}`,
`{"kind": "cell", "side", "state"}` and `{"kind": "python", "side", "state"}`, where
```
STATE = {"name": "", "text": "", "values": {NAME: TEXT}, "examples": [{"question": "", "answer": ""}, ...],
         "sides": [{"engine": "", "raw": false, "settings": {NAME: TEXT}}, ...]}
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from nbengine.widgets.comms import answer_at_once
from nbengine.widgets.scripts import bundled, stylesheet

Frame = dict[str, Any]


class PlaygroundWidget(anywidget.AnyWidget):
    """The widget of a playground; `receive` gets the script's messages, on the thread that handles them."""

    _esm = bundled("playground")
    _css = stylesheet("playground")

    controls: traitlets.List[Frame] = traitlets.List().tag(sync=True)
    """The settings of a side in their order: `name`, `flag` (or the name where there is none), `help`, `kind` ("number",
    "integer", "text", "lines"), and `low`, `high`, `step` and `start` (its place while nothing is entered) of a slider."""
    state = traitlets.Dict().tag(sync=True)
    """The name, text, values, examples and settings that the user has entered, as in `STATE`."""
    answers: traitlets.List[Frame] = traitlets.List().tag(sync=True)
    """The sides as they were last, for pages in which no kernel answers a hello."""

    def __init__(self, receive: Callable[[object], None], **data: Any) -> None:
        super().__init__(**data)
        answer_at_once(self.comm)
        self.on_msg(lambda _widget, content, _buffers: receive(content))

    def mime_bundle(self) -> dict[str, Any]:
        """Return the MIME type that makes a frontend show the widget."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }
