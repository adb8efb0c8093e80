"""The history of an engine's figures, a row an interval, as its host keeps it and as it is read.

`HistoryRow` is one row, on the wire, too; `MetricsHistory` is what a reader gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from nbengine.checks import require, require_number
from nbengine.metrics.frames import frame_of

HOUR, DAY = 3600, 86400
FINE, COARSE = 1, 10
"""Seconds of a row: fine ones reach back an hour, coarse ones a day."""
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": HOUR, "d": DAY}
_SPAN = rf"(?P<number>\d{{1,9}}(?:\.\d{{1,9}})?)\s*(?P<unit>{'|'.join(filter(None, _UNITS))})?"


class HistoryRow(msgspec.Struct, array_like=True, gc=False):
    """The figures of one engine core in one interval, which begins at `start` on the clock of the host.

    `running`, `waiting` and `kv_usage` are the most at one time. The fields that end in `_after` are the
    state at the end of the interval, which lasts until the next row; None: nothing is known from there on.
    """

    rank: int
    start: int
    seconds: float
    time: float
    """The beginning as `time.time()`."""
    generation_tokens: int = 0
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    itl_p99: float | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    running_after: int | None = None
    waiting_after: int | None = None
    kv_usage_after: float | None = None

    @property
    def end(self) -> float:
        """Return the end of the interval, on the clock of the host."""
        return self.start + self.seconds

    @property
    def state_after(self) -> tuple[int, int, float] | None:
        """Return the requests that run and wait and the use of the KV cache after the interval, if known."""
        if self.running_after is None or self.waiting_after is None or self.kv_usage_after is None:
            return None
        return self.running_after, self.waiting_after, self.kv_usage_after

    def as_dict(self) -> dict[str, Any]:
        """Return the row as people read it: rates a second, shares from 0 to 1, times in seconds."""
        queries = self.prefix_cache_queries
        return {
            "time": self.time,
            "seconds": self.seconds,
            "rank": self.rank,
            "tokens_per_second": self.generation_tokens / self.seconds,
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
            "ttft_p50": self.ttft_p50,
            "ttft_p95": self.ttft_p95,
            "ttft_p99": self.ttft_p99,
            "itl_p50": self.itl_p50,
            "itl_p95": self.itl_p95,
            "itl_p99": self.itl_p99,
            "running": self.running,
            "waiting": self.waiting,
            "kv_usage": self.kv_usage,
            "prefix_cache_hit_rate": self.prefix_cache_hits / queries if queries else None,
            "preemptions": self.preemptions,
            "generation_tokens": self.generation_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


COLUMNS = tuple(HistoryRow(0, 0, 1, 0.0).as_dict())
"""The names of the columns of `MetricsHistory.rows`."""
FIGURES = tuple(name for name in COLUMNS if name not in ("time", "seconds", "rank"))
"""Those that tell of an engine core's work."""


class MetricsHistory:
    """The figures of an engine over time, a row for each interval of each engine core, oldest first.

    A row is a second long, or ten where more than an hour is asked for. While nothing happens one row covers
    the whole time. Where no row is, nothing is known: the engine core or the host did not run. The newest row
    may be under way; `history[-1]` is that row, and a loop goes over all of them.

    Args:
        rows: what the host has kept; by rank, oldest first.
        since: the beginning of the time that was asked for, on the host's clock; `now` is its end.
    """

    def __init__(self, rows: Iterable[HistoryRow], since: float, now: float) -> None:
        self.since = since
        self.now = now
        by_rank: dict[int, list[HistoryRow]] = {}
        for row in rows:
            by_rank.setdefault(row.rank, []).append(row)
        found = [span for kept in by_rank.values() for span in _spans(kept, since, now)]
        self.spans = sorted(found, key=lambda span: (span.start, span.rank))
        """All rows as `HistoryRow`, those of idle times included."""

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the engine cores that have rows."""
        return sorted({span.rank for span in self.spans})

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows: `time` (seconds since 1970), `seconds`, `rank`, and the figures of the interval.

        `tokens_per_second` are sampled tokens, `ttft_p95` and its like percentiles of the seconds to the first
        token, `itl_p95` of those between two tokens. A percentile is None where no request had its first
        token, or none ended. `running`, `waiting` and `kv_usage` are the most at one time.
        """
        return [span.as_dict() for span in self.spans]

    def to_frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame.

        Raises:
            NotSupportedError: pandas is not installed.
        """
        return frame_of(self.rows())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.spans[index].as_dict()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.spans)

    def __repr__(self) -> str:
        return f"MetricsHistory({len(self)} rows, ranks {self.ranks})"


def seconds_of(last: object) -> float:
    """Return the seconds that "90s", "10m", "1h", "1d" or a number of seconds stand for.

    Raises:
        InvalidArgumentError: `last` is something else, not above 0, or more than a day.
    """
    allowed = "a number of seconds, or a text such as '90s', '10m', '1h' or '1d', above 0 and at most a day"
    if isinstance(last, str):
        match = re.fullmatch(_SPAN, last.strip())
        require("last", last, match is not None, allowed)
        assert match is not None
        seconds = float(match["number"]) * _UNITS[match["unit"] or ""]
    else:
        seconds = require_number("last", last)
    require("last", last, 0 < seconds <= DAY, allowed)
    return seconds


def width_of(last: float) -> int:
    """Return the seconds of a row where the last `last` seconds are asked for."""
    return FINE if last <= HOUR else COARSE


def _spans(kept: list[HistoryRow], since: float, now: float) -> Iterator[HistoryRow]:
    """Yield the rows of one engine core, and one for each time between two of them of which the state is known."""
    for row, following in pairwise([*kept, None]):
        assert row is not None
        if row.end > since:
            yield row
        end = now if following is None else following.start
        start = max(int(row.end), int(since))
        state = row.state_after
        if state is not None and start < end:
            running, waiting, usage = state
            yield HistoryRow(
                row.rank,
                start,
                end - start,
                row.time + start - row.start,
                running=running,
                waiting=waiting,
                kv_usage=usage,
                running_after=running,
                waiting_after=waiting,
                kv_usage_after=usage,
            )
