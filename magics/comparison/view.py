"""The views of a comparison while it streams: one grid in the cell's output, or a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineEndError
from nbengine.magics.answers.diff import diff_html, diff_text, word_diff
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.cells import CellsView, Deeds
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.comparison.score_view import (
    ScoreView,
    score_marks,
    setting_text,
    summary_tables,
)
from nbengine.magics.generation.markdown import closed_markdown, harmless_markdown, unfenced
from nbengine.magics.generation.render import pretty_json, prompt_line
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.view import ERASE_LINE, UPDATE_SECONDS, SilentView, View, pause_after
from nbengine.magics.tokens.feed import kept_alternatives
from nbengine.magics.tokens.view import shaded
from nbengine.sampling_params import SamplingParams
from nbengine.widgets.grid.grid import GridCell, GridLayout, layout_of
from nbengine.widgets.grid.html import GridHtml
from nbengine.widgets.grid.pace import AnswerCount, AnswerTotals, Pace
from nbengine.widgets.grid.text import cell_text, final_text, live_text
from nbengine.widgets.live import LiveDisplay, MimeBundle, in_kernel
from nbengine.widgets.open_views import ClosableView, OpenViews
from nbengine.widgets.stop.buttons import mark
from nbengine.widgets.words import count, harmless, joined, print_quietly, seconds

_SECONDS_A_CELL = 5e-5
"""The least seconds between two looks, for each cell: looking takes a hundredth of that."""
MOST_SHADED = 5000
"""The most tokens that a saved grid shades one by one: they make about half a megabyte."""


class GridState:
    """The state of a comparison in words, as a view shows it."""

    def __init__(
        self, plan: ComparisonPlan, params: Sequence[SamplingParams], result: ComparisonResult
    ) -> None:
        axes = [(axis.name, [setting_text(setting) for setting in axis.settings]) for axis in plan.axes]
        self.layout: GridLayout = layout_of(axes, plan.num_each)
        self.result = result
        self.waiting = ""
        """The reason why no answer has begun."""
        self.cells = [GridCell() for _ in result]
        self._options = [combination.options for combination in plan.combinations]
        self._params = params
        self._started = time.monotonic()
        self._pace = Pace()
        self._known: list[tuple[object, object, int]] = [(None, None, 0)] * len(result)
        self._open = list(range(len(result)))
        """The positions of results that may still change."""
        self._counted: list[list[AnswerCount]] = [[] for _ in result]
        """The answers of each result, counted when it last changed."""
        self._open_counts: list[AnswerCount] = []
        """The answers of all results that may still change."""
        self._settled = AnswerTotals()
        """The sums over the answers of all others."""
        self._num_settled = 0
        self._num_kept = sum(_num_tokens(found) for found in result if found.kept_tokens is not None)
        self.take(result)

    def take(self, result: ComparisonResult) -> bool:
        """Take in the results that have changed, and return whether any has."""
        # Whatever a result takes in, its list of outputs is another one then.
        changed = False
        still_open = []
        for index in self._open:
            found = result.results[index]
            outputs, progress, num_scores = self._known[index]
            is_new = found.outputs is not outputs or found.metrics.prompt_progress is not progress
            if is_new or result.scores.num_found_of(index) != num_scores:
                changed = True
                self.cells[index] = self._live_cell(index)
                self._counted[index] = self._counts_of(index)
                self._known[index] = (
                    found.outputs,
                    found.metrics.prompt_progress,
                    result.scores.num_found_of(index),
                )
            if self._is_settled(index, found):
                for counted in self._counted[index]:
                    self._settled.add(counted)
                    self._num_settled += 1
            else:
                still_open.append(index)
        if changed or len(still_open) < len(self._open):
            self._open_counts = [counted for index in still_open for counted in self._counted[index]]
        self._open = still_open
        # The answers of kept runs are no work of now.
        self._pace.take(time.monotonic(), self.num_tokens - self._num_kept)
        return changed

    def _is_settled(self, index: int, found: GenerationResult) -> bool:
        """Return whether a result has ended and has all its scores."""
        scores = self.result.scores
        if not found.finished:
            return False
        has_scores = scores.num_found_of(index) > 0 and not scores.is_open(index)
        return not scores.names or index in self.result.errors or has_scores

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all answers."""
        return self._settled.tokens + sum(_num_tokens(self.result.results[index]) for index in self._open)

    @property
    def num_characters(self) -> int:
        """Count the characters of all answers."""
        return sum(len(answer) for cell in self.cells for answer in cell.answers)

    @property
    def first_open(self) -> int:
        """Return the position of the first result that may still change; the number of results if none does."""
        return self._open[0] if self._open else len(self.cells)

    @property
    def num_ended(self) -> int:
        """Count the answers that have ended, in whatever way."""
        return self._num_settled + sum(counted.ended for counted in self._open_counts)

    @cached_property
    def num_answers(self) -> int:
        """Count the answers that are asked for."""
        return sum(params.n for params in self._params)

    @property
    def head(self) -> str:
        """Describe the progress of all answers, and the time that is left."""
        rate, left = self._pace.rate, self._pace.seconds_left(self._open_counts, self._settled)
        running = sum(self.cells[index].state == "running" for index in self._open)
        return joined(
            self.waiting,
            f"{self.num_ended} of {count(self.num_answers, 'answer')}",
            f"{running} running" if running else "",
            f"{count(self.result.scores.num_open, 'score')} to come" if self.result.scores.num_open else "",
            count(self.num_tokens, "token"),
            f"{rate:,.0f} tok/s" if rate else "",
            "" if left is None else f"{'about' if left[1] else 'at most'} {seconds(left[0])} left",
        )

    @property
    def foot(self) -> str:
        """Sum up all answers in one line."""
        elapsed = time.monotonic() - self._started
        results = self.result.results
        kept = sum(found.kept_tokens is not None for found in results)
        tokens = self.num_tokens
        reasons = [completion.finish_reason for result in results for completion in result.outputs]
        reused = sum(result.num_cached_tokens for result in results)
        prompt_tokens = sum(result.num_prompt_tokens for result in results)
        ends = ((reasons.count("abort"), "ended early"), (reasons.count("length"), "stopped at the limit"))
        return joined(
            count(self.num_answers, "answer"),
            *(f"{number} {what}" for number, what in ends if number),
            count(tokens, "token"),
            f"{(tokens - self._num_kept) / elapsed:,.1f} tok/s"
            if tokens > self._num_kept and elapsed
            else "",
            seconds(elapsed),
            f"{kept:,} kept before" if kept else "",
            f"{reused:,} of {prompt_tokens:,} prompt tokens reused" if reused else "",
        )

    @property
    def notes(self) -> list[str]:
        """List the notes below the grid: how many requests failed, and that `--diff` has nothing earlier."""
        notes = []
        errors = self.result.errors
        if errors:
            first = next(iter(errors.values()))
            notes.append(f"{len(errors)} of {len(self.result)} failed: {_cause(first)}")
        if self._options[0].diff and all(result.previous is None for result in self.result):
            notes.append("--diff: there is no earlier answer with these settings in this cell")
        return notes

    @property
    def shading_note(self) -> str:
        """Say why no tokens are shaded although their probabilities were asked for; empty where they are."""
        options = self._options[0]
        if options.format != "text" or options.sampling.get("logprobs") is None or self._shades:
            return ""
        return f"--logprobs: more than {MOST_SHADED:,} tokens are not shaded; each result's .tree has them"

    def take_again(self, index: int) -> None:
        """Take in a result that has come in the place of another one."""
        self.cells[index] = self._live_cell(index)

    @property
    def has_answers_alone(self) -> bool:
        """Return whether the final cells show answers, and neither shaded tokens nor differences."""
        options = self._options[0]
        shaded = options.format == "text" and options.sampling.get("logprobs") is not None
        return not shaded and not options.diff

    @property
    def output_format(self) -> str:
        """Return how the answers are shown: "text", "markdown", "code" or "json"."""
        return self._options[0].format

    def final_cell(self, index: int) -> GridCell:
        """Make a cell's final form: formatted, shaded, or with its difference from the earlier answer."""
        result, options = self.result[index], self._options[index]
        cell = self._live_cell(index)
        foot = _foot(result) if options.footer else ""
        if options.diff and result.previous is not None:
            diffs = [word_diff(result.previous.text, answer.text) for answer in result.outputs[:1]]
            answers = tuple(map(diff_text, diffs))
            return replace(cell, answers=answers, foot=foot, rich=tuple(map(diff_html, diffs)))
        if options.format == "text" and any(answer.logprobs for answer in result.outputs) and self._shades:
            rich = tuple(shaded(root, self._shades) for root in result.tree.roots)
            return replace(cell, foot=foot, rich=rich)
        formatted = tuple(_formatted(text, options.format) for text in cell.answers)
        return replace(cell, answers=formatted, foot=foot)

    @property
    def is_markdown(self) -> bool:
        """Return whether the final answers are rendered Markdown; differences are shown as words instead."""
        options = self._options[0]
        return options.format == "markdown" and not (
            options.diff and any(result.previous is not None for result in self.result)
        )

    def _live_cell(self, index: int) -> GridCell:
        result: GenerationResult = self.result.results[index]
        error = self.result.errors.get(index)
        tokens = _num_tokens(result)
        if error is not None:
            state = "failed"
        elif result.finished:
            state = "done"
        else:
            state = "running" if tokens or prompt_line(result) else "waiting"
        foot = count(tokens, "token") + (" ✓" if state == "done" else "") if tokens else prompt_line(result)
        answers = tuple(answer.text for answer in result.outputs) if tokens else ()
        cause = "" if error is None else _cause(error)
        return GridCell(answers, state, foot, cause, scores=score_marks(self.result, index))

    @cached_property
    def _shades(self) -> int:
        """Return the number of alternatives that each token is shaded with; 0 for more than `MOST_SHADED`."""
        if self.num_tokens > MOST_SHADED:
            return 0
        return kept_alternatives(root for result in self.result.results for root in result.tree.roots)

    def _counts_of(self, index: int) -> list[AnswerCount]:
        result, params = self.result.results[index], self._params[index]
        limit = params.max_tokens
        begun = [
            AnswerCount(result.num_tokens_of(answer), limit, answer.finished or result.finished)
            for answer in result.outputs
        ]
        return begun + [AnswerCount(0, limit, result.finished)] * (params.n - len(begun))


