"""The scores of a comparison as a notebook shows them: in each cell, and in sum above the grid."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from statistics import mean
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.scores.intervals import CONFIDENCE, Estimate
from nbengine.magics.scores.summary import Experiment
from nbengine.magics.scores.table import Place, Score
from nbengine.widgets.grid.grid import GridLayout, ScoreMark
from nbengine.widgets.live import LiveDisplay
from nbengine.widgets.open_views import ClosableView, OpenViews
from nbengine.widgets.words import PLAIN, muted, table

if TYPE_CHECKING:
    from nbengine.widgets.grid.widget import ScoresWidget

logger = logging.getLogger(__name__)

NOTE = f"mean, {CONFIDENCE * 100:.0f} % interval, number of scores"
DIFFERENCE_NOTE = f"difference over the same prompts, {CONFIDENCE * 100:.0f} % interval, number of prompts"
_LABEL_CHARACTERS = 80


def setting_text(setting: object) -> str:
    """Return a setting as it stands in labels."""
    if isinstance(setting, float):
        return f"{setting:g}"
    return setting if isinstance(setting, str) else repr(setting)


def score_marks(result: ComparisonResult, position: int) -> tuple[ScoreMark, ...]:
    """Make the marks of a result's scores, by answer where there are several."""
    scores, answers = result.scores, result.results[position].outputs
    marks = []
    for answer in answers if scores.names else ():
        place = position, answer.index
        prefix = f"{answer.index + 1}. " if len(answers) > 1 else ""
        for name in scores.names:
            mark = _mark(result, f"{prefix}{name}", name, place)
            if mark is not None:
                marks.append(mark)
    return tuple(marks)


def summary_tables(result: ComparisonResult) -> tuple[str, str]:
    """Make the tables of means and of differences to the first setting as (plain text, HTML).

    A single setting has no differences.
    """
    experiment = Experiment(result)
    contents = [_means(experiment, result), _differences(experiment, result)]
    tables = [_table(content) for content in contents if content["rows"]]
    return "\n".join(plain for plain, _ in tables), "".join(html for _, html in tables)


