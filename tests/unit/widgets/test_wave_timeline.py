"""Snapshots tell what engine cores did: it is counted once, in the right wave, and drawn where it
happened."""

from __future__ import annotations

import random
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats
from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.waves.timeline import RankSpan, Span, WaveRecorder, WaveSpan, WaveTimeline
from nbengine.widgets.waves.timeline_text import COLUMNS
from tests.support.thorough import some

SVG = "{http://www.w3.org/2000/svg}"


def core(
    rank: int, steps: int, dummies: int = 0, requests: int = 0, reading: int = 0, again: int = 0
) -> SchedulerStats:
    """Make the statistics of an engine core in lock step, whose step counter begins again with each wave."""
    return SchedulerStats(
        engine_index=rank,
        num_running_reqs=requests,
        step_counter=(steps + dummies) % 7,
        num_dummy_steps=dummies,
        workers=[WorkerStats(0, 1, steps)],
        num_prefill_steps=reading,
        num_recompute_steps=again,
    )


def snapshot(moment: float, wave: int, running: bool, *cores: SchedulerStats) -> EngineStats:
    return EngineStats(list(cores), wave, running, moment)


@pytest.fixture
def two_waves() -> WaveTimeline:
    """Wave 4: rank 0 works throughout, rank 1 only in its first half. A pause. Wave 5: rank 1 alone has work."""
    recorder = WaveRecorder("moe", lock_step=True)
    for stats in (
        snapshot(10.0, 4, False, core(0, 100, 7), core(1, 50, 9)),
        snapshot(11.0, 4, True, core(0, 100, 7, 1), core(1, 50, 9, 1)),
        snapshot(12.0, 4, True, core(0, 200, 7, 1), core(1, 150, 9)),
        snapshot(13.0, 4, True, core(0, 300, 7), core(1, 150, 109)),
        snapshot(14.0, 5, False, core(0, 300, 27), core(1, 150, 129)),
        snapshot(15.0, 5, True, core(0, 300, 27), core(1, 150, 129, 3)),
        snapshot(16.0, 6, False, core(0, 300, 127), core(1, 250, 129)),
    ):
        recorder.take(stats)
    return recorder.timeline(18.0)


def test_steps_and_waves_are_those_of_the_snapshots(two_waves: WaveTimeline) -> None:
    assert two_waves.seconds == 8.0
    assert two_waves.waves == [WaveSpan(4, 1.0, 4.0), WaveSpan(5, 5.0, 6.0)]
    assert two_waves.total(0) == RankSpan(200, 120, 6, True, 1)
    assert two_waves.total(1) == RankSpan(200, 120, 6, True, 3)
    running = [span.ranks[0].is_running for span in two_waves.spans]
    assert running == [False, True, True, True, False, True, False]


def test_the_text_has_a_character_a_moment(two_waves: WaveTimeline) -> None:
    head, axis, waves, first, second, legend = str(two_waves).splitlines()
    assert head == "engine moe: 2 engine cores in lock step, 8.0 s, waves 4 to 5"
    assert axis.split() == ["0", "s", "4.0", "s", "8.0", "s"]
    assert legend.split() == ["█", "steps", "▒", "both", "░", "dummy", "steps", "·", "paused"]
    eighth = COLUMNS // 8
    cells = [re.sub(r"^rank \d  ", "", row)[:COLUMNS] for row in (first, second)]
    assert cells[0] == "".join(character * eighth for character in "·██░·░··")
    assert cells[1] == "".join(character * eighth for character in "·█░░·█··")
    assert first.endswith("200 steps, 120 dummy, at most 1 request")
    assert waves.index("|4") - 8 == eighth
    assert waves.index("|5") - 8 == 5 * eighth


def test_steps_that_are_reported_when_the_wave_is_over_belong_to_it() -> None:
    recorder = WaveRecorder("moe", lock_step=True)
    recorder.take(snapshot(1.0, 0, True, core(0, 0)))
    recorder.take(snapshot(2.0, 1, False, core(0, 10)))
    recorder.take(snapshot(3.0, 1, False, core(0, 10, 22, reading=4, again=2)))
    timeline = recorder.timeline()
    assert timeline.waves == [WaveSpan(0, 0.0, 1.0)]
    assert [(span.ranks[0].steps, span.ranks[0].dummy_steps) for span in timeline.spans] == [(10, 22), (0, 0)]
    assert [(span.ranks[0].prefill_steps, span.ranks[0].recompute_steps) for span in timeline.spans] == [
        (4, 2),
        (0, 0),
    ]