class GridCellView:
    """A view that shows the comparison as one output of the cell, which it replaces in place."""

    def __init__(
        self,
        shell: InteractiveShell,
        state: GridState,
        views: OpenViews[ClosableView],
        deeds: Deeds,
        *,
        stream: bool,
    ) -> None:
        self.interval = UPDATE_SECONDS
        self.key = uuid4().hex
        self._state = state
        self._stream = stream
        self._scores = (
            ScoreView(shell, state.result, state.layout, views) if state.result.scores.names else None
        )
        self._live = LiveDisplay(shell)
        self._views, self._deeds = views, deeds
        self._html = GridHtml(state.layout, self._scores.grid if self._scores is not None else "")
        self._draw()

    def show_waiting(self, line: str) -> bool:
        """Show the line above the grid."""
        self._state.waiting = line
        self._draw()
        return True

    def update(self, result: ComparisonResult) -> None:
        """Replace the grid if something has changed, and set the pace by what that cost."""
        if self._state.take(result):
            self._draw()

    def finish(self, result: ComparisonResult, note: str = "") -> None:
        """Replace the grid by its final form."""
        state = self._state
        cells = [state.final_cell(index) for index in range(min(len(result), self._html.num_drawn))]
        notes = [*state.notes, *filter(None, [state.shading_note, note])]
        bundle = {"text/plain": final_text(state.layout, cells, state.foot, notes)}
        if state.is_markdown:
            bundle["text/markdown"] = self._html.final_markdown(state.foot, cells, notes, _markdown)
        else:
            bundle["text/html"] = self._html.final(state.foot, cells, notes)
        if self._scores is not None:
            self._scores.finish()
        if not (state.has_answers_alone and self._show_widget(bundle, notes)):
            self._live.show(bundle)

    def _show_widget(self, bundle: MimeBundle, notes: Sequence[str]) -> bool:
        state = self._state
        cells = CellsView(
            state.result,
            state.layout,
            state.final_cell,
            state.take_again,
            self._rescored,
            self._deeds,
            state.output_format,
        )
        grid = self._scores.grid if self._scores is not None else ""
        if not cells.show(self._live, bundle, grid, [line for line in (state.foot, *notes) if line]):
            return False
        # It needs an engine only to ask again, so that it stays when engines are left.
        self._views.open("", cells)
        return True

    def _rescored(self) -> None:
        if self._scores is not None:
            self._scores.refresh()

    def _draw(self) -> None:
        started = time.thread_time()
        state = self._state
        fraction = state.num_ended / state.num_answers
        html = self._html.live(state.head, fraction, state.cells if self._stream else [], state.first_open)
        plain = live_text(state.head, state.num_characters)
        size = self._live.show({"text/plain": plain, "text/html": html + mark(self.key)})
        if self._scores is not None:
            size += self._scores.update()
        # Looking at thousands of results takes a while, too.
        least = len(state.cells) * _SECONDS_A_CELL
        self.interval = max(least, pause_after(size, time.thread_time() - started))