class ScoreView:
    """The table of means, as an output of its own that is replaced while scores come.

    In the end it has the differences, too, and is a widget whose buttons sort and filter the rows of the grid below
    it, or the tables alone where there is no widget.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        result: ComparisonResult,
        layout: GridLayout,
        views: OpenViews[ClosableView],
    ) -> None:
        """Show the first table; the widget is added to `views`, which close it when there are too many."""
        self.grid = f"nbengine-grid-{uuid4().hex}"
        """The id of the table with the grid."""
        self._result = result
        self._layout = layout
        self._views = views
        self._live = LiveDisplay(shell)
        self._shown: tuple[str, str] = ("", "")
        self._num_shown = -1
        """The number of scores in the table."""
        self._widget: ScoresWidget | None = None
        self.update()

    def update(self) -> int:
        """Replace the table if scores have come, and return the number of characters that were sent."""
        num_found = self._result.scores.num_found
        if num_found == self._num_shown:
            return 0
        self._num_shown = num_found
        # Differences wait for the end: of thousands of prompts they cost more than the means.
        self._shown = _table(_means(Experiment(self._result), self._result))
        return self._live.show(self._static())

    def finish(self) -> None:
        """Show the final tables, with the widget."""
        self._shown = summary_tables(self._result)
        try:
            from nbengine.widgets.grid.widget import ScoresWidget
        except ImportError as error:
            logger.info("scores are shown without a widget: %s", error)
            self._live.show(self._static())
            return
        self._widget = ScoresWidget(self, grid=self.grid, **self._data())
        self._live.show({**self._static(), **self._widget.mime_bundle()})
        # It needs no engine, so that it stays when engines are left.
        self._views.open("", self)

    def refresh(self) -> None:
        """Show scores that have changed after the end: an answer was asked again."""
        self._shown = summary_tables(self._result)
        widget = self._widget
        if widget is None:
            self._live.show(self._static())
            return
        # The widget stays as it is, with its sorting; what a saved notebook shows without it is replaced at its end.
        with widget.hold_sync():
            for name, value in self._data().items():
                setattr(widget, name, value)

    def close(self) -> None:
        """Put the table in the place of the widget; a second call does nothing."""
        widget, self._widget = self._widget, None
        if widget is not None:
            self._live.show(self._static())
            widget.close()

    def _data(self) -> dict[str, Any]:
        """Return what the widget knows of the scores."""
        experiment, width = Experiment(self._result), len(self._layout.columns)
        differences = _differences(experiment, self._result)
        return {
            "summary": {**_means(experiment, self._result), "differences": differences},
            "order": _orders(experiment, self._result, width),
            "differing": _differing(experiment, len(self._result), width),
        }

    def _static(self) -> dict[str, Any]:
        plain, html = self._shown
        return {"text/plain": plain, "text/html": html}


def _table(contents: dict[str, Any]) -> tuple[str, str]:
    rows = [[row["label"], *row["cells"]] for row in contents["rows"]]
    plain, html = table(rows, [contents["title"], *contents["scores"]])
    return f"{plain}\n[{contents['note']}]", f"<div {PLAIN}>{html}</div>{muted(contents['note'])}"


def _means(experiment: Experiment, result: ComparisonResult) -> dict[str, Any]:
    """Make the table of means in words: `title`, `scores`, `rows`, each with a `label` and `cells`, and `note`."""
    names = result.scores.names
    rows = [
        {
            "label": _setting_label(settings),
            "cells": [
                _estimate(
                    experiment.estimate(name, number),
                    is_share=result.scores.is_truth(name),
                    num_failed=_num_failed(experiment, result, name, number),
                )
                for name in names
            ],
        }
        for number, settings in enumerate(experiment.settings)
    ]
    return {"title": "setting", "scores": names, "rows": rows, "note": NOTE}


def _differences(experiment: Experiment, result: ComparisonResult) -> dict[str, Any]:
    """Make the table of differences to the first setting in words, as `_means` does: a row for each further one."""
    names = result.scores.names
    first, *others = map(_setting_label, experiment.settings)
    rows = [
        {
            "label": label,
            "cells": [
                _difference(experiment.difference(name, 0, number), is_share=result.scores.is_truth(name))
                for name in names
            ],
        }
        for number, label in enumerate(others, 1)
    ]
    return {"title": f"against {first}", "scores": names, "rows": rows, "note": DIFFERENCE_NOTE}


def _orders(experiment: Experiment, result: ComparisonResult, width: int) -> dict[str, list[float | None]]:
    """Return the mean score of each row of the grid, by the name of the score; None where there is none."""
    return {
        name: [_mean(values) for values in _by_row(experiment, result, name, width)]
        for name in result.scores.names
    }


def _by_row(experiment: Experiment, result: ComparisonResult, name: str, width: int) -> Iterator[list[Score]]:
    for start in range(0, len(result), width):
        yield [value for index in range(start, start + width) for value in experiment.values(name, index)]


def _mean(values: list[Score]) -> float | None:
    return float(mean(values)) if values else None


def _differing(experiment: Experiment, num_results: int, width: int) -> list[bool]:
    """Return for each row of the grid whether the scores of one of its prompts differ between settings."""
    return [
        any(experiment.differs(index) for index in range(start, start + width))
        for start in range(0, num_results, width)
    ]


def _num_failed(experiment: Experiment, result: ComparisonResult, name: str, setting: int) -> int:
    return sum(position % experiment.num_settings == setting for position, _ in result.scores.errors[name])


def _setting_label(settings: dict[str, Any]) -> str:
    label = (
        " · ".join(f"{name} {' '.join(setting_text(value).split())}" for name, value in settings.items())
        or "all"
    )
    return label if len(label) <= _LABEL_CHARACTERS else f"{label[: _LABEL_CHARACTERS - 1]}…"


def _estimate(estimate: Estimate, *, is_share: bool, num_failed: int) -> str:
    """Format a mean: `80 % (60 to 93 %), n 20`, `3.4 (2.9 to 3.9), n 20, 2 failed`."""
    failed = f", {num_failed} failed" if num_failed else ""
    if estimate.mean is None:
        return f"none{failed}"
    scale, unit = (100, " %") if is_share else (1, "")
    number = ".0f" if is_share else ".3g"
    interval = _interval(estimate, scale, number, unit)
    return f"{scale * estimate.mean:{number}}{unit}{interval}, n {estimate.n}{failed}"


def _difference(estimate: Estimate, *, is_share: bool) -> str:
    """Format a difference, that of shares in percentage points: `+12 points (-3 to 27), n 20`."""
    if estimate.mean is None:
        return "none"
    scale, unit, number = (100, " points", "z.0f") if is_share else (1, "", "z.3g")
    interval = _interval(estimate, scale, number)
    return f"{scale * estimate.mean:+{number}}{unit}{interval}, n {estimate.n}"


def _interval(estimate: Estimate, scale: int, number: str, unit: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({scale * estimate.low:{number}} to {scale * estimate.high:{number}}{unit})"


def _mark(result: ComparisonResult, label: str, name: str, place: Place) -> ScoreMark | None:
    value = result.scores.values[name].get(place)
    if value is None:
        error = result.scores.errors[name].get(place)
        return None if error is None else ScoreMark(label, f"failed, {error}", "failed")
    if isinstance(value, bool):
        return ScoreMark(label, "yes", "yes") if value else ScoreMark(label, "no", "no")
    return ScoreMark(label, f"{value:.4g}")