def test_an_engine_core_that_is_started_again_counts_from_the_start_and_one_that_joins_is_absent_before() -> (
    None
):
    recorder = WaveRecorder("dense", lock_step=False)
    plain = [
        SchedulerStats(0, 1, step_counter=500),
        SchedulerStats(0, 1, step_counter=520),
        SchedulerStats(0, 0, step_counter=5),
    ]
    recorder.take(EngineStats([plain[0]], timestamp=1.0))
    recorder.take(EngineStats([plain[1]], timestamp=2.0))
    recorder.take(EngineStats([plain[2], SchedulerStats(1, 4, 5, step_counter=3)], timestamp=3.0))
    timeline = recorder.timeline()
    assert timeline.total(0).steps == 25
    assert timeline.total(1) == RankSpan(3, 0, 0, True, 9, num_waiting=5)
    assert next(timeline.columns(1, 8)) is None
    text = str(timeline)
    assert "wave" not in text
    assert "dummy" not in text
    assert text.splitlines()[0] == "engine dense: 2 engine cores, 2.0 s"


def test_what_is_reported_late_within_a_wave_is_spread_over_the_time_that_it_took() -> None:
    recorder = WaveRecorder("moe", lock_step=True)
    for moment, steps in ((0.0, 0), (1.0, 10), (2.0, 10), (4.0, 40)):
        recorder.take(snapshot(moment, 0, True, core(0, steps, requests=1)))
    assert [span.ranks[0].steps for span in recorder.timeline().spans] == [10, 10, 20]


def test_of_the_time_between_a_break_and_the_next_snapshot_nothing_is_known() -> None:
    recorder = WaveRecorder("moe", lock_step=True)
    recorder.take(snapshot(10.0, 1, True, core(0, 0)))
    recorder.take(snapshot(11.0, 1, True, core(0, 100)))
    recorder.take(snapshot(12.0, 1, True, core(0, 100)))
    recorder.break_off()
    assert recorder.timeline(15.0).seconds == 2.0
    recorder.take(snapshot(60.0, 9, False, core(0, 5000)))
    recorder.take(snapshot(61.0, 9, False, core(0, 5001)))
    recorder.take(snapshot(62.0, 9, True, core(0, 5001)))
    recorder.take(snapshot(64.0, 9, True, core(0, 5300)))
    timeline = recorder.timeline()
    assert (timeline.began, timeline.seconds) == (10.0, 54.0)
    assert [(span.start, span.end, span.ranks[0].steps) for span in timeline.spans] == [
        (0.0, 1.0, 100),
        (1.0, 2.0, 0),
        (50.0, 51.0, 0),
        (51.0, 52.0, 0),
        (52.0, 54.0, 299),
    ]
    assert timeline.waves == [WaveSpan(1, 0.0, 2.0), WaveSpan(9, 52.0, 54.0)]
    assert list(timeline.columns(0, 54))[2:50] == [None] * 48


def test_what_is_reported_late_after_a_break_is_not_spread_to_before_it() -> None:
    recorder = WaveRecorder("moe", lock_step=True)
    recorder.take(snapshot(0.0, 0, True, core(0, 10)))
    recorder.take(snapshot(1.0, 0, True, core(0, 10)))
    recorder.break_off()
    recorder.take(snapshot(5.0, 0, True, core(0, 40)))
    recorder.take(snapshot(6.0, 0, True, core(0, 50)))
    assert [span.ranks[0].steps for span in recorder.timeline().spans] == [0, 10]


def test_a_snapshot_that_comes_twice_changes_nothing() -> None:
    recorder = WaveRecorder("moe", lock_step=True)
    for moment in (1.0, 2.0, 2.0, 1.5):
        recorder.take(snapshot(moment, 0, True, core(0, int(moment * 10))))
    assert len(recorder.timeline().spans) == 1


@pytest.mark.parametrize("seed", some(range(100), ordinary=30))
def test_totals_are_whole_however_late_the_reports_come(seed: int) -> None:
    # Of histories with any numbers of digits one in ten has shares whose sum is off by a rounding.
    chooser = random.Random(seed)
    recorder = WaveRecorder("moe", lock_step=True)
    moment, steps, reading = 1.0, 0, 0
    recorder.take(snapshot(moment, 0, True, core(0, steps)))
    for _ in range(12):
        moment, steps = (
            moment + chooser.uniform(0.001, 3),
            steps + chooser.choice([0, 0, chooser.randrange(50)]),
        )
        # The scheduler may count a step before the workers do.
        reading = min(steps + 1, reading + chooser.choice([0, 1, 3]))
        recorder.take(snapshot(moment, 0, True, core(0, steps, 2 * steps, reading=reading)))
    total = recorder.timeline().total(0)
    assert (total.steps, total.dummy_steps, total.prefill_steps) == (steps, 2 * steps, reading)


