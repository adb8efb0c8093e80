"""One time in all panels: the axis of time, the crosshair, and earlier moments with all that belongs to them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from chromium import needs_chromium
from dashboard_frames import START, FakeEngine, Frame
from dashboard_page import DARK, LIGHT, DashboardPage
from notebook_support.dashboard_script import (
    AXIS,
    BLOCKS,
    GUTTER,
    TIMELINE,
    TIP,
    OpenPage,
    assert_color,
    cell,
    frame,
    hover,
    request,
    step,
    tile,
    word,
)
from playwright.sync_api import expect

from nbengine.widgets.dashboard.palette import CACHED_OPACITY, REQUESTS, ROLES

pytestmark = needs_chromium

CROSSES = """() => [...document.querySelectorAll('.nbe-crosshair')].filter((node) => !node.hidden).map((node) => {
    const stage = node.parentElement.getBoundingClientRect();
    return [node.closest('section').getAttribute('aria-label'), node.getBoundingClientRect().left - stage.left];
})"""


def at(content: Frame, seconds: float, **rates: float) -> Frame:
    """The frame as of some seconds after the start."""
    content[0]["time"] = START + seconds
    content[0]["rates"].update(rates)
    return content


def timed(number: int, seconds: float, **how: Any) -> list[Any]:
    """A step of a tenth of a second that begins some seconds after the start."""
    item = step(number, [0, 1, 0, -1], seconds=0.1, **how)
    item[1] = START + seconds
    return item


def place(page: DashboardPage, seconds: float, window: float = 10.0) -> float:
    """Return the place of a time on the timeline's canvas, of a window that begins at the start."""
    width = float(page.page.evaluate(f"document.querySelector('{TIMELINE}').clientWidth"))
    return GUTTER + seconds / window * (width - GUTTER)


def test_time_that_passes_without_steps_is_seen_and_what_is_not_known_is_marked(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = [word(1, False, 0)] * 10 + [word(0)] * 90
    first = frame(steps=[timed(1, 0.0), timed(2, 0.1)], requests=[request(0)], words=words, num_blocks=100)
    page.deliver(at(first, 3.0))
    page.deliver(at(frame(2, reset=False, steps=[timed(3, 4.0)], num_blocks=100), 5.0))
    later = frame(3, reset=False, steps=[timed(9, 8.0)], history_lost=True, num_blocks=100)
    page.deliver(at(later, 10.0))
    middle = AXIS + 9

    def look(seconds: float) -> tuple[int, ...]:
        return page.pixel(TIMELINE, place(page, seconds), middle)

    for seconds in (0.05, 0.15, 4.05, 8.05):
        assert_color(look(seconds), ROLES["decode"])
    assert page.text(".nbe-place").startswith("step 9 · ")
    assert hover(page, TIMELINE, place(page, 2.0), middle).split("\n")[1:] == ["no step ran"]
    assert hover(page, TIMELINE, place(page, 6.0), middle).split("\n")[1:] == [
        "nothing is known: steps were lost"
    ]
    assert hover(page, TIMELINE, place(page, 4.05), middle).startswith("step 3 · ")
    # Idle time is empty, unknown time is shaded.
    below = page.pixel(TIMELINE, place(page, 2.3), AXIS + 60)
    shaded = page.pixel(TIMELINE, place(page, 6.3), AXIS + 60)
    assert below[3] == 0
    assert shaded[3] > 20
    # So it is in the course of the cache, which has no holder there, and in a tile's, whose line has a gap.
    course, trend = ".nbe-course canvas", ".nbe-tile .nbe-trend canvas"
    wide, narrow = (
        float(page.page.evaluate(f"document.querySelector('{name}').clientWidth")) for name in (course, trend)
    )
    assert_color(page.pixel(course, 40 + 0.4 * (wide - 42), 32), REQUESTS[0])
    assert page.pixel(course, 40 + 0.2 * (wide - 42), 32)[3] == 0
    assert 20 < page.pixel(course, 40 + 0.7 * (wide - 42), 32)[3] < 60
    line = [page.pixel(trend, 1 + (seconds - 3) / 7 * (narrow - 2), 1)[3] for seconds in (4.0, 7.5)]
    assert line[0] > 20
    assert line[1] == 0
    # Steps of the same width, as an option, and back to the same time.
    page.page.get_by_label("Show steps, each as wide as the others").click()
    page.settle()
    width = float(page.page.evaluate(f"document.querySelector('{TIMELINE}').clientWidth"))
    assert hover(page, TIMELINE, width - 3, middle).startswith("step 9 · ")
    assert hover(page, TIMELINE, width - 9, middle).startswith("step 3 · ")
    page.page.wait_for_function("() => models[0].get('view').axis === 'steps'")
    page.page.get_by_label("Show time").click()
    page.settle()
    assert_color(look(4.05), ROLES["decode"])
    # At a moment of which nothing is known the figures are those of now, and say so.
    box = page.page.locator(TIMELINE).bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + place(page, 5.0), box["y"] + 60)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + place(page, 7.5), box["y"] + 60)
    page.page.mouse.up()
    page.settle()
    assert page.text(".nbe-moment") == "figures: live"


