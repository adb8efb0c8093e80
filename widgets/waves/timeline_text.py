"""A wave timeline as text: each engine core is a row, each moment a character."""

from __future__ import annotations

from nbengine.widgets.waves.timeline import RankSpan, WaveTimeline

COLUMNS = 64
_STEPS, _BOTH, _DUMMY, _PAUSED, _ABSENT = "█▒░· "


def text_timeline(timeline: WaveTimeline) -> str:
    """Render the whole timeline."""
    if not timeline.spans:
        return f"{summary(timeline)}: nothing was published"
    labels = {rank: f"rank {rank}" for rank in timeline.ranks}
    width = max(len("waves"), *map(len, labels.values()))
    rows = [_row("", _axis(timeline), width)]
    if timeline.lock_step:
        rows.append(_row("waves", _waves(timeline), width))
    for rank, label in labels.items():
        cells = "".join(_cell(state) for state in timeline.columns(rank, COLUMNS))
        rows.append(_row(label, f"{cells}  {totals(timeline, rank)}", width))
    legend = f"{_STEPS} steps  {_PAUSED} idle"
    if timeline.lock_step:
        legend = f"{_STEPS} steps  {_BOTH} both  {_DUMMY} dummy steps  {_PAUSED} paused"
    return "\n".join([summary(timeline), *rows, _row("", legend, width)])


def summary(timeline: WaveTimeline) -> str:
    """Describe the timeline in one line: the engine, the number of engine cores, the duration, the waves."""
    count = len(timeline.ranks)
    cores = f"{count} engine core{'' if count == 1 else 's'}"
    kind = f"{cores} in lock step" if timeline.lock_step else cores
    waves = timeline.waves
    numbers = ""
    if waves:
        first, last = waves[0].number, waves[-1].number
        numbers = f", wave {first}" if first == last else f", waves {first} to {last}"
    return f"engine {timeline.engine}: {kind}, {moment(timeline, 1.0)}{numbers}"


def totals(timeline: WaveTimeline, rank: int) -> str:
    """Describe all that an engine core did."""
    total = timeline.total(rank)
    parts = [f"{total.steps:,.0f} steps"]
    if total.prefill_steps:
        parts.append(f"{total.prefill_steps:,.0f} with prefill")
    if total.recompute_steps:
        parts.append(f"{total.recompute_steps:,.0f} with recomputation")
    if timeline.lock_step:
        parts.append(f"{total.dummy_steps:,.0f} dummy")
    parts.append(f"at most {total.num_requests} request{'' if total.num_requests == 1 else 's'}")
    return ", ".join(parts)


def moment(timeline: WaveTimeline, share: float) -> str:
    """Format the time after a share of the timeline, as exactly as its length calls for."""
    return f"{timeline.seconds * share:.{2 if timeline.seconds < 2 else 1}f} s"


def _row(label: str, text: str, width: int) -> str:
    return f"{label:<{width}}  {text}".rstrip()


def _axis(timeline: WaveTimeline) -> str:
    middle, end = moment(timeline, 0.5), moment(timeline, 1.0)
    left = "0 s".ljust(COLUMNS // 2) + middle
    return left.ljust(COLUMNS - len(end)) + end


def _waves(timeline: WaveTimeline) -> str:
    """Write the number of each wave where it begins, as far as there is room."""
    line = [" "] * COLUMNS
    free = 0
    for wave in timeline.waves:
        column = min(COLUMNS - 1, int(wave.start / timeline.seconds * COLUMNS))
        text = f"|{wave.number}"
        if column >= free and column + len(text) <= COLUMNS:
            line[column : column + len(text)] = text
            free = column + len(text) + 1
    return "".join(line)


def _cell(state: RankSpan | None) -> str:
    if state is None:
        return _ABSENT
    if state.dummy_steps:
        return _BOTH if state.steps else _DUMMY
    return _STEPS if state.steps else _PAUSED
