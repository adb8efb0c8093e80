"""Nothing of the dashboard overlaps or is cut off, with little in it and with much, from narrow to wide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chromium import needs_chromium
from dashboard_frames import FakeEngine, kept_hour
from dashboard_page import DARK, LIGHT, DashboardPage
from notebook_support.dashboard_script import AXIS, GUTTER, TIMELINE, OpenPage, hover
from notebook_support.lab import screenshot

pytestmark = needs_chromium

OVERFLOWING = """() => {
    const found = [];
    const root = document.querySelector(".nbe-dash").getBoundingClientRect();
    for (const node of document.querySelectorAll(".nbe-dash *")) {
        const box = node.getBoundingClientRect();
        if (!box.width || node.closest(".nbe-scroller, .nbe-announcer, .nbe-probe")) continue;
        if (box.left < root.left - 0.5 || box.right > root.right + 0.5) found.push(["out", node.className]);
        if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth && !node.matches("input, select"))
            found.push(["cut", node.className]);
    }
    const leaves = [...document.querySelectorAll(".nbe-tile > *, h3, .nbe-now, .nbe-legend > span, "
        + ".nbe-tools > *, canvas, .nbe-title > *, .nbe-table th")].filter((n) => n.offsetWidth);
    const boxes = leaves.map((n) => [n, n.getBoundingClientRect()]);
    for (const [a, p] of boxes) for (const [b, q] of boxes) {
        if (a === b || a.contains(b) || b.contains(a)) continue;
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
            && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1) found.push([a.className, b.className]);
    }
    return [found, document.documentElement.scrollWidth - innerWidth];
}"""


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (800, "dark"), (480, "light")])
def test_nothing_overlaps_or_is_cut_off(open_page: OpenPage, width: int, theme: str) -> None:
    page = open_page(width=width, height=1000, theme=DARK if theme == "dark" else LIGHT)
    page.mount(view={"axis": "steps"})
    engine = FakeEngine(ranks=2, num_blocks=240, lock_step=True)
    engine.run(150, arrivals=0.2)
    page.deliver(engine.frame(reset=True))
    for _ in range(6):
        engine.run(20, arrivals=0.2)
        page.deliver(engine.frame())
    found, beyond = page.page.evaluate(OVERFLOWING)
    assert found == []
    assert beyond <= 0
    columns = page.page.evaluate("getComputedStyle(document.querySelector('.nbe-body')).gridTemplateColumns")
    assert len(columns.split()) == (2 if width == 1280 else 1)
    # What is told beside the pointer stays in the window, also in its corners.
    box = page.page.locator(TIMELINE).bounding_box()
    assert box is not None
    for x, y in ((GUTTER + 200, AXIS + 4), (box["width"] - 2, box["height"] - 2)):
        hover(page, TIMELINE, x, y)
        tip = page.page.locator(".nbe-tip").bounding_box()
        assert tip is not None
        assert tip["x"] >= 0
        assert tip["y"] >= 0
        assert tip["x"] + tip["width"] <= width
        assert tip["y"] + tip["height"] <= 1000


def few() -> FakeEngine:
    """An engine with two requests and 60 blocks."""
    engine = FakeEngine(num_blocks=60)
    for prompt in (90, 250):
        engine.ranks[0].add(prompt, 400)
    engine.run(120, arrivals=0)
    return engine


def many() -> FakeEngine:
    """An engine with 200 requests, some of which wait, and 100,000 blocks."""
    engine = FakeEngine(num_blocks=100_000, budget=2048, seqs=160)
    for number in range(200):
        engine.ranks[0].add(300 + 40 * (number % 9), 400, number % 3 - 1)
    engine.run(60, arrivals=0)
    return engine


def assert_whole(page: DashboardPage, what: str) -> None:
    page.settle()
    found, beyond = page.page.evaluate(OVERFLOWING)
    assert found == [], what
    assert beyond <= 0, what
    screenshot(page.page.locator(".nbe-dash"), f"dashboard-{what}")


@pytest.mark.parametrize("make", [few, many])
def test_little_and_much_can_be_read_in_every_width_and_theme(
    open_page: OpenPage, make: Callable[[], FakeEngine]
) -> None:
    page = open_page(width=1600, height=1000)
    page.mount()
    engine = make()
    page.deliver(engine.frame(reset=True))
    end = engine.ranks[0].now
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        page.set_theme(theme)
        for width in (1600, 700):
            page.page.set_viewport_size({"width": width, "height": 1000})
            assert_whole(page, f"{make.__name__}-{width}-{name}")
            if make is few:
                page.page.get_by_role("button", name="The last hour").click()
                page.deliver(kept_hour(end))
                page.page.locator(".nbe-scrubber").fill("60")
                assert_whole(page, f"hour-{width}-{name}")
                page.page.get_by_role("button", name="Steps, requests and blocks").click()