def test_before_the_first_snapshots_there_is_nothing_to_show() -> None:
    timeline = WaveRecorder("moe", lock_step=True).timeline(5.0)
    assert str(timeline) == "engine moe: 0 engine cores in lock step, 0.00 s: nothing was published"
    ElementTree.fromstring(timeline.svg())


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 3),
            st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=3),
            st.booleans(),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_columns_come_to_what_the_spans_have(parts: list[tuple[float, list[tuple[int, int]], bool]]) -> None:
    moment, spans = 0.0, []
    for seconds, ranks, running in parts:
        states = {rank: RankSpan(steps, dummies, 0, running) for rank, (steps, dummies) in enumerate(ranks)}
        spans.append(Span(moment, moment + seconds, states))
        moment += seconds
    timeline = WaveTimeline("moe", True, tuple(spans))
    for rank in timeline.ranks:
        columns = [state for state in timeline.columns(rank, 37) if state is not None]
        total = timeline.total(rank)
        assert sum(state.steps for state in columns) == pytest.approx(total.steps)
        assert sum(state.dummy_steps for state in columns) == pytest.approx(total.dummy_steps)
    for svg in (
        timeline.svg(),
        timeline.html().removeprefix('<div style="font-size:0">').partition("</div>")[0],
    ):
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for rect in root.iter(f"{SVG}rect"):
            x, y, wide, high = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
            assert wide >= 0
            assert high >= 0
            assert -0.1 <= x <= x + wide <= width + 0.1
            assert 0 <= y <= y + high <= height


def test_the_picture_has_a_bar_for_each_state_and_names_what_it_shows(two_waves: WaveTimeline) -> None:
    root = ElementTree.fromstring(two_waves.svg())
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert titles == [
        "wave 4: 1.00 s to 4.00 s",
        "wave 5: 5.00 s to 6.00 s",
        "rank 0: 200 steps, 120 dummy, at most 1 request",
        "rank 1: 200 steps, 120 dummy, at most 3 requests",
    ]
    (first, _) = (group for group in root.iter(f"{SVG}g") if group.get("data-rank") is not None)
    colors = [rect.get("fill") for rect in first.iter(f"{SVG}rect")]
    assert len(set(colors)) == 3, "steps, dummy steps, paused"
    description = root.find(f"{SVG}desc")
    assert description is not None
    assert description.text == str(two_waves)
    assert root.get("aria-label") == str(two_waves).splitlines()[0]


def test_a_hostile_name_stays_text() -> None:
    name = "</text></svg><script>alert(1)</script>"
    recorder = WaveRecorder(name, lock_step=True)
    recorder.take(snapshot(1.0, 0, True, core(0, 0)))
    recorder.take(snapshot(2.0, 1, False, core(0, 10)))
    bundle = recorder.timeline().bundle()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    assert "<script" not in bundle["text/html"] + bundle["image/svg+xml"]


def test_the_picture_has_the_dashboards_colours_and_shows_who_waits_and_who_was_preempted() -> None:
    recorder = WaveRecorder("dense", lock_step=False)
    for at, (running, waiting, preemptions) in enumerate([(1, 0, 0), (2, 3, 0), (2, 4, 2), (2, 4, 2)]):
        stats = SchedulerStats(0, running, waiting, num_preemptions=preemptions, step_counter=10 * at)
        stats.num_prefill_steps, stats.num_recompute_steps = min(5, 4 * at), preemptions
        recorder.take(EngineStats([stats], timestamp=float(at)))
    timeline = recorder.timeline()
    total = timeline.total(0)
    assert (total.num_requests, total.num_waiting, total.preemptions) == (6, 4, 2)
    assert (total.steps, total.prefill_steps, total.recompute_steps) == (30, 5, 2)
    svg = timeline.svg()
    colours = {
        colour for attribute in ("fill", "stroke") for colour in re.findall(f'{attribute}="(#.*?)"', svg)
    }
    roles = ("decode", "prefill", "recompute", "running", "waiting", "preempted", "free")
    assert colours == {ROLES[role] for role in roles}
    root = ElementTree.fromstring(svg)
    texts = {node.text for node in root.iter(f"{SVG}text")}
    assert {"decode steps", "with prefill", "with recomputation", "that wait", "preempted"} <= texts
    assert "30 steps, 5 with prefill, 2 with recomputation, at most 6 requests" in texts
    assert [state.preemptions for state in timeline.columns(0, 3) if state is not None] == [0, 2, 0]
    ticks = [
        path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("stroke") == ROLES["preempted"]
    ]
    assert sum(path.count("m") for path in ticks) == 2, "a tick for each preemption"
    # In each second, the parts of the bar are as high as the shares of the steps, and fill it.
    (row,) = (group for group in root.iter(f"{SVG}g") if group.get("data-rank") is not None)
    heights: dict[float, dict[str, float]] = {}
    for rect in row.iter(f"{SVG}rect"):
        heights.setdefault(float(rect.get("x", "")), {})[rect.get("fill", "")] = float(rect.get("height", ""))
    bars = [heights[x] for x in sorted(heights)]
    assert [set(bar) for bar in bars] == [
        {ROLES["decode"], ROLES["prefill"]},
        {ROLES["decode"], ROLES["prefill"], ROLES["recompute"]},
        {ROLES["decode"]},
    ]
    assert [round(sum(bar.values()), 1) for bar in bars] == [26.0] * 3
    assert bars[0][ROLES["prefill"]] == pytest.approx(26 * 0.4, abs=0.06)
