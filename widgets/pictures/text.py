"""The dashboard as text, for a terminal and for other places where no picture shows."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence

from nbengine.client.observe.process_usage import printable
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.blocks import BlockCells, cells_of
from nbengine.widgets.pictures.blocks import summary as blocks_summary
from nbengine.widgets.pictures.figures import (
    UNKNOWN,
    RequestRow,
    has_waves,
    header,
    mirrors,
    request_rows,
    title,
    waves,
)
from nbengine.widgets.pictures.loads import budget_title, loads_of
from nbengine.widgets.pictures.steps import StepRow, grid_of, last_steps
from nbengine.widgets.pictures.steps import summary as steps_summary

WIDTH = 100
MIN_WIDTH = 40
MAX_BLOCK_ROWS = 8
MAX_STEP_ROWS = 10
MAX_REQUEST_ROWS = 12
_LABEL = 11
_FIGURES = 25
_STEP_LABEL = 22
_TABLE = 79
"""The places of all columns but the request's name."""
_SPARKS = "▁▂▃▄▅▆▇█"
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CACHED, _FREE = "░", "·"
_KINDS = {PROMPT: "█", DECODE: "▄", RECOMPUTED: "▓", None: " "}
_HIT, _PREEMPTED, _ENDED = "◆", "×", "╷"


