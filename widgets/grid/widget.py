"""The table of scores above a grid in the browser: its buttons sort the grid's rows, and a box filters them.

This module needs anywidget: import it where a widget is about to be shown, and show the static table where the
import fails. The script sends nothing to the kernel; it works in a saved notebook, too. It finds the grid by
its id, and the grid's rows by their numbers (`data-row`). The kernel sets all data again when scores have changed.
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from nbengine.widgets.open_views import ClosableView
from nbengine.widgets.scripts import bundled, stylesheet


class ScoresWidget(anywidget.AnyWidget):
    """The widget of a table of scores."""

    _esm = bundled("scores")
    _css = stylesheet("scores")

    summary = traitlets.Dict().tag(sync=True)
    """The tables in words: `title`, `scores` (names), `rows` (each a `label` and `cells`), `note`, and `differences`, the
    same of the second table."""
    grid = traitlets.Unicode().tag(sync=True)
    """The id of the table with the grid."""
    order = traitlets.Dict().tag(sync=True)
    """The mean score of each row of the grid, which sorts the rows, by the score's name; None without a score."""
    differing = traitlets.List(traitlets.Bool()).tag(sync=True)
    """The scores of one of the row's prompts are not the same in all settings, for each row of the grid."""

    def __init__(self, view: ClosableView, **data: Any) -> None:
        """Make the widget of a view, which lives as long as the widget."""
        super().__init__(**data)
        self.view = view

    def mime_bundle(self) -> dict[str, Any]:
        """Return the MIME type that makes a frontend show the widget, to be shown beside the static table."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }
