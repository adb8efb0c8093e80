"""The tokens of answers in the browser: shaded, with their alternatives, answers and branches as tabs.

This module needs anywidget: import it where a widget is about to be shown, and show the static form where the
import fails.

The kernel's side sends custom messages:
```
{"kind": "reset", "refusal": "", "nodes": [NODE, ...]}                  # everything: the answer to a hello
{"kind": "node", ...NODE}                                               # news of one answer or branch
{"kind": "alternatives", "node", "position", "alternatives": [ALTERNATIVE, ...]}
{"kind": "select", "node"}                                 # the branch that the script asked for exists now
{"kind": "notice", "node", "text"}                         # the request of the script is not possible
NODE = {"id", "parent", "position", "label", "state", "footer", "error", "in_text", "start",
        "tokens": [TOKEN, ...]}
TOKEN = [token id, [[mark, text], ...], shade, probability in words, rank, [ALTERNATIVE, ...]]
ALTERNATIVE = [token id, label, probability in words, probability]
```
A node's tokens are those that it does not share with its parent, from number `start` on, counted from the
first one that it does not share; `position` is the place of that first one in the whole answer. `state` is
"running", "done" or "failed"; `in_text` is the number of its tokens that are in its text, null while it is
being written. `refusal` says why nothing can branch.

The script sends `{"kind": "hello"}` when it is mounted and when a node's `start` does not follow its tokens,
`{"kind": "branch", "node", "position", "token"}`, `{"kind": "alternatives", "node", "position"}`,
`{"kind": "stop", "node"}`, and `{"kind": "rest"}` when a branch has ended and nobody uses the widget.
`snapshot` is the last reset message at the end of an answer, for pages in which no kernel answers a hello.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from nbengine.widgets.comms import answer_at_once
from nbengine.widgets.scripts import bundled, stylesheet

Frame = dict[str, Any]


class TokensWidget(anywidget.AnyWidget):
    """The widget of tokens; `receive` gets the script's messages, on the thread that handles them."""

    _esm = bundled("tokens")
    _css = stylesheet("tokens")

    snapshot = traitlets.Dict().tag(sync=True)
    active = traitlets.Int(0).tag(sync=True)
    """The node whose tab is open."""
    folded = traitlets.Bool(False).tag(sync=True)
    """The widget shows only a line that unfolds it."""

    def __init__(self, receive: Callable[[object], None], *, folded: bool) -> None:
        super().__init__(folded=folded)
        answer_at_once(self.comm)
        self.on_msg(lambda _widget, content, _buffers: receive(content))

    def mime_bundle(self) -> dict[str, Any]:
        """Return the MIME type that makes a frontend show the widget, to be shown beside the static forms."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }
