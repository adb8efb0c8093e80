"""Where a comparison appears while it streams: one grid in the cell's output, a terminal, or nowhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineEndError
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.generation.diff import diff_html, diff_text, word_diff
from nbengine.magics.generation.markdown import unfenced
from nbengine.magics.generation.render import pretty_json
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.view import UPDATE_SECONDS, pause_after
from nbengine.magics.tokens.feed import kept_alternatives
from nbengine.magics.tokens.view import shaded
from nbengine.sampling_params import SamplingParams
from nbengine.widgets.grid.grid import GridCell, GridLayout, layout_of
from nbengine.widgets.grid.html import GridHtml
from nbengine.widgets.grid.pace import AnswerCount, Pace
from nbengine.widgets.grid.text import cell_text, final_text, live_text
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.words import count, harmless, joined, print_quietly, seconds

MOST_SHADED = 5000
"""Tokens of a grid that is saved with each one shaded: about half a megabyte."""
_ERASE_LINE = "\r\x1b[2K"


class GridView(Protocol):
    """Shows a growing comparison. `interval` is how many seconds the next update should wait."""

    interval: float

    def update(self, changed: Iterable[int]) -> None:
        """Show what there is; `changed` has the positions of the results that are others than the last time."""

    def finish(self, note: str = "") -> None:
        """Show the final state, once; `note` is what else there is to say."""


class GridState:
    """What there is to show of a comparison, in words."""

    def __init__(
        self, plan: ComparisonPlan, params: Sequence[SamplingParams], result: ComparisonResult
    ) -> None:
        axes = [(axis.name, [_label(setting) for setting in axis.settings]) for axis in plan.axes]
        self.layout: GridLayout = layout_of(axes, plan.num_each)
        self.result = result
        self.cells = [GridCell() for _ in result]
        self._options = [combination.options for combination in plan.combinations]
        self._params = params
        self._started = time.monotonic()
        self._pace = Pace()
        self.take(result.errors)

    def take(self, changed: Iterable[int]) -> None:
        """Note results that have changed."""
        for index in changed:
            self.cells[index] = self._live_cell(index)
        self._pace.take(time.monotonic(), self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(_num_tokens(result) for result in self.result)

    @property
    def num_ended(self) -> int:
        """Answers that have ended, whatever way."""
        return sum(counted.ended for counted in self._counts())

    @property
    def num_answers(self) -> int:
        """Answers that there will be."""
        return sum(params.n for params in self._params)

    @property
    def head(self) -> str:
        """How far everything is, and how long it will take."""
        rate, left = self._pace.rate, self._pace.seconds_left(self._counts())
        running = sum(cell.state == "running" for cell in self.cells)
        return joined(
            f"{self.num_ended} of {count(self.num_answers, 'answer')}",
            f"{running} running" if running else "",
            count(self.num_tokens, "token"),
            f"{rate:,.0f} tok/s" if rate else "",
            "" if left is None else f"{'about' if left[1] else 'at most'} {seconds(left[0])} left",
        )

    @property
    def foot(self) -> str:
        """The sums of everything."""
        elapsed = time.monotonic() - self._started
        tokens, results = self.num_tokens, self.result.results
        reasons = [completion.finish_reason for result in results for completion in result.outputs]
        reused = sum(result.num_cached_tokens for result in results)
        prompt_tokens = sum(result.num_prompt_tokens for result in results)
        ends = ((reasons.count("abort"), "ended early"), (reasons.count("length"), "stopped at the limit"))
        return joined(
            count(self.num_answers, "answer"),
            *(f"{number} {what}" for number, what in ends if number),
            count(tokens, "token"),
            f"{tokens / elapsed:,.1f} tok/s" if tokens and elapsed else "",
            seconds(elapsed),
            f"{reused:,} of {prompt_tokens:,} prompt tokens reused" if reused else "",
        )

    @property
    def notes(self) -> list[str]:
        """What went wrong with some, and what a flag asks for that there is not."""
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
        """Why no tokens are shaded although their probabilities were asked for."""
        options = self._options[0]
        if options.format != "text" or options.sampling.get("logprobs") is None or self._shades:
            return ""
        return f"--logprobs: more than {MOST_SHADED:,} tokens are not shaded; each result's .tree has them"

    def final_cell(self, index: int) -> GridCell:
        """A cell as it stays, formatted or with its difference from before."""
        result, options = self.result[index], self._options[index]
        cell = self._live_cell(index)
        foot = _foot(result) if options.footer else ""
        if options.diff and result.previous is not None:
            diffs = [word_diff(result.previous.text, answer.text) for answer in result.outputs[:1]]
            answers = tuple(map(diff_text, diffs))
            return GridCell(answers, cell.state, foot, cell.error, tuple(map(diff_html, diffs)))
        if options.format == "text" and any(answer.logprobs for answer in result.outputs) and self._shades:
            rich = tuple(shaded(root, self._shades) for root in result.tree.roots)
            return GridCell(cell.answers, cell.state, foot, cell.error, rich)
        formatted = tuple(_formatted(text, options.format) for text in cell.answers)
        return GridCell(formatted, cell.state, foot, cell.error)

    def _live_cell(self, index: int) -> GridCell:
        result: GenerationResult = self.result.results[index]
        error = self.result.errors.get(index)
        tokens = _num_tokens(result)
        if error is not None:
            state = "failed"
        elif result.finished:
            state = "done"
        else:
            state = "running" if tokens else "waiting"
        foot = count(tokens, "token") + (" ✓" if state == "done" else "") if tokens else ""
        answers = tuple(answer.text for answer in result.outputs) if tokens else ()
        return GridCell(answers, state, foot, "" if error is None else _cause(error))

    @cached_property
    def _shades(self) -> int:
        """How many alternatives each token is shaded with; 0: there are more tokens than a notebook should keep shaded."""
        if self.num_tokens > MOST_SHADED:
            return 0
        return kept_alternatives(root for result in self.result.results for root in result.tree.roots)

    def _counts(self) -> list[AnswerCount]:
        counts: list[AnswerCount] = []
        for result, params in zip(self.result, self._params, strict=True):
            limit = params.max_tokens
            begun = [
                AnswerCount(len(answer.token_ids), limit, answer.finished or result.finished)
                for answer in result.outputs
            ]
            counts += begun + [AnswerCount(0, limit, result.finished)] * (params.n - len(begun))
        return counts


class GridCellView:
    """The comparison as one output of the cell, replaced in place."""

    def __init__(self, shell: InteractiveShell, state: GridState, *, stream: bool) -> None:
        self.interval = UPDATE_SECONDS
        self._state = state
        self._stream = stream
        self._live = LiveDisplay(shell)
        self._html = GridHtml(state.layout)
        self._draw()

    def update(self, changed: Iterable[int]) -> None:
        """Replace the grid where something has changed, and set the pace by what that cost."""
        changed = list(changed)
        self._state.take(changed)
        if changed:
            self._draw()

    def finish(self, note: str = "") -> None:
        """Replace the grid by its final form."""
        state = self._state
        cells = [state.final_cell(index) for index in range(len(state.cells))]
        notes = [*state.notes, *filter(None, [state.shading_note, note])]
        bundle = {
            "text/plain": final_text(state.layout, cells, state.foot, notes),
            "text/html": self._html.final(state.foot, cells, notes),
        }
        self._live.show(bundle)

    def _draw(self) -> None:
        started = time.perf_counter()
        state = self._state
        fraction = state.num_ended / state.num_answers
        html = self._html.live(state.head, fraction, state.cells if self._stream else [])
        size = self._live.show({"text/plain": live_text(state.head, state.cells), "text/html": html})
        self.interval = pause_after(size, time.perf_counter() - started)


class GridTerminalView:
    """Each answer printed when it and all before it are complete; meanwhile one line says how far everything is."""

    interval = UPDATE_SECONDS

    def __init__(self, state: GridState) -> None:
        self._state = state
        self._printed = 0

    def update(self, changed: Iterable[int]) -> None:
        """Print what has become complete."""
        self._state.take(changed)
        self._print(complete_only=True)
        if sys.stdout.isatty() and self._printed < len(self._state.cells):
            print(f"{_ERASE_LINE}\x1b[2m[{self._state.head}]\x1b[0m", end="", flush=True)

    def finish(self, note: str = "") -> None:
        """Print the rest and the sums."""
        self._print(complete_only=False)
        for line in (self._state.foot, *self._state.notes, note):
            if line:
                print_quietly(line)

    def _print(self, *, complete_only: bool) -> None:
        state = self._state
        for index in range(self._printed, len(state.cells)):
            if complete_only and not state.result[index].finished:
                break
            if sys.stdout.isatty():
                print(_ERASE_LINE, end="")
            print(harmless(cell_text(state.layout.label(index), state.final_cell(index))) + "\n")
            self._printed = index + 1


class SilentGridView:
    """Nothing is shown: the answers are asked for later."""

    interval = UPDATE_SECONDS

    def update(self, changed: Iterable[int]) -> None:
        """Show nothing."""

    def finish(self, note: str = "") -> None:
        """Show nothing."""


def grid_view_for(
    shell: InteractiveShell, plan: ComparisonPlan, params: Sequence[SamplingParams]
) -> Callable[[ComparisonResult], GridView]:
    """What makes the view of the running cell. In a terminal a background grid would run into what is being typed."""

    def view_of(result: ComparisonResult) -> GridView:
        state = GridState(plan, params, result)
        if in_kernel(shell):
            return GridCellView(shell, state, stream=plan.options.stream)
        return SilentGridView() if plan.options.background else GridTerminalView(state)

    return view_of


def _label(setting: object) -> str:
    if isinstance(setting, float):
        return f"{setting:g}"
    return setting if isinstance(setting, str) else repr(setting)


def _num_tokens(result: GenerationResult) -> int:
    return sum(len(answer.token_ids) for answer in result.outputs)


def _cause(error: Exception) -> str:
    # An engine's end is raised, with its cause: each of its requests need not tell it again.
    return "the engine ended" if isinstance(error, EngineEndError) else str(error)


def _formatted(text: str, output_format: str) -> str:
    if output_format == "json":
        return pretty_json(text)[0]
    return unfenced(text)[0] if output_format == "code" else text


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