def test_a_crosshair_goes_through_all_panels(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    engine = FakeEngine(ranks=2, num_blocks=60)
    engine.run(300, arrivals=0.3)
    page.deliver(engine.frame(reset=True))
    assert page.page.evaluate(CROSSES) == []
    width = float(page.page.evaluate(f"document.querySelector('{TIMELINE}').clientWidth"))
    x = GUTTER + 0.75 * (width - GUTTER)
    page.page.hover(TIMELINE, position={"x": x, "y": AXIS + 5})
    page.settle()
    found = page.page.evaluate(CROSSES)
    names = sorted(name for name, _ in found)
    assert names == [
        "Data-parallel ranks",
        "KV blocks",
        "Scheduler",
        "Scheduler",
        "Step timeline",
    ] or names == [
        "Engine cores",
        "KV blocks",
        "Scheduler",
        "Scheduler",
        "Step timeline",
    ]
    # All of them are at the same share of their charts' widths.
    for selector, left in (
        (".nbe-scheduler canvas", 40),
        (".nbe-course canvas", 40),
        (TIMELINE, GUTTER),
        (".nbe-waves canvas", GUTTER),
    ):
        share = page.page.evaluate(
            """([selector, left]) => {
                const canvas = document.querySelector(selector);
                const line = canvas.parentElement.querySelector('.nbe-crosshair');
                const x = line.getBoundingClientRect().left - canvas.getBoundingClientRect().left;
                return (x - left) / (canvas.clientWidth - left);
            }""",
            [selector, left],
        )
        assert abs(share - 0.75) < 0.01, selector
    page.page.mouse.move(0, 0)
    page.settle()
    assert page.page.evaluate(CROSSES) == []


def test_what_the_pointer_is_on_is_told_anew_when_it_moves_on(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    page.deliver(frame(steps=[step(number, [0, 1, 0, -1]) for number in range(1, 51)]))
    width = float(page.page.evaluate(f"document.querySelector('{TIMELINE}').clientWidth"))
    assert hover(page, TIMELINE, width - 3, AXIS + 9).startswith("step 50 · ")
    page.deliver(frame(2, reset=False, steps=[step(51), step(52)]))
    assert page.text(TIP).startswith("step 52 · ")


def test_an_earlier_moment_has_its_figures_its_blocks_and_its_requests(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    early, late = request(0), request(1, added_at=START + 5)
    page.deliver(
        at(
            frame(
                steps=[timed(1, 0.5)],
                words=[word(1, False, 0), word(0), word(0)],
                requests=[early | {"num_output_tokens": 5}],
                num_blocks=3,
                num_free_blocks=2,
            ),
            1.0,
            tokens_out_per_second=100.0,
        )
    )
    steps = [timed(number, 0.5 + number) for number in range(2, 9)]
    page.deliver(
        at(
            frame(
                2,
                reset=False,
                steps=steps,
                changed={0: word(0, True, 0), 2: word(1, False, 1)},
                requests=[early | {"state": "finished", "finish_reason": "stop", "ended_at": START + 6,
                                   "num_output_tokens": 40}, late],
                num_blocks=3,
                num_free_blocks=2,
            ),
            10.0,
            tokens_out_per_second=200.0,
        )
    )  # fmt: skip
    rows = page.page.locator(".nbe-table tbody tr")

    def outputs() -> list[str]:
        return [text.strip() for text in rows.locator(".nbe-cell-output").all_inner_texts()]

    def assert_now() -> None:
        assert tile(page, "tokens out") == "200/s"
        assert_color(page.pixel(BLOCKS, *cell(page, 0)), ROLES["cached"], CACHED_OPACITY)
        assert_color(page.pixel(BLOCKS, *cell(page, 2)), REQUESTS[1])
        assert outputs() == ["5 / 50", "40 / 50"]
        assert page.page.locator(".nbe-live:visible").count() == 0

    assert_now()
    # Half a second before the second frame, only what the first one has told is known.
    page.page.locator(".nbe-slider").fill("7")
    page.settle()
    assert page.text(".nbe-moment").startswith("as of ")
    assert tile(page, "tokens out") == "100/s"
    assert_color(page.pixel(BLOCKS, *cell(page, 0)), REQUESTS[0])
    assert page.text(".nbe-blocks .nbe-now") == "1 held · 0 shared · 0 cached · 2 free"
    assert outputs() == ["5 / 50"]
    assert rows.locator(".nbe-request-state").all_inner_texts() == ["running"]
    assert page.page.locator(".nbe-abort:visible").count() == 0
    assert page.text(".nbe-scheduler .nbe-now") == "1 running · 0 waiting"
    assert page.page.locator(".nbe-live:visible").count() == 0
    # Before the first frame nothing is known but the steps: what cannot go back says so.
    page.page.locator(".nbe-slider").fill("1")
    page.settle()
    assert page.text(".nbe-moment") == "figures: live"
    assert (
        page.page.locator(".nbe-blocks .nbe-live, .nbe-requests .nbe-live").all_inner_texts() == ["live"] * 2
    )
    assert_color(page.pixel(BLOCKS, *cell(page, 0)), ROLES["cached"], CACHED_OPACITY)
    page.page.get_by_label("Go on live").click()
    page.settle()
    assert_now()
    # The newest output is that of the moment, whether the text alone is another one now or the counts are, too.
    content, buffers = frame(3, reset=False, steps=[timed(9, 10.5), timed(10, 11.5)])
    content["ranks"][0]["requests"] = {"gone": [], "new": [], "status": [], "progress": [1, 90, 12]} | {
        "texts": [[0, "the end"], [1, "a sea of sand"]]
    }
    page.deliver(at((content, buffers), 12.0))
    newest = rows.locator(".nbe-preview")
    assert newest.all_inner_texts() == ["a sea of sand", "the end"]
    page.page.locator(".nbe-slider").fill("9")
    page.settle()
    assert outputs() == ["5 / 50", "40 / 50"]
    assert newest.all_inner_texts() == ["–", "–"]


def test_the_bar_has_each_requests_share_of_the_cache(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = [word(1, False, 0)] * 50 + [word(1, False, 1)] * 25 + [word(0, True, 1)] * 15 + [word(0)] * 10
    # Where its words are not known, a request has its id.
    requests = [request(0, preview=""), request(1, preview="Name a sea")]
    page.deliver(frame(words=words, requests=requests, num_blocks=100))
    bar = ".nbe-occupancy canvas"
    width = float(page.page.evaluate(f"document.querySelector('{bar}').clientWidth"))
    assert_color(page.pixel(bar, 0.25 * width, 7), REQUESTS[0])
    assert_color(page.pixel(bar, 0.6 * width, 7), REQUESTS[1])
    told = [hover(page, bar, part * width, 7).split("\n") for part in (0.25, 0.6, 0.8, 0.95)]
    assert told == [
        ["#0 cmpl-0", "taken by it last: 50 blocks, 50 %"],
        ["#1 Name a sea", "taken by it last: 25 blocks, 25 %"],
        ["cached, free", "15 blocks, 15 %"],
        ["free", "10 blocks, 10 %"],
    ]
    # By the keyboard, too, which says it.
    page.page.mouse.move(0, 0)
    page.page.focus(bar)
    said = page.page.locator(".nbe-announcer")
    for key, part in (("ArrowRight", 0), ("ArrowRight", 1), ("End", 3), ("ArrowLeft", 2), ("Home", 0)):
        page.page.keyboard.press(key)
        assert page.text(TIP).split("\n") == told[part]
    expect(said).to_have_text(", ".join(told[0]))
    # What is at the cursor is told again when it changes.
    page.deliver(frame(2, reset=False, changed=dict.fromkeys(range(20), word(1, False, 1)), num_blocks=100))
    assert page.text(TIP).split("\n") == ["#0 cmpl-0", "taken by it last: 30 blocks, 30 %"]
    page.page.keyboard.press("Escape")
    assert page.page.locator(TIP).count() == 0


def mark_place(page: DashboardPage) -> list[int]:
    """Return where the mark of the map's block is, and the size of a block."""
    script = "(node) => [node.offsetLeft, node.offsetTop, node.offsetWidth - 1]"
    place: list[int] = page.page.locator(".nbe-cell-mark").evaluate(script)
    return place


def test_a_map_of_a_large_cache_shows_the_part_that_is_in_use(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = np.full(60_000, word(0), np.uint32)
    words[:40] = word(1, False, 0)
    page.deliver(frame(words=words.tolist()))
    assert "blocks 0 to 63 of 60,000" in page.text(".nbe-blocks .nbe-legend")
    assert_color(page.pixel(BLOCKS, *cell(page, 39)), REQUESTS[0])
    x, y = (side + 2 for side in cell(page, 50))
    assert hover(page, BLOCKS, x, y).startswith("block 50: free")
    # A part that is larger has other cells: the pointer is on another block, and the keyboard's block at another place.
    top_of_map = f"document.querySelector('{BLOCKS}').getBoundingClientRect().top"
    y += page.page.evaluate(top_of_map)
    page.deliver(frame(2, reset=False, changed={5000: word(1, False, 0)}))
    page.settle()
    width = page.page.evaluate(f"document.querySelector('{BLOCKS}').clientWidth")
    y -= page.page.evaluate(top_of_map)
    left, top, size = mark_place(page)
    assert size < 26
    assert (left, top) == (x // size * size - 1, y // size * size - 1)
    assert page.text(TIP).startswith(f"block {int(y // size * (width // size) + x // size):,}: ")
    page.page.mouse.move(0, 0)
    page.page.focus(BLOCKS)
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowRight")
    assert mark_place(page) == [size - 1, -1, size]
    page.deliver(frame(3, reset=False, changed={5000: word(0)}))
    page.settle()
    assert page.text(TIP).startswith("block 1: ")
    assert mark_place(page) == [25, -1, 26]
    page.page.get_by_role("button", name="Show every block").click()
    page.settle()
    assert "of 60,000" not in page.text(".nbe-blocks .nbe-legend")
    page.page.focus(BLOCKS)
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("End")
    assert "to 59,999" in page.text(TIP).split("\n")[0]
    page.page.get_by_role("button", name="Show the part of the cache that is in use").click()
    page.settle()
    assert "blocks 0 to 63 of 60,000" in page.text(".nbe-blocks .nbe-legend")


def test_an_engine_core_that_lags_stands_out(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    content, buffers = FakeEngine(ranks=3, num_blocks=20).frame(reset=True)
    for rank, seconds in zip(content["ranks"], (0.010, 0.030, 0.011), strict=True):
        rank["workers"] = [{"rank": 0, "memory_bytes": 1, "num_steps": 5, "step_seconds": seconds}]
        rank.update(num_running=4 + rank["rank"], num_free_blocks=15)
    page.deliver((content, buffers))
    rows = page.page.locator(".nbe-skew tbody tr")
    assert [row.split("\t") for row in rows.all_inner_texts()] == [
        ["0", "4", "0", "25 %", "0", "0", "10.0 ms"],
        ["1", "5", "0", "25 %", "0", "0", "30.0 ms (3.0 × the fastest)"],
        ["2", "6", "0", "25 %", "0", "0", "11.0 ms"],
    ]
    assert page.page.locator(".nbe-lagging").all_inner_texts() == ["30.0 ms (3.0 × the fastest)"]
    content.update(seq=content["seq"] + 1, reset=False, ranks=content["ranks"][:2])
    for rank in content["ranks"]:
        rank.update(blocks=None, requests=None)
    page.deliver((content, []))
    assert rows.count() == 2


def test_waves_reach_to_the_newest_report(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    engine = FakeEngine(ranks=2, num_blocks=20)
    content, buffers = engine.frame(reset=True)
    part = {"running": True, "steps": 8.0, "dummy_steps": 0.0, "wave": 0, "num_requests": 1}
    phases = {"prefill_steps": 2.0, "recompute_steps": 1.6}
    content["time"] = START + 10
    content["waves"] = {
        "reset": True,
        "spans": [part | {"rank": 0, "start": START, "end": START + 8}],
        "open": [part | phases | {"rank": 0, "start": START + 8, "end": START + 10}],
    }
    page.deliver((content, buffers))
    waves = ".nbe-waves canvas"
    width = float(page.page.evaluate(f"document.querySelector('{waves}').clientWidth"))
    for x in (GUTTER + 10, width - 4):
        assert_color(page.pixel(waves, x, AXIS + 8), ROLES["decode"])
    # A snapshot of an older version tells no phases.
    assert_color(page.pixel(waves, GUTTER + 10, AXIS + 18), ROLES["decode"])
    for y, role in ((14, "prefill"), (18, "recompute")):
        assert_color(page.pixel(waves, width - 4, AXIS + y), ROLES[role])
    told = hover(page, waves, width - 4, AXIS + 8).split("\n")
    assert told[2:] == ["in 2.00 s: 8 steps", "2 with prefill", "2 with recomputation", "1 request"]
    # The open ones are replaced.
    content["seq"] += 1
    content.update(reset=False, waves={"reset": False, "spans": [], "open": []})
    for rank in content["ranks"]:
        rank.update(blocks=None, requests=None)
    page.deliver((content, []))
    assert "nothing is known" in hover(page, waves, width - 4, AXIS + 8)
    # What the keyboard's cursor is on is told where its time is, as long as that is in sight.
    page.page.mouse.move(0, 0)
    page.page.focus(waves)
    page.page.keyboard.press("ArrowLeft")
    tip = page.page.locator(TIP)
    told, before = tip.inner_text(), tip.bounding_box()
    content.update(seq=content["seq"] + 1, time=START + 20)
    page.deliver((content, []))
    after = tip.bounding_box()
    assert before is not None
    assert after is not None
    assert (tip.inner_text(), after["x"] < before["x"] - 100) == (told, True)
    content.update(seq=content["seq"] + 1, time=START + 60)
    page.deliver((content, []))
    assert tip.count() == 0


def history_answer(ranks: int = 1, error: str | None = None) -> Frame:
    columns = {
        "gap": [0, 0, 1, 0],
        "tokens_per_second": [10, 20, None, 40],
        "prompt_tokens_per_second": [15, 0, None, 0],
        "ttft_p50": [0.1, None, None, 0.2],
        "ttft_p95": [0.3, None, None, 0.4],
        "ttft_p99": [0.5, None, None, 0.6],
        "itl_p50": [0.01, 0.01, None, 0.02],
        "itl_p95": [0.02, 0.02, None, 0.03],
        "itl_p99": [0.03, 0.03, None, 0.04],
        "running": [1, 2, None, 0],
        "waiting": [0, 1, None, 0],
        "kv_usage": [0.1, 0.2, None, 0.05],
        "preemptions": [0, 3, None, 0],
        "prefix_cache_queries": [80, 0, None, 0],
        "prefix_cache_hits": [20, 0, None, 0],
    }
    rows = [{"rank": rank, "seconds": 900.0, **columns} for rank in range(ranks)]
    times = {"begin": START - 3600, "end": START} if error is None else {"begin": None, "end": None}
    return {
        "kind": "history",
        "last": "1h",
        "error": error,
        **times,
        "ranks": rows if error is None else [],
    }, []


def test_an_hour_of_the_hosts_history_is_shown_with_its_gaps(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=[timed(1, -500.0)]))
    assert page.page.locator(".nbe-trends").is_hidden()
    page.page.get_by_role("button", name="The last hour").click()
    page.settle()
    assert page.sent("history") == [{"kind": "history", "last": "1h"}]
    assert page.text(".nbe-trends h3") == "The last hour"
    assert page.text(".nbe-trends [role=status]") == "asking the engine's host …"
    page.deliver(history_answer())
    chart = ".nbe-trend-chart:first-child canvas"
    width = float(page.page.evaluate(f"document.querySelector('{chart}').clientWidth"))

    def told(part: float) -> list[str]:
        return hover(page, chart, 52 + part * (width - 54), 60).split("\n")[1:]

    assert told(0.1) == ["tokens/s generated: 10"]
    assert told(0.6) == ["nothing is known"]
    assert told(0.9) == ["tokens/s generated: 40"]
    height = float(page.page.evaluate(f"document.querySelector('{chart}').clientHeight"))
    assert_color(page.pixel(chart, 52 + 0.9 * (width - 54), height - 6), ROLES["decode"])
    gap = page.pixel(chart, 52 + 0.6 * (width - 54), height - 6)
    assert 0 < gap[3] < 255
    # Requests that wait stand upon those that run.
    requests = ".nbe-trend-chart:nth-child(2) canvas"
    assert_color(page.pixel(requests, 52 + 0.375 * (width - 54), 36), ROLES["waiting"])
    assert_color(page.pixel(requests, 52 + 0.375 * (width - 54), 70), ROLES["running"])
    # Another theme has other colours.
    base = float(page.page.evaluate(f"document.querySelector('{requests}').clientHeight")) - 2
    muted = page.pixel(requests, 52 + 0.9 * (width - 54), base)
    assert muted[3] > 0
    page.set_theme(DARK)
    page.settle()
    page.settle()
    assert page.pixel(requests, 52 + 0.9 * (width - 54), base) != muted
    page.set_theme(LIGHT)
    page.settle()
    # A press leads to a time and says what is not kept of it.
    said = page.page.locator(".nbe-shown")
    page.page.locator(chart).click(position={"x": 52 + 0.45 * (width - 54), "y": 60})
    expect(said).to_have_text(re.compile(r"^The steps and requests of \d\d:\d\d:\d\d are not kept\.$"))
    page.page.locator(chart).click(position={"x": 52 + 0.97 * (width - 54), "y": 60})
    expect(said).to_have_text(re.compile(r"^The requests of"))
    assert page.text(".nbe-timeline .nbe-place").startswith("step 1 · ")
    # By the keyboard, too, which says what is there.
    page.page.mouse.move(0, 0)
    page.page.focus(chart)
    for key, text in (
        ("ArrowLeft", "generated: 40"),
        ("ArrowLeft", "nothing is known"),
        ("Home", "generated: 10"),
    ):
        page.page.keyboard.press(key)
        assert page.text(TIP).endswith(text)
    expect(page.page.locator(".nbe-announcer")).to_have_text(re.compile(r"tokens/s generated: 10$"))
    page.page.keyboard.press("Enter")
    expect(said).to_have_text(re.compile(r"^The steps and requests of"))
    page.page.keyboard.press("End")
    page.page.keyboard.press("Enter")
    page.settle()
    expect(said).to_have_text(re.compile(r"^The requests of"))
    # One crosshair for all charts.
    assert len([name for name, _ in page.page.evaluate(CROSSES) if name == "The last hour"]) == 6
    # An answer to another question is not for this view, and an engine that has ended leaves what was known.
    page.deliver((history_answer(error="no")[0] | {"last": "1d"}, []))
    page.deliver(history_answer(error="the engine has ended"))
    assert page.page.locator(".nbe-trends [role=status]").inner_text() == "the engine has ended"
    assert page.page.locator(".nbe-trend-grid").is_visible()
    page.page.get_by_role("button", name="Steps, requests and blocks").click()
    page.settle()
    expect(page.page.locator(".nbe-trends")).to_be_hidden()


def test_all_that_is_kept_follows_who_scrubs_an_hour(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    words = [word(1, False, 0)] * 10 + [word(0)] * 90
    first = frame(
        steps=[timed(1, -450.0), timed(2, -1.0)], requests=[request(0)], words=words, num_blocks=100
    )
    page.deliver(at(first, 0.0))
    page.page.get_by_role("button", name="The last hour").click()
    page.deliver(history_answer())
    slider, said, moment = ".nbe-scrubber", ".nbe-shown", ".nbe-moment"
    live = page.page.locator(".nbe-live:visible")
    assert page.text(said).startswith("Press or drag on a chart")

    def scrub(slices: int) -> None:
        page.page.locator(slider).fill(str(slices))
        page.settle()

    def crosses() -> list[float]:
        chart = page.page.evaluate("document.querySelector('.nbe-trend-chart canvas').clientWidth")
        found = page.page.evaluate(CROSSES)
        return [(left - 52) / (chart - 54) for name, left in found if name == "The last hour"]

    # The host has the figures of this time, and nobody has its steps, blocks and requests. Where the keyboard's cursor
    # was does not matter.
    page.page.focus(TIMELINE)
    page.page.keyboard.press("Home")
    scrub(0)
    assert re.match(r"as of \d\d:\d\d:\d\d, over 15 min 0 s$", page.text(moment))
    labels = ("tokens in", "tokens out", "first token", "between", "memory", "KV blocks", "prefix hits")
    values = ["15/s", "10/s", "100 ms", "10.0 ms", "–", "10 % of 100", "25 %"]
    assert [tile(page, label).replace("\n", "") for label in labels] == values
    assert page.page.locator(".nbe-tail").all_inner_texts() == [
        "cached ones, too",
        "",
        "p95 300 ms · p99 500 ms",
        "p95 20.0 ms · p99 30.0 ms",
        "not kept",
        "at most",
        "in 15 min 0 s",
    ]
    assert re.match(r"The steps, blocks and requests of \d\d:\d\d:\d\d are not kept\.$", page.text(said))
    assert live.all_inner_texts() == ["live"] * 2
    assert page.text(".nbe-scheduler .nbe-now") == "not kept"
    assert page.text(".nbe-timeline .nbe-place").startswith("no steps of ")
    assert page.page.get_by_label("Show steps, each").is_visible()
    assert crosses() == [pytest.approx(450 / 3600, abs=0.01)] * 6
    width = float(page.page.evaluate(f"document.querySelector('{TIMELINE}').clientWidth"))
    assert hover(page, TIMELINE, width - 3, AXIS + 60).split("\n")[1:] == [
        "the steps of this time are not kept"
    ]
    assert page.pixel(TIMELINE, width - 3, AXIS + 60)[3] > 20
    page.page.mouse.move(0, 0)
    # What comes meanwhile moves nothing; where not even the host has figures, they are those of now.
    shown = page.text(moment)
    page.deliver(at(frame(2, reset=False, steps=[timed(3, 4.0)], num_blocks=100), 5.0))
    assert (page.text(moment), tile(page, "tokens out")) == (shown, "10/s")
    scrub(2)
    assert (page.text(moment), tile(page, "tokens out")) == ("figures: live", "412/s")
    assert page.text(said).startswith("The figures, steps, blocks and requests of ")
    # Steps that are kept are shown, on the axis that was left, and the course of a tile ends where nothing is known.
    scrub(3)
    assert page.page.get_by_label("Show time").is_visible()
    assert tile(page, "tokens out") == "40/s"
    assert page.text(said).startswith("The blocks and requests of ")
    assert page.text(".nbe-timeline .nbe-place").startswith("step 1 · ")
    trend = ".nbe-tile:nth-child(2) .nbe-trend canvas"
    narrow = float(page.page.evaluate(f"document.querySelector('{trend}').clientWidth"))
    lines = [
        max(page.pixel(trend, 1 + seconds / 2700 * (narrow - 2), y)[3] for y in range(18))
        for seconds in (450, 1800)
    ]
    assert lines[0] > 20
    assert lines[1] == 0
    # So it is for who drags over a chart; the button leads back.
    box = page.page.locator(".nbe-trend-chart canvas").first.bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 52 + 0.9 * (box["width"] - 54), box["y"] + 60)
    page.page.mouse.down()
    page.settle()
    assert tile(page, "tokens out") == "40/s"
    page.page.mouse.move(box["x"] + 52 + 0.3 * (box["width"] - 54), box["y"] + 60)
    page.settle()
    assert tile(page, "tokens out") == "20/s"
    page.page.mouse.up()
    page.page.mouse.move(0, 0)
    assert crosses() == [pytest.approx(0.3, abs=0.01)] * 6
    # The line is there again once the keyboard's cursor has gone.
    page.page.focus(".nbe-trend-chart canvas")
    page.page.keyboard.press("ArrowRight")
    assert crosses() == [pytest.approx(0.125, abs=0.01)] * 6
    page.page.keyboard.press("Escape")
    assert crosses() == [pytest.approx(0.3, abs=0.01)] * 6
    page.page.get_by_role("button", name="Show what is now").click()
    page.settle()
    assert page.page.locator(moment).is_hidden()
    assert page.page.locator(slider).input_value() == "4"
    # One starts on the chosen axis again, and a key leads to the figures before.
    assert page.page.get_by_label("Show time").is_visible()
    page.page.focus(slider)
    page.page.keyboard.press("ArrowLeft")
    page.settle()
    assert crosses() == [pytest.approx(3150 / 3600, abs=0.01)] * 6
    # A model without blocks has slots, and an engine core that is not known any more counts as none.
    slots = frame(3, reset=False, num_blocks=0, num_state_slots=9, num_free_state_slots=9)
    page.deliver(at(slots, 6.0))
    page.deliver(history_answer(ranks=2))
    scrub(1)
    assert tile(page, "KV blocks").replace("\n", "") == "20 % of 9"
    # Without the history there is no way to a time whose steps are not kept.
    page.page.get_by_role("button", name="Steps, requests and blocks").click()
    page.settle()
    assert page.page.locator(moment).is_hidden()
    assert page.page.get_by_role("button", name="Pause").is_visible()


def test_a_chart_is_not_pressed_by_a_finger_that_scrolls_nor_at_its_labels(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(at(frame(steps=[timed(1, -500.0)]), 0.0))
    page.page.get_by_role("button", name="The last hour").click()
    page.deliver(history_answer())
    chart = page.page.locator(".nbe-trend-chart canvas").first
    assert chart.evaluate("(node) => getComputedStyle(node).touchAction") == "pan-y"
    box = chart.bounding_box()
    assert box is not None
    x, y, width = box["x"] + 52, box["y"] + 40, box["width"] - 54
    session = page.page.context.new_cdp_session(page.page)

    def touch(kind: str, *places: tuple[float, float]) -> str:
        """Move a finger, and return the position of the slider, which is at 4 while all is live."""
        points = [{"x": x + part * width, "y": y + down} for part, down in places]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.settle()
        return page.page.locator(".nbe-scrubber").input_value()

    assert touch("touchStart", (0.3, 0)) == "4"
    assert touch("touchCancel") == "4"
    # It goes there once it moves sideways or is lifted.
    assert touch("touchStart", (0.3, 0)) == "4"
    assert touch("touchMove", (0.6, 4)) == "2"
    assert touch("touchMove", (0.4, 40)) == "1"
    assert touch("touchEnd") == "1"
    assert touch("touchStart", (0.9, 0)) == "1"
    assert touch("touchEnd") == "3"
    session.detach()
    page.page.get_by_role("button", name="Show what is now").click()
    chart.click(position={"x": 10, "y": 40})
    page.settle()
    assert page.page.locator(".nbe-scrubber").input_value() == "4"


def test_a_time_that_is_not_known_after_a_reload_is_left(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"paused_at": START - 3000})
    steps = [timed(number, number / 2) for number in range(1, 9)]
    page.deliver(at(frame(steps=steps), 5.0))
    expect(page.page.get_by_role("button", name="Pause")).to_be_visible()
    assert page.page.locator(".nbe-moment").is_hidden()
    # A saved state has the latest steps alone: the kernel may know more.
    page.page.evaluate("cleanups[0]()")
    saved, _ = at(frame(steps=steps[4:]), 5.0)
    page.mount(view={"paused_at": START + 1.6}, snapshot=saved | {"buffers": []})
    page.deliver(at(frame(steps=steps), 6.0), model=1)
    assert page.text(".nbe-place").startswith("step 3 · ")
    # Nor is a time left whose figures this page has seen.
    page.deliver(at(frame(2, reset=False, steps=[timed(9, 6.5), timed(10, 7.5)]), 8.0), model=1)
    page.page.locator(".nbe-slider").fill("9")
    page.deliver(at(frame(steps=[timed(20, 9.0)]), 9.5), model=1)
    assert page.text(".nbe-moment").startswith("as of ")
