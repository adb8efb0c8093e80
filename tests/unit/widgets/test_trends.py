"""Slices of a history hold what its rows hold, and a gap is a gap in table, text and picture."""

from __future__ import annotations

import math
import re
import sys
import types
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.metrics.history import HistoryRow, MetricsHistory
from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.pictures.svg_parts import WIDTH
from nbengine.widgets.pictures.text import cells
from nbengine.widgets.pictures.trends import Trends
from nbengine.widgets.pictures.trends_view import MAX_RANKS, _draw, history_bundle
from tests.support.thorough import amount
from tests.unit.widgets.pictures import SVG, strokes_in, texts_fit


def row(
    start: int, tokens: int = 0, *, rank: int = 0, seconds: float = 1, known: bool = True, **figures
) -> HistoryRow:
    """A row of an engine core that rests afterwards, or (not `known`) is gone."""
    after = (0, 0, 0.0) if known else (None, None, None)
    kept = HistoryRow(rank, start, seconds, 1e9 + start, tokens, **figures)
    kept.running_after, kept.waiting_after, kept.kv_usage_after = after
    return kept


ROWS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 99), st.booleans(), st.none() | st.floats(0.001, 9)),
    min_size=1,
    max_size=20,
)


@given(ROWS, st.integers(1, 50), st.floats(0.5, 20))
@settings(max_examples=amount(50, thorough=5000), deadline=None)
def test_tokens_gaps_and_peaks_of_slices_are_those_of_the_rows(
    steps: list[tuple[int, int, bool, float | None]], most: int, rest: float
) -> None:
    start, kept = 1000, []
    for pause, tokens, known, ttft in steps:
        kept.append(row(start, tokens, known=known, ttft_p95=ttft, running=tokens % 7))
        start += pause
    now = kept[-1].end + rest
    slices = Trends(MetricsHistory(kept, 0, now)).of_rank(0, most)
    assert 1 <= len(slices) <= most
    width = (now - 1000) / len(slices)
    assert math.fsum(part.tokens_per_second * part.known for part in slices) == pytest.approx(
        sum(tokens for _, tokens, _, _ in steps)
    )
    assert max(part.running for part in slices) == max(each.running for each in kept)
    latencies = [each.ttft_p95 for each in kept if each.ttft_p95 is not None]
    assert max((part.ttft_p95 for part in slices if part.ttft_p95 is not None), default=None) == max(
        latencies, default=None
    )
    unknown = [
        (this.end, following)
        for this, following in zip(kept, [*(each.start for each in kept[1:]), now], strict=True)
        if this.state_after is None and following > this.end
    ]
    for index, part in enumerate(slices):
        begin, end = 1000 + index * width, 1000 + (index + 1) * width
        missing = sum(max(0.0, min(end, right) - max(begin, left)) for left, right in unknown)
        assert part.known == pytest.approx(width - missing, abs=1e-6)
        if missing > 1e-3:
            assert part.is_gap


def test_the_slices_of_all_engine_cores_are_equally_long_and_have_what_prompts_took() -> None:
    found = {"prompt_tokens": 40, "prefix_cache_queries": 40, "prefix_cache_hits": 10}
    kept = [row(100, 20, ttft_p99=0.5, **found), row(100, seconds=10, rank=1)]
    trends = Trends(MetricsHistory(kept, 0, 110.0))
    busy, resting = (trends.of_rank(rank, 5) for rank in trends.ranks)
    assert [part.time for part in busy] == [part.time for part in resting]
    assert (busy[0].prompt_tokens_per_second, busy[0].ttft_p99) == (20.0, 0.5)
    assert (busy[0].prefix_cache_queries, busy[0].prefix_cache_hits) == (40.0, 10.0)
    assert busy[1].prompt_tokens_per_second == resting[0].prefix_cache_queries == 0.0


def test_a_gap_is_marked_in_every_form_and_rest_is_not() -> None:
    kept = [row(100, 50, ttft_p95=0.25, ttft_p50=0.125), row(120, 50, known=False), row(150, 50)]
    plain, html = history_bundle("e", MetricsHistory(kept, 0, 160.0))
    lines = plain.splitlines()
    tokens = next(line for line in lines if line.startswith("tokens/s "))
    bars = re.sub(r"  ≤.*", "", tokens.removeprefix("tokens/s").strip())
    assert bars == "█" + "▁" * 19 + "█" + "░" * 29 + "█" + "▁" * 9
    assert sum(line.split()[1] == "gap" for line in lines if re.match(r"\d\d:", line)) == 4
    assert html.count('<td style="text-align:left">gap</td>') == 4
    assert "░ marks a gap" in plain
    rest, _ = history_bundle("e", MetricsHistory([row(100, 50)], 0, 160.0))
    assert "gap" not in rest
    assert "░" not in rest


def test_the_picture_is_well_formed_fits_and_has_each_gap_and_each_value() -> None:
    kept = [row(100, 50, ttft_p95=0.25, itl_p50=0.01, preemptions=2), row(120, 9, known=False), row(150, 70)]
    slices = Trends(MetricsHistory(kept, 0, 160.0)).of_rank(0, 60)
    picture = ElementTree.fromstring(_draw("rank 0", slices))
    assert texts_fit(picture)
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles.count("gap") == 6 * 29
    (tokens,) = [group for group in picture.iter(f"{SVG}g") if group[0].text == "tokens/s: generated"]
    heights = [float(height) for height in re.findall(r"v(-[\d.]+)", tokens[1].get("d", ""))]
    assert [height / heights[-1] for height in heights] == pytest.approx([50 / 70, 9 / 70, 1], abs=0.01)


def test_requests_that_wait_stand_upon_those_that_run() -> None:
    slices = Trends(MetricsHistory([row(100, 1, running=4, waiting=2)], 0, 100.5)).of_rank(0, 60)
    picture = ElementTree.fromstring(_draw("", slices))
    waiting, running = (
        next(stroke for stroke in strokes_in(picture) if stroke.color == ROLES[role] and stroke.x > WIDTH / 2)
        for role in ("waiting", "running")
    )
    assert running.length == pytest.approx(2 * waiting.length, abs=0.2)
    assert waiting.y == pytest.approx(running.y - running.length, abs=0.2)


def test_hostile_names_stay_text_and_many_engine_cores_are_counted() -> None:
    kept = [row(100, 5, rank=rank) for rank in range(MAX_RANKS + 3)]
    plain, html = history_bundle("<script>&", MetricsHistory(kept, 0, 130.0))
    assert "<script" not in html
    assert html.count("<img") == MAX_RANKS
    assert "3 more engine cores: `%engine history --rank R` shows one" in plain
    assert max(cells(line) for line in plain.splitlines()) <= 110


def test_rows_and_frames_have_the_named_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    history = MetricsHistory(
        [row(100, 50, seconds=10, prefix_cache_queries=4, prefix_cache_hits=1)], 0, 105.0
    )
    (only,) = history.rows()
    named = {"time", "tokens_per_second", "ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "running", "waiting"}
    assert named | {"kv_usage", "preemptions", "rank"} <= only.keys()
    assert (only["tokens_per_second"], only["seconds"], only["prefix_cache_hit_rate"]) == (5.0, 10, 0.25)
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda rows: ("frame", rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert history.to_frame() == ("frame", history.rows())