def text_dashboard(state: DashboardState, width: int = WIDTH) -> str:
    """Render the whole state; no line is wider than `width` (at least `MIN_WIDTH`)."""
    width = max(MIN_WIDTH, width)
    shown, note = mirrors(state)
    lines = _header(state, width)
    for rank, mirror in shown:
        prefix = f"rank {rank}: " if len(state.mirrors) > 1 else ""
        lines += ["", *_scheduler(mirror, prefix, width)]
        lines += ["", *_blocks(mirror, prefix, width, max(1, MAX_BLOCK_ROWS // len(shown)))]
        lines += ["", *_steps(mirror, prefix, width, max(1, MAX_STEP_ROWS // len(shown)))]
    if note:
        lines += ["", note]
    if has_waves(state):
        lines += ["", *str(waves(state)).splitlines()]
    lines += ["", *_requests(state, width)]
    return "\n".join(cut(line, width) for line in lines)


def cut(line: str, width: int) -> str:
    """Cut a line with an ellipsis if it takes more places than `width`."""
    line = line.rstrip()
    if cells(line) <= width:
        return line
    while cells(line) > width - 1:
        line = line[:-1]
    return line + "…"


def cells(text: str) -> int:
    """Count the places that a terminal needs for the text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def padded(text: str, width: int) -> str:
    """Cut or fill the text to exactly `width` places."""
    text = cut(text, width)
    return text + " " * (width - cells(text))


def _header(state: DashboardState, width: int) -> list[str]:
    model, facts = title(state)
    lines = [f"{model} · {facts} · {printable(state.state)}"]
    if state.note:
        lines.append(printable(state.note))
    line = ""
    for name, value in header(state):
        item = f"{name} {value}"
        if line and cells(f"{line}   {item}") > width:
            lines.append(line)
            line = ""
        line = f"{line}   {item}" if line else item
    return [*lines, line]


def _scheduler(mirror: TraceMirror, prefix: str, width: int) -> list[str]:
    places = width - _LABEL - _FIGURES
    loads = loads_of(mirror, places)
    steps = last_steps(mirror, places)
    prefills = [step.num_prefill_tokens for step in steps]
    decodes = [step.num_decode_tokens for step in steps]
    most = max((a + b for a, b in zip(prefills, decodes, strict=True)), default=0)
    budget = f"{mirror.max_num_batched_tokens:,}" if mirror.max_num_batched_tokens else UNKNOWN
    return [
        f"{prefix}{loads.title}, preempted {sum(loads.preempted):,}×",
        _spark_line("running", loads.running, places),
        _spark_line("waiting", loads.waiting, places),
        f"{prefix}{budget_title(steps)}, budget {budget}",
        _spark_line("prefill", prefills, places, most),
        _spark_line("decode", decodes, places, most),
    ]


def _spark_line(name: str, values: Sequence[int | None], places: int, most: int | None = None) -> str:
    known = [value for value in values if value is not None]
    end = f"  {known[-1]:,} of at most {max(known):,}" if known else ""
    return padded(f"  {name}", _LABEL) + padded(sparkline(values, places, most), places) + end


def sparkline(values: Sequence[int | None], places: int, most: int | None = None) -> str:
    """Draw one bar for each place, as high as the greatest of its values; a space where nothing is known.

    `most` is the value of a full bar; if it is None, the greatest value is.
    """
    top = max([1, most or 0, *(value or 0 for value in values)])
    count = min(places, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    return "".join(_spark(values[start:end], top) for start, end in itertools.pairwise(edges))


def _spark(values: Sequence[int | None], top: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return " "
    return _SPARKS[max(0, -(-max(known) * len(_SPARKS) // top) - 1)]


def _blocks(mirror: TraceMirror, prefix: str, width: int, max_rows: int) -> list[str]:
    lines, blocks = [f"{prefix}KV {blocks_summary(mirror)}"], mirror.blocks
    if not blocks.num_blocks:
        return lines
    columns = width - 2
    found = cells_of(blocks, columns * max_rows)
    text = "".join(_block(found, index) for index in range(len(found.total)))
    lines += [f"  {text[start : start + columns]}" for start in range(0, len(text), columns)]
    size = f", {found.blocks_per_cell:,} blocks each" if found.blocks_per_cell > 1 else ""
    return [
        *lines,
        f"  a-Z by request, 2-9 + number of holders, {_CACHED} cached and free, {_FREE} free{size}",
    ]


def _block(found: BlockCells, index: int) -> str:
    """Choose the sign of a cell: that of the most of its blocks."""
    held, cached, free = found.held[index], found.cached[index], found.free[index]
    if held and held >= max(cached, free):
        if found.shared[index] * 2 > held:
            references = int(found.most_references[index])
            return str(references) if references < 10 else "+"
        return letter(int(found.holder[index]))
    return _CACHED if cached >= free else _FREE


def letter(number: int) -> str:
    """Choose the letter of a request in the map of the blocks."""
    return _LETTERS[number % len(_LETTERS)] if number >= 0 else "?"


def _steps(mirror: TraceMirror, prefix: str, width: int, max_rows: int) -> list[str]:
    grid = grid_of(mirror, width - _STEP_LABEL - 1, max_rows)
    lines = [prefix + steps_summary(grid)]
    for row in grid.rows:
        request = mirror.requests.get(row.number) or mirror.finished.get(row.number)
        name = "" if request is None else printable(request.added.request_id)
        label = padded(f"  {letter(row.number)} #{row.number} {name}", _STEP_LABEL)
        lines.append(f"{label} {_step_cells(row)}")
    if grid.num_more:
        lines.append(f"  … and {grid.num_more:,} more")
    kinds = (
        f"{_KINDS[PROMPT]} prefill  {_KINDS[DECODE]} decode  {_KINDS[RECOMPUTED]} again, after a preemption"
    )
    marks = f"{_HIT} prefix hit  {_PREEMPTED} preempted  {_ENDED} ended"
    return [*lines, f"  {kinds}  {marks}"] if grid.rows else lines


def _step_cells(row: StepRow) -> str:
    line = [_KINDS[kind] for kind in row.kinds]
    for columns, mark in ((row.hits, _HIT), (row.preempted, _PREEMPTED)):
        for column in columns:
            line[column] = mark
    if row.finished is not None and row.finished + 1 < len(line):
        line[row.finished + 1] = _ENDED
    return "".join(line)


def _requests(state: DashboardState, width: int) -> list[str]:
    rows, num_more = request_rows(state, MAX_REQUEST_ROWS)
    if not rows:
        return ["no requests yet"]
    name_width = max(8, width - _TABLE)
    names = f"{'state':<9} {'progress':<15} {'prompt':>16} {'output':>7} {'first':>7} {'time':>12}"
    lines = [f"{'#':>6} {padded('request', name_width)} {names}"]
    lines += [_request(row, name_width, several=len(state.mirrors) > 1) for row in rows]
    return [*lines, f"… and {num_more:,} more"] if num_more else lines


def _request(row: RequestRow, name_width: int, *, several: bool) -> str:
    number = f"{row.rank}/{row.number}" if several else str(row.number)
    name = padded(f"● {row.name}" if row.is_own else row.name, name_width)
    filled = round(10 * row.done)
    bar = "█" * filled + "░" * (10 - filled)
    progress = f"{bar} {row.done:4.0%}" if row.whole else f"{bar}    {UNKNOWN}"
    return (
        f"{number:>6} {name} {padded(row.state, 9)} {progress:<15} {row.prompt:>16} {row.output:>7} "
        f"{row.first_token:>7} {row.total_time:>12}"
    )
