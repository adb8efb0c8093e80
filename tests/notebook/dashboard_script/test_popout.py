"""A dashboard in a window of its own: it is drawn there, and comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chromium import needs_chromium
from dashboard_frames import FakeEngine
from dashboard_page import DARK, DashboardPage
from notebook_support.dashboard_script import (
    BLOCKS,
    STEPS,
    TIMELINE,
    TIP,
    OpenPage,
    assert_color,
    frame,
    request,
    step,
    tile,
    word,
)
from playwright.sync_api import Page, expect

from nbengine.widgets.dashboard.palette import REQUESTS

OUT, BACK = "Pop out into a window of its own", "Bring back into the notebook"
INKED = """() => [...document.querySelectorAll('.nbe-panel:not([hidden]) canvas')].map((canvas) =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0))"""
SETTLED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
HIDE = """() => {
    Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
    window.requestAnimationFrame = window.setTimeout = window.setInterval = () => 0;
}"""

pytestmark = needs_chromium


def pop_out(page: DashboardPage) -> Page:
    """Press the button; returns the window that is opened, with the dashboard in it."""
    with page.page.expect_popup() as opening:
        page.page.get_by_role("button", name=OUT).click()
    window: Page = opening.value
    window.set_default_timeout(20_000)
    expect(window.locator(".nbe-dash")).to_be_visible()
    expect(page.page.locator(".nbe-dash")).to_have_count(0)
    return window


def send(page: DashboardPage, window: Page, content: object) -> None:
    """Hand a message of the kernel to the dashboard and wait until the window has painted it."""
    page.page.evaluate("(content) => models[0].deliver(content, [])", content)
    window.evaluate(SETTLED)


def expect_back(page: DashboardPage) -> None:
    """Check that the dashboard stands in the notebook, whole, and nothing else in its place."""
    expect(page.page.locator(".nbe-dash")).to_be_visible()
    expect(page.page.get_by_role("button", name=OUT)).to_be_visible()
    assert page.page.locator(".nbe-away").count() == 0
    assert page.page.locator(".nbe-tip").count() == 1


def test_every_panel_is_drawn_in_the_window_and_drawn_again_in_the_notebook(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    engine = FakeEngine(ranks=2, num_blocks=60)
    engine.run(60, arrivals=0.3)
    page.deliver(engine.frame(reset=True))
    page.settle()
    before, place = page.page.evaluate(INKED), page.text(".nbe-place")
    assert before.count(True) >= 7
    window = pop_out(page)
    window.evaluate(SETTLED)
    assert window.evaluate(INKED) == before
    assert window.locator(".nbe-place").inner_text() == place
    assert window.title() == "Dashboard of engine engine-1"
    # It keeps to the window, whatever height it had or will have.
    window.set_viewport_size({"width": 700, "height": 500})
    window.wait_for_function("() => document.querySelector('.nbe-dash').clientWidth <= 700")
    window.evaluate(SETTLED)
    assert window.evaluate("document.documentElement.scrollWidth") <= 700
    assert window.evaluate(INKED) == before
    with window.expect_event("close"):
        by_the_window_s_button(page, window)
    expect_back(page)
    page.settle()
    assert page.page.evaluate(INKED) == before


def test_frames_keys_and_the_pointer_work_in_the_window_while_the_notebook_is_hidden(
    open_page: OpenPage,
) -> None:
    page = open_page()
    page.mount(height=400)
    page.deliver(frame(steps=STEPS, requests=[request(0)], words=[word(1, holder=0), word(0)]))
    window = pop_out(page)
    # The tab of the notebook is in the background: the browser gives it no frames, and its timers no time.
    page.page.evaluate(HIDE)
    send(page, window, frame(2, reset=False, steps=[step(10)])[0])
    assert window.locator(".nbe-place").inner_text().startswith("step 10 ·")
    assert page.sent("alive")[-1] == {"kind": "alive", "visible": True}

    canvas = window.locator(TIMELINE)
    box = canvas.bounding_box()
    assert box is not None
    # The height that was chosen in the notebook is the notebook's.
    assert window.locator(".nbe-dash").evaluate("(node) => node.clientHeight") > 400
    canvas.hover(position={"x": box["width"] - 3, "y": 30})
    expect(window.locator(TIP)).to_contain_text("step 10")
    expect(window.locator(".nbe-scheduler .nbe-crosshair").first).to_be_visible()
    tip = window.locator(TIP).bounding_box()
    size = window.evaluate("[innerWidth, innerHeight]")
    assert tip is not None
    assert 0 <= tip["x"] <= size[0] - tip["width"]
    assert 0 <= tip["y"] <= size[1] - tip["height"]
    canvas.focus()
    window.keyboard.press("ArrowLeft")
    window.evaluate(SETTLED)
    assert window.locator(".nbe-timeline").get_attribute("data-live") == "false"
    # What is said comes with a timer, and what is kept, too: the window's own.
    expect(window.locator(".nbe-announcer")).to_contain_text("step 10 ·")
    window.wait_for_function("() => opener.models[0].saved > 0")
    window.keyboard.press("End")
    window.locator(BLOCKS).hover(position={"x": 4, "y": 4})
    window.wait_for_function("() => opener.models[0].sent.some((content) => content.kind === 'block')")
    window.get_by_role("button", name="The last hour").click()
    assert page.sent("history") == [{"kind": "history", "last": "1h"}]
    window.get_by_role("button", name="Abort request #0 Once upon a time").click()
    assert page.sent("abort") == [{"kind": "abort", "rank": 0, "number": 0}]
    with window.expect_download() as downloading:
        window.get_by_label("Export as Chrome trace").click()
        page.page.evaluate(
            "models[0].deliver({ kind: 'export', name: 'trace.json', text: '{}' }, [])",
        )
    assert downloading.value.suggested_filename == "trace.json"


def test_the_window_follows_the_theme_of_the_notebook(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS, words=[word(1, holder=0), word(0)]))
    window = pop_out(page)
    root = window.locator(".nbe-dash")
    expect(root).to_have_attribute("data-theme", "light")
    page.set_theme(DARK)
    expect(root).to_have_attribute("data-theme", "dark")
    window.evaluate(SETTLED)
    assert root.evaluate("(node) => getComputedStyle(node).backgroundColor") == "rgb(17, 17, 17)"
    assert root.evaluate("(node) => getComputedStyle(node).color") == "rgb(224, 224, 224)"
    pixel = window.locator(BLOCKS).evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(8, 8, 1, 1).data]"
    )
    assert_color(tuple(pixel), REQUESTS[0])
    # A table of a page without a document type would have colours and lines of its own.
    for name in ("color", "lineHeight", "fontVariantNumeric"):
        look = f"(node) => getComputedStyle(node).{name}"
        assert window.locator(".nbe-table").evaluate(look) == root.evaluate(look)
    # A style sheet that comes late changes no attribute of the notebook's page.
    page.page.add_style_tag(content="body { --jp-layout-color1: #fafafa !important; }")
    expect(root).to_have_attribute("data-theme", "light")


def by_the_window_s_button(page: DashboardPage, window: Page) -> None:
    # Later, because the window is gone before a press in it is answered.
    window.get_by_role("button", name=BACK).evaluate("(node) => { setTimeout(() => node.click(), 0); }")


def by_the_notebook_s_button(page: DashboardPage, window: Page) -> None:
    page.page.get_by_role("button", name=BACK).press("Enter")


def by_closing_the_window(page: DashboardPage, window: Page) -> None:
    window.close(run_before_unload=False)


def by_loading_the_window_again(page: DashboardPage, window: Page) -> None:
    window.evaluate("() => { setTimeout(() => location.reload(), 0); }")


@pytest.mark.parametrize(
    "come_back",
    [
        by_the_window_s_button,
        by_the_notebook_s_button,
        by_closing_the_window,
        by_loading_the_window_again,
    ],
)
def test_it_comes_back_with_all_that_it_shows_and_with_the_focus(
    open_page: OpenPage, come_back: Callable[[DashboardPage, Page], None]
) -> None:
    page = open_page()
    page.mount(height=600)
    page.deliver(frame(steps=STEPS, requests=[request(0)], words=[word(1, holder=0), word(0)]))
    page.page.get_by_role("button", name="Pause").click()
    page.settle()
    place = page.text(".nbe-place")
    window = pop_out(page)
    assert window.evaluate("document.activeElement.getAttribute('aria-label')") == BACK
    assert page.text(".nbe-away").startswith("The dashboard is shown in its own window.")
    send(page, window, frame(2, reset=False, steps=[step(10)])[0])
    with window.expect_event("close"):
        come_back(page, window)
    expect_back(page)
    expect(page.page.get_by_role("button", name=OUT)).to_be_focused()
    page.settle()
    assert page.text(".nbe-place") == place
    assert page.page.locator(".nbe-slider").get_attribute("max") == "10"
    assert page.page.locator(".nbe-dash").evaluate("(node) => node.style.height") == "600px"
    # It is told the same things as before, and once each.
    assert page.sent("hello") == [{"kind": "hello"}]
    page.page.get_by_label("Go on live").click()
    page.deliver(frame(3, reset=False, steps=[step(11)]))
    assert page.text(".nbe-place").startswith("step 11 ·")
    assert tile(page, "tokens out") == "412/s"
    again = pop_out(page)
    again.close()
    expect_back(page)


def test_a_window_that_is_closed_takes_no_focus_from_a_cell(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.page.evaluate("document.body.prepend(document.createElement('textarea'))")
    window = pop_out(page)
    page.page.focus("textarea")
    window.close()
    expect_back(page)
    expect(page.page.locator("textarea")).to_be_focused()


def test_a_window_that_is_blocked_is_said_beside_the_button(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS))
    page.page.evaluate("() => { window.reallyOpen = window.open; window.open = () => null; }")
    page.page.get_by_role("button", name=OUT).click()
    blocked = page.page.locator(".nbe-blocked")
    expect(blocked).to_have_text("The browser has blocked the window: allow pop-ups for this page.")
    expect(page.page.locator(".nbe-announcer")).to_contain_text("blocked the window")
    assert page.page.locator(".nbe-dash").count() == 1
    page.page.evaluate("() => { window.open = window.reallyOpen; }")
    window = pop_out(page)
    expect(window.locator(".nbe-blocked")).to_be_hidden()


@pytest.mark.parametrize("how", ["cleanups[0]()", "location.assign('/other')"])
def test_the_window_goes_with_the_widget_and_with_the_notebook_s_page(open_page: OpenPage, how: str) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS, requests=[request(0)]))
    window = pop_out(page)
    with window.expect_event("close"):
        page.page.evaluate(f"() => {{ setTimeout(() => {{ {how}; }}, 0); }}")
    page.page.wait_for_load_state()
    assert page.page.locator(".nbe-dash, .nbe-away, .nbe-tip").count() == 0
