"""The history that an engine's host has kept, for a dashboard's script: an hour or a day, in slices.

The answer to `{"kind": "history", "last": "1h"}` is
```
{"kind": "history", "last": "1h", "error": null, "begin": 1700000000.0, "end": 1700003600.0,
 "ranks": [{"rank": 0, "seconds": 10.0, "gap": [0, 1, ...], "tokens_per_second": [...],
            "prompt_tokens_per_second": [...], "ttft_p50": [...], "ttft_p95": [...], "ttft_p99": [...],
            "itl_p50": [...], "itl_p95": [...], "itl_p99": [...], "running": [...], "waiting": [...],
            "kv_usage": [...], "preemptions": [...], "prefix_cache_queries": [...], "prefix_cache_hits": [...]}]}
```
Slice `i` begins at `begin + i * seconds`; the slices of all ranks are equally long. Where `gap` is 1, nothing is known
of the slice or of a part of it. Times are seconds of `time.time()`, percentiles seconds, or null where no request had any. `error` says
why there is no history; `ranks` is empty then.
"""

from __future__ import annotations

from nbengine.metrics.history import MetricsHistory
from nbengine.widgets.pictures.trends import Slice, Trends

LASTS = ("1h", "1d")
"""The times that a script may ask for."""
MOST_SLICES = 360
"""The most slices of an engine core, and `MOST_VALUES` those of all of them together."""
MOST_VALUES = 2880
FIGURES = {
    "tokens_per_second": 2,
    "prompt_tokens_per_second": 2,
    "ttft_p50": 6,
    "ttft_p95": 6,
    "ttft_p99": 6,
    "itl_p50": 6,
    "itl_p95": 6,
    "itl_p99": 6,
    "running": 0,
    "waiting": 0,
    "kv_usage": 4,
    "preemptions": 0,
    "prefix_cache_queries": 2,
    "prefix_cache_hits": 2,
}
"""The figures of a slice, and their digits."""


def refusal(last: str, error: str) -> dict[str, object]:
    """Make the answer that says why there is no history."""
    return {"kind": "history", "last": last, "error": error, "begin": None, "end": None, "ranks": []}


def answer(last: str, history: MetricsHistory) -> dict[str, object]:
    """Make the answer of a history, in slices that are all equally long."""
    trends = Trends(history)
    most = min(MOST_SLICES, max(1, MOST_VALUES // max(1, len(trends.ranks))))
    begin: float | None = None
    ranks: list[dict[str, object]] = []
    for rank in trends.ranks:
        slices = trends.of_rank(rank, most)
        if begin is None and slices:
            begin = slices[0].time
        ranks.append({"rank": rank, "seconds": trends.seconds / max(1, len(slices)), **_columns(slices)})
    if begin is None:
        return refusal(last, "the engine has told nothing in this time")
    end = begin + trends.seconds
    return {"kind": "history", "last": last, "error": None, "begin": begin, "end": end, "ranks": ranks}


def _columns(slices: list[Slice]) -> dict[str, object]:
    columns: dict[str, object] = {"gap": [int(part.is_gap) for part in slices]}
    for name, digits in FIGURES.items():
        values = [getattr(part, name) if part.known else None for part in slices]
        columns[name] = [None if value is None else round(value, digits) for value in values]
    return columns
