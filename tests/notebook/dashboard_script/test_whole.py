"""The dashboard as a whole: its header, its life in the notebook, and its layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import needs_chromium
from dashboard_frames import FakeEngine
from dashboard_page import DARK, LIGHT, DashboardPage
from notebook_support.dashboard_script import (
    BLOCKS,
    STEPS,
    TIMELINE,
    OpenPage,
    assert_color,
    cell,
    frame,
    request,
    rgb,
    step,
    tile,
    word,
)
from playwright.sync_api import Browser, expect

from nbengine.widgets.dashboard.palette import MORE_CONTRAST, REQUESTS, ROLES

pytestmark = needs_chromium


def test_the_header_says_what_was_published_and_a_dash_for_what_was_not(open_page: OpenPage) -> None:
    # Not put together into one text, as in all other tests and in a notebook: the browser takes the modules, too.
    page = open_page(as_modules=True)
    page.mount()
    assert page.sent("hello") == [{"kind": "hello"}]
    # The modules may be loaded before the first picture is drawn.
    page.page.locator(".nbe-banner").filter(has_text="waiting for the kernel …").wait_for()
    content, buffers = frame(
        num_blocks=400, num_free_blocks=300, prefix_cache_queries=80, prefix_cache_hits=20
    )
    content["rates"].update(time_to_first_token=None, tokens_in_per_second=0)
    page.deliver((content, buffers))
    assert page.text(".nbe-title").split("\n")[:4] == [
        "running",
        "engine-1",
        "smollm2-135m",
        "1 engine core · cpu · bfloat16",
    ]
    assert tile(page, "tokens in") == "0/s"
    assert tile(page, "tokens out") == "412/s"
    assert tile(page, "first token") == "–"
    assert tile(page, "between tokens") == "7.81 ms"
    assert tile(page, "memory") == "700 MiB"
    assert tile(page, "KV blocks in use") == "25 % of 400"
    assert tile(page, "prefix hits") == "25 %"
    assert page.page.locator(".nbe-banner").is_hidden()
    content["rates"] = dict.fromkeys(content["rates"])
    content.update(
        seq=2, reset=False, engine=content["engine"] | {"state": "ended", "note": "it was stopped"}
    )
    content["ranks"] = []
    page.deliver((content, []))
    labels = ["tokens in", "tokens out", "memory", "KV blocks in use", "prefix hits"]
    assert [tile(page, label) for label in labels] == ["–"] * 5
    assert page.text(".nbe-state") == "ended"
    assert (
        page.text(".nbe-banner") == "it was stopped — what was seen of it can be looked through and exported"
    )


def test_a_theme_that_changes_leaves_no_canvas_blank(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    engine = FakeEngine(ranks=2, num_blocks=60)
    engine.run(60, arrivals=0.3)
    page.deliver(engine.frame(reset=True))
    engine.run(60, arrivals=0.3)
    page.deliver(engine.frame())
    inked = """() => [...document.querySelectorAll('.nbe-panel:not([hidden]) canvas')].map((canvas) =>
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0))"""
    before = page.page.evaluate(inked)
    assert len(before) >= 7
    assert before.count(False) <= 1
    for theme in (DARK, LIGHT):
        page.set_theme(theme)
        page.settle()
        page.settle()
        assert page.page.evaluate(inked) == before
    # A style sheet that comes late changes no attribute of the page.
    page.page.add_style_tag(content="body { --jp-layout-color1: #202830 !important; }")
    page.page.wait_for_function("() => document.querySelector('.nbe-dash').dataset.theme === 'dark'")
    page.settle()
    assert page.page.evaluate(inked) == before


COLORS = """(nodes) => nodes.map((node) => {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const painted = (...colors) => {
        for (const color of colors) { probe.fillStyle = color; probe.fillRect(0, 0, 1, 1); }
        return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    const ground = getComputedStyle(document.querySelector(".nbe-dash")).backgroundColor;
    const { color, backgroundColor } = getComputedStyle(node);
    return { text: painted(ground, backgroundColor, color), fill: painted(ground, backgroundColor), ground: painted(ground) };
})"""


def luminance(color: list[int]) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in color)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: list[int], second: list[int]) -> float:
    """The contrast of two colours, as WCAG 2.1 defines it."""
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_leave_nothing_that_cannot_be_told(open_page: OpenPage, scheme: str) -> None:
    page = open_page()
    page.page.emulate_media(forced_colors="active", color_scheme=scheme)
    page.mount()
    engine = FakeEngine(ranks=2, num_blocks=60)
    engine.run(60, arrivals=0.3)
    page.deliver(engine.frame(reset=True))
    assert page.page.get_attribute(".nbe-dash", "data-theme") == scheme

    def colors(selector: str) -> list[dict[str, list[int]]]:
        found: list[dict[str, list[int]]] = page.page.locator(selector).evaluate_all(COLORS)
        assert found
        return found

    # A button that is pressed has a label, and differs from the others.
    (pressed,) = colors(".nbe-button[aria-pressed=true]")
    assert contrast(pressed["text"], pressed["fill"]) >= 4.5
    assert contrast(pressed["fill"], pressed["ground"]) >= 1.8
    # What means something by its colour stands out from the ground; the ground of a bar does not.
    marks = ("running", "waiting", "preempted", "prefill", "decode", "recompute", "hit", "cached")
    for mark in colors(",".join(f".nbe-mark.nbe-{name}" for name in marks)) + colors(".nbe-swatch"):
        assert contrast(mark["fill"], mark["ground"]) >= 3
    for track in colors(".nbe-track"):
        assert contrast(track["fill"], track["ground"]) < 2
    for bar in colors(".nbe-cell-prompt .nbe-track > i, .nbe-cell-output .nbe-bar-first"):
        assert contrast(bar["fill"], bar["ground"]) >= 3


def test_more_contrast_changes_the_palette_at_once_and_back(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS, requests=[request(0)], words=[word(1, holder=0), word(0)]))
    hit = page.page.locator(".nbe-timeline .nbe-mark.nbe-hit")
    for contrast, wanted in (("more", "more"), ("no-preference", "usual")):
        page.page.emulate_media(contrast=contrast)
        page.page.wait_for_function(
            "(wanted) => document.querySelector('.nbe-dash').dataset.contrast === wanted", arg=wanted
        )
        page.settle()
        shown = [
            MORE_CONTRAST[color][0] if wanted == "more" else color for color in (REQUESTS[0], ROLES["hit"])
        ]
        assert_color(page.pixel(BLOCKS, *cell(page, 0)), shown[0])
        assert (
            hit.evaluate("(mark) => getComputedStyle(mark).backgroundColor")
            == f"rgb({', '.join(map(str, rgb(shown[1])))})"
        )
        # The edge of a free block tells it from the ground.
        x, y = cell(page, 1)
        assert (max(page.pixel(BLOCKS, x, y - 4)[:3]) < 100) == (wanted == "more")


def test_an_engine_that_has_ended_can_be_looked_through(open_page: OpenPage) -> None:
    page = open_page(frozen=True)
    page.mount()
    content, _ = frame(steps=STEPS, requests=[request(0)])
    page.page.evaluate("(content) => models[0].deliver(content, [])", content)
    ended = {"state": "ended", "note": "the engine was stopped"}
    content, _ = frame(2, reset=False, engine=ended)
    page.page.evaluate("(content) => models[0].deliver(content, [])", content)
    page.page.clock.run_for(60_000)
    assert page.page.get_attribute(".nbe-dash", "data-ended") == "true"
    assert page.text(".nbe-banner").startswith("the engine was stopped — ")
    assert page.page.locator(".nbe-abort:visible").count() == 0
    slider = page.page.locator(".nbe-slider")
    slider.evaluate("(node) => { node.value = '4'; node.dispatchEvent(new Event('input')); }")
    page.page.clock.run_for(100)
    assert page.text(".nbe-place").startswith("step 4 ·")
    page.page.get_by_label("Export as Chrome trace").evaluate("(node) => node.click()")
    assert page.sent("export") == [{"kind": "export"}]


def test_export_asks_the_kernel_for_the_file(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS))
    export = page.page.get_by_label("Export as Chrome trace")
    export.click()
    assert page.sent("export") == [{"kind": "export"}]
    expect(export).to_be_disabled()
    with page.page.expect_download() as downloading:
        page.deliver(({"kind": "export", "name": "trace.json", "text": '{"traceEvents": []}'}, []))
    assert downloading.value.suggested_filename == "trace.json"
    assert json.loads(Path(downloading.value.path()).read_text()) == {"traceEvents": []}
    expect(export).to_be_enabled()


def test_a_file_goes_to_the_one_view_that_asked_for_it(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.page.evaluate(
        """async () => {
            const { default: widget } = await import(window.script);
            const el = document.getElementById("cells").appendChild(document.createElement("div"));
            cleanups.push(widget.render({ model: models[0], el }));
            window.downloads = 0;
            HTMLAnchorElement.prototype.click = () => (window.downloads += 1);
        }"""
    )
    page.deliver(frame(steps=STEPS))
    answer = ({"kind": "export", "name": "trace.json", "text": "{}"}, [])
    page.deliver(answer)
    assert page.page.evaluate("downloads") == 0
    exports = page.page.get_by_label("Export as Chrome trace")
    exports.nth(1).focus()
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("Enter")
    assert len(page.sent("export")) == 1
    page.deliver(answer)
    assert page.page.evaluate("downloads") == 1
    expect(exports.nth(1)).to_be_focused()


def test_a_saved_state_is_drawn_and_says_that_it_is_one(open_page: OpenPage) -> None:
    page = open_page(frozen=True)
    engine = FakeEngine(num_blocks=6)
    engine.ranks[0].add(40, 3, preview="saved-1", own=True)
    engine.run(2, arrivals=0)
    snapshot = engine.snapshot()
    page.mount(snapshot=snapshot)
    page.page.clock.run_for(100)
    assert page.text(".nbe-banner").endswith(", asking the kernel for more …")
    page.page.clock.run_for(2500)
    assert page.text(".nbe-banner").startswith("saved state of ")
    assert page.text(".nbe-banner").endswith(", no live engine")
    assert "saved-1" in page.text(".nbe-table")
    assert page.page.locator(".nbe-abort:visible").count() == 0
    assert_color(page.pixel(BLOCKS, *cell(page, 0)), REQUESTS[0])
    assert tile(page, "tokens out") == "412/s"
    live, _ = engine.frame(reset=True)
    live["ranks"][0]["requests"]["new"][0]["preview"] = "live-1"
    page.page.evaluate("([content]) => models[0].deliver(content, [btoa('\\0'.repeat(24))])", [live])
    page.page.clock.run_for(100)
    assert page.page.locator(".nbe-banner").is_hidden()
    assert "live-1" in page.text(".nbe-table")
    assert page.page.locator(".nbe-abort:visible").count() == 1
    # A kernel that falls silent is missed after a while.
    page.page.clock.run_for(25_000)
    assert page.text(".nbe-banner").startswith("The kernel does not answer.")


def test_a_kernel_that_nothing_can_be_sent_to_is_said_not_to_answer(open_page: OpenPage) -> None:
    page = open_page(frozen=True, config={"baseUrl": "/"})
    engine = FakeEngine(num_blocks=6)
    engine.ranks[0].add(40, 300, own=True, foreground=True)
    engine.run(2, arrivals=0)
    snapshot = engine.snapshot()
    page.mount(interrupt_path="api/kernels/ab-12")
    live, _ = engine.frame(reset=True)
    page.page.evaluate("([content]) => models[0].deliver(content, [btoa('\\0'.repeat(24))])", [live])
    page.page.clock.run_for(100)
    assert page.page.locator(".nbe-banner").is_hidden()
    # As in a notebook whose kernel was restarted.
    page.page.evaluate("() => { Model.prototype.send = () => { throw new Error('Cannot send'); }; }")
    page.page.clock.run_for(5000)
    assert page.text(".nbe-banner").startswith("The kernel does not answer. This is the state at ")
    page.page.evaluate("document.querySelector('.nbe-abort').click()")
    page.page.get_by_label("Export as Chrome trace").evaluate("(button) => button.click()")
    page.page.clock.run_for(300)
    assert page.text(".nbe-status") == "the kernel does not answer"
    assert page.text(".nbe-tools button:last-child") == "Export (no answer)"
    assert page.text(".nbe-announcer") == "The kernel does not answer."
    page.page.clock.run_for(5000)
    assert page.posts == []

    # A view made now shows what was saved, and leaves nothing.
    page.mount(snapshot=snapshot)
    page.page.clock.run_for(100)
    banner = page.page.locator(".nbe-banner").nth(1).inner_text()
    assert banner.startswith("saved state of ")
    assert banner.endswith(", no live engine")
    page.page.evaluate("cleanups[1]()")
    assert page.page.evaluate("models.map((model) => model.listeners.length > 0)") == [True, False]
    assert page.page.locator(".nbe-tip").count() == 1


def test_out_of_sight_it_is_alive_and_says_that_it_cannot_be_seen(open_page: OpenPage) -> None:
    page = open_page(frozen=True)
    page.mount()
    page.page.clock.run_for(10_500)
    assert page.sent("alive") == 3 * [{"kind": "alive", "visible": True}]
    page.page.evaluate("document.getElementById('cells').style.marginTop = '5000px'")
    page.page.wait_for_function(
        "() => document.querySelector('.nbe-dash').getBoundingClientRect().top > 4000"
    )
    page.page.evaluate(
        "() => new Promise((done) => new IntersectionObserver((e, o) => { o.disconnect(); done(); }).observe(document.body))"
    )
    page.page.wait_for_function("() => models[0].sent.at(-1).visible === false")
    page.page.clock.run_for(20_000)
    assert page.sent("alive")[3:] == 5 * [{"kind": "alive", "visible": False}]
    # What comes meanwhile is kept, and not drawn.
    page.page.evaluate("(content) => models[0].deliver(content, [])", frame(steps=STEPS)[0])
    page.page.clock.run_for(1000)
    assert page.text(".nbe-place") == ""
    page.page.evaluate("document.getElementById('cells').style.marginTop = '0'")
    page.page.wait_for_function("() => models[0].sent.at(-1).visible === true")
    page.page.clock.run_for(100)
    assert page.text(".nbe-place").startswith("step 9 ·")


def test_several_are_independent_and_leave_nothing(open_page: OpenPage) -> None:
    page = open_page(height=2400)
    page.mount()
    page.mount(view={"scale": 3})
    page.deliver(frame(steps=STEPS, requests=[request(0)]), 0)
    page.deliver(frame(steps=STEPS[:4], requests=[request(7), request(8)], engine={"name": "other"}), 1)
    names = page.page.locator(".nbe-name").all_inner_texts()
    assert names == ["engine-1", "other"]
    places = page.page.locator(".nbe-place")
    assert [text.split(" ·")[0] for text in places.all_inner_texts()] == ["step 9", "step 4"]
    page.page.get_by_label("Pause").nth(0).click()
    page.settle()
    assert page.page.locator(".nbe-timeline button:first-child").all_inner_texts() == ["▶ Live", "❚❚ Pause"]
    assert page.page.locator(".nbe-table").nth(1).locator("tbody tr").count() == 2
    assert page.sent("abort", 0) == page.sent("abort", 1) == []
    page.page.evaluate("cleanups[0]()")
    assert page.page.locator(".nbe-dash").count() == page.page.locator(".nbe-tip").count() == 1
    assert page.page.evaluate("models.map((model) => model.listeners.length > 0)") == [False, True]
    page.deliver(frame(2, reset=False, steps=[step(5)]), 1)
    assert places.inner_text().startswith("step 5 ·")


def test_the_height_can_be_dragged_and_is_kept(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(height=600)
    page.deliver(frame(steps=STEPS))
    root = page.page.locator(".nbe-dash")
    assert root.bounding_box()["height"] == 600
    handle = page.page.get_by_label("Height of the dashboard").bounding_box()
    page.page.mouse.move(handle["x"] + 50, handle["y"] + 4)
    page.page.mouse.down()
    page.page.mouse.move(handle["x"] + 50, handle["y"] + 84, steps=4)
    page.page.mouse.up()
    assert root.bounding_box()["height"] == 680
    assert page.page.evaluate("[models[0].get('height'), models[0].saved]") == [680, 1]
    page.page.focus(".nbe-handle")
    page.page.keyboard.press("ArrowUp")
    assert page.page.evaluate("models[0].get('height')") == 660
    assert height_told(page) == ("240", "4000", "660", "660 pixels")
    page.page.keyboard.press("Home")
    assert page.page.evaluate("models[0].get('height')") == 0
    assert height_told(page) == (
        "240",
        "4000",
        str(round(root.bounding_box()["height"])),
        "as high as its content",
    )
    # As high as its content: nothing of it has to be scrolled to.
    assert root.evaluate("(node) => node.style.height") == ""
    assert page.page.evaluate(
        "() => { const body = document.querySelector('.nbe-body'); return body.scrollHeight <= body.clientHeight; }"
    )


def height_told(page: DashboardPage) -> tuple[str | None, ...]:
    """Return what a screen reader says of the handle: from, to, at, in words."""
    handle = page.page.get_by_role("separator")
    return tuple(handle.get_attribute(f"aria-value{name}") for name in ("min", "max", "now", "text"))


def test_an_engine_that_is_held_back_has_a_button_that_lets_it_go_on(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(engine={"state": "running"}))
    assert page.page.locator(".nbe-title .nbe-button[aria-label$=engine]:visible").count() == 0
    for seq, (state, label) in enumerate({"paused": "Resume", "asleep": "Wake"}.items(), 2):
        page.deliver(frame(seq, reset=False, engine={"state": state}))
        page.page.get_by_role("button", name=f"{label} the engine").click()
        sent = page.page.evaluate("models[0].sent.filter((m) => m.kind === 'go_on').length")
        assert sent == seq - 1
    page.deliver(({"kind": "goes_on", "error": "this notebook is not attached"}, []))
    expect(page.page.locator(".nbe-banner")).to_contain_text("this notebook is not attached")
    page.deliver(frame(4, reset=False, engine={"state": "idle"}))
    assert page.page.locator(".nbe-title .nbe-button[aria-label$=engine]:visible").count() == 0
    expect(page.page.locator(".nbe-banner")).to_be_hidden()


def test_everything_can_be_reached_by_tab(open_page: OpenPage, chromium: Browser) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS, requests=[request(0)], words=[word(0)]))
    reached = []
    for _ in range(18):
        page.page.keyboard.press("Tab")
        label = page.page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")
        reached.append(label.split(".")[0])
        if label:
            # Its keys are not the notebook's.
            assert page.page.evaluate("document.activeElement.dataset.lmSuppressShortcuts") == "true", label
    assert [label.split(",")[0] for label in reached[:3]] == ["Steps", "The last hour", "The last day"]
    assert reached[3:17] == [
        "Pop out into a window of its own",
        "KV cache: 0 % held, 0 % cached and free",
        "KV block map",
        "Pause",
        "Position among the last steps",
        "Show steps, each as wide as the others",
        "Zoom out",
        "Zoom in",
        "Show all steps",
        "Export as Chrome trace",
        "Step timeline",
        "Requests",
        "Abort request #0 Once upon a time",
        "Height of the dashboard",
    ]
    page.page.focus(TIMELINE)
    page.page.keyboard.press("Shift+Tab")
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
