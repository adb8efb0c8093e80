"""The grid of a comparison after its end: rows as a script asks for them, and what a person does with a cell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.error import UsageError

from nbengine.errors import NBEngineError
from nbengine.magics.answers.diff import word_diff
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.generation.markdown import harmless_markdown
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.scoring import Scoring
from nbengine.widgets.grid.grid import GridCell, GridLayout
from nbengine.widgets.live import LiveDisplay, MimeBundle

if TYPE_CHECKING:
    from nbengine.widgets.grid.cells_widget import CellsWidget

logger = logging.getLogger(__name__)

_FIRST_ROWS = 40
"""Rows that the widget itself has, for pages in which no kernel answers."""
_MOST_ROWS = 200
"""The most rows of one message."""
_LOOK_SECONDS = 0.05
"""Between two looks whether scores have come."""


class Deeds(Protocol):
    """The deeds that can be done with a result by its position; each may raise NBEngineError."""

    def ask_again(self, position: int) -> Request:
        """Send the request once more."""

    def scoring(self) -> Scoring:
        """Make the scoring of answers that were asked again."""

    def mark(self, answer: GenerationResult, *, pinned: bool | None = None, thumb: int | None = None) -> None:
        """Note in the kept run of an answer what a person thinks of it."""


@dataclass(eq=False)
class CellsView:
    """The widget of a grid.

    `cell` makes the contents of a position, `take` tells the grid of a new result, `rescored` says that scores have
    changed, and `output_format` is "text", "markdown", "code" or "json".
    """

    result: ComparisonResult
    layout: GridLayout
    cell: Callable[[int], GridCell]
    take: Callable[[int], None]
    rescored: Callable[[], None]
    deeds: Deeds
    output_format: str

    def __post_init__(self) -> None:
        self._is_scoring = threading.Lock()
        """Held while an answer is scored that was asked again: judges of pairs change the scores of others."""
        self._widget: CellsWidget | None = None
        self._live: LiveDisplay | None = None
        self._static: MimeBundle = {}

    def show(self, live: LiveDisplay, static: MimeBundle, grid: str, foot: Sequence[str]) -> bool:
        """Put the widget beside the static grid, and return whether there are widgets."""
        try:
            from nbengine.widgets.grid.cells_widget import CellsWidget
        except ImportError as error:
            logger.info("a grid is shown without a widget: %s", error)
            return False
        layout = self.layout
        columns = [list(zip(layout.column_names, labels, strict=True)) for labels in layout.columns]
        self._live, self._static = live, static
        self._widget = CellsWidget(
            self.receive,
            grid=grid,
            columns=columns,
            num_rows=len(layout.rows),
            first_rows=self._rows(range(min(_FIRST_ROWS, len(layout.rows)))),
            foot=list(foot),
        )
        live.show({**static, **self._widget.mime_bundle()})
        return True

    def close(self) -> None:
        """Put the static grid in the place of the widget; a second call does nothing."""
        widget, self._widget = self._widget, None
        if widget is not None and self._live is not None:
            self._live.show(self._static)
            widget.close()

    def receive(self, content: object) -> None:
        """Do what the script asks for; what it cannot ask for is left alone."""
        if not isinstance(content, dict):
            return
        try:
            self._do(content)
        except (NBEngineError, UsageError) as error:
            self._send({"kind": "notice", "text": str(error)})

    def _do(self, asked: dict[str, Any]) -> None:
        kind = asked.get("kind")
        if kind == "rows" and isinstance(asked.get("rows"), list):
            wanted = [row for row in asked["rows"][:_MOST_ROWS] if self._is_row(row)]
            self._send({"kind": "rows", "rows": self._rows(wanted)})
        elif kind == "diff" and self._has(asked.get("first")) and self._has(asked.get("second")):
            texts = [self.result[asked[name]].text for name in ("first", "second")]
            self._send({"kind": "diff", "parts": [[part.kind, part.text] for part in word_diff(*texts)]})
        elif self._has(asked.get("position")):
            self._do_with(asked["position"], asked)

    def _do_with(self, position: int, asked: dict[str, Any]) -> None:
        result = self.result
        if asked["kind"] == "thumb" and asked.get("thumb") in (1, -1, 0):
            result.thumbs.pop(position, None)
            if asked["thumb"]:
                result.thumbs[position] = asked["thumb"]
            self._tell(position)
            self.deeds.mark(result[position], thumb=asked["thumb"])
        elif asked["kind"] == "pin" and isinstance(asked.get("pinned"), bool):
            self.deeds.mark(result[position], pinned=asked["pinned"])
            (result.pinned.add if asked["pinned"] else result.pinned.discard)(position)
            self._tell(position)
        elif asked["kind"] == "again":
            self._ask_again(position)

    def _ask_again(self, position: int) -> None:
        request = self.deeds.ask_again(position)
        result = self.result
        result.results[position] = request.result
        result.errors.pop(position, None)
        result.thumbs.pop(position, None)
        result.pinned.discard(position)
        # The scores were those of the other answer.
        result.scores.renew(position)
        self._changed(position)
        name = f"nbengine-again-{position}"
        threading.Thread(target=self._follow, args=(position, request), name=name, daemon=True).start()

    def _follow(self, position: int, request: Request) -> None:
        """Take the outputs of a request that was asked again, on a thread of its own."""
        collector = request.collector
        try:
            while collector is not None and not request.result.finished:
                request.result.absorb(collector.get_blocking())
                self._changed(position)
        except NBEngineError as error:
            self.result.errors[position] = error
            request.fail(error)
        else:
            request.end(shown=request.stop())
        self._changed(position)
        self._score(position, request)

    def _score(self, position: int, request: Request) -> None:
        """Find the scores of an answer that has come in the place of another one, and tell of them."""
        if not self.result.scores.names:
            return
        with self._is_scoring:
            if self.result[position] is not request.result:
                return  # It was asked once more meanwhile.
            scoring = self.deeds.scoring()
            changed = scoring.begin_again(position, self.result.results)
            while not scoring.is_done:
                time.sleep(_LOOK_SECONDS)
                scoring.step()
            scoring.end()
        for each in changed:
            self._changed(each)
        self.rescored()

    def _changed(self, position: int) -> None:
        self.take(position)
        self._tell(position)

    def _tell(self, position: int) -> None:
        self._send({"kind": "cell", "position": position, "cell": self._contents(position)})

    def _send(self, message: dict[str, Any]) -> None:
        widget = self._widget
        if widget is not None:
            # The page may have gone in the meantime.
            with suppress(RuntimeError):
                widget.send(message)

    def _rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        layout, width = self.layout, len(self.layout.columns)
        return [
            {
                "row": row,
                "labels": list(zip(layout.row_names, layout.rows[row], strict=True)),
                "cells": [self._contents(row * width + column) for column in range(width)],
            }
            for row in numbers
        ]

    def _contents(self, position: int) -> dict[str, Any]:
        cell = self.cell(position)
        is_markdown = self.output_format == "markdown"
        return {
            "answers": list(cell.answers),
            "error": cell.error,
            "foot": cell.foot or ("" if cell.state == "done" else cell.state),
            "scores": [[str(mark), mark.state] for mark in cell.scores],
            "thumb": self.result.thumbs.get(position, 0),
            "pinned": position in self.result.pinned,
            "code": self.output_format in ("json", "code"),
            "markdown": list(map(harmless_markdown, cell.answers)) if is_markdown else [],
        }

    def _has(self, position: object) -> bool:
        return type(position) is int and 0 <= position < len(self.result)

    def _is_row(self, row: object) -> bool:
        return type(row) is int and 0 <= row < len(self.layout.rows)