class GridTerminalView:
    """A terminal's view, which prints each answer once it and all before it are complete, and progress."""

    interval = UPDATE_SECONDS
    key = ""

    def __init__(self, state: GridState) -> None:
        self._state = state
        self._printed = 0

    def update(self, result: ComparisonResult) -> None:
        """Print the answers that have become complete."""
        self._state.take(result)
        self._print(result, complete_only=True)
        if sys.stdout.isatty() and self._printed < len(self._state.cells):
            print(f"{ERASE_LINE}\x1b[2m[{self._state.head}]\x1b[0m", end="", flush=True)

    def show_waiting(self, line: str) -> bool:
        """Return that nothing printed can be replaced."""
        del line
        return False

    def finish(self, result: ComparisonResult, note: str = "") -> None:
        """Print the remaining answers and the sums."""
        self._print(result, complete_only=False)
        if result.scores.names:
            print(harmless(summary_tables(result)[0]))
        for line in (self._state.foot, *self._state.notes, note):
            if line:
                print_quietly(line)

    def _print(self, result: ComparisonResult, *, complete_only: bool) -> None:
        state = self._state
        for index in range(self._printed, len(result)):
            if complete_only and (not result[index].finished or result.scores.is_open(index)):
                break
            if sys.stdout.isatty():
                print(ERASE_LINE, end="")
            print(harmless(cell_text(state.layout.label(index), state.final_cell(index))) + "\n")
            self._printed = index + 1


def grid_view(
    shell: InteractiveShell,
    plan: ComparisonPlan,
    params: Sequence[SamplingParams],
    result: ComparisonResult,
    views: OpenViews[ClosableView],
    deeds: Deeds,
) -> View[ComparisonResult]:
    """Make the view of the running cell; `views` are the notebook's open widgets, `deeds` what their cells can do.

    In a terminal a background grid would run into what the user types, so such a view is silent.
    """
    state = GridState(plan, params, result)
    if in_kernel(shell):
        return GridCellView(shell, state, views, deeds, stream=plan.options.stream)
    return SilentView() if plan.options.background else GridTerminalView(state)


def _num_tokens(result: GenerationResult) -> int:
    return sum(map(result.num_tokens_of, result.outputs))


def _cause(error: Exception) -> str:
    # The engine's end is raised with its cause, so its requests need not repeat the cause.
    return "the engine ended" if isinstance(error, EngineEndError) else str(error)


def _formatted(text: str, output_format: str) -> str:
    if output_format == "json":
        return pretty_json(text)[0]
    return unfenced(text)[0] if output_format == "code" else text


def _markdown(text: str) -> str:
    return closed_markdown(harmless_markdown(text))


def _foot(result: GenerationResult) -> str:
    tokens = _num_tokens(result)
    if not tokens:
        return ""
    rate = result.metrics.tokens_per_second
    reasons = [answer.finish_reason for answer in result.outputs]
    return joined(
        "ended early" if "abort" in reasons else "",
        count(tokens, "token"),
        f"{rate:,.1f} tok/s" if rate else "",
        "limit" if "length" in reasons else "",
        f"{result.num_cached_tokens} reused" if result.num_cached_tokens else "",
    )
