"""The timeline of steps, and the data-parallel waves."""

from __future__ import annotations

import json
from typing import Any

from chromium import needs_chromium
from dashboard_frames import START, FakeEngine
from notebook_support.dashboard_script import (
    AXIS,
    GUTTER,
    STEPS,
    TIMELINE,
    TIP,
    OpenPage,
    assert_color,
    column,
    frame,
    freeze,
    hover,
    request,
    step,
    word,
)
from playwright.sync_api import expect

from nbengine.widgets.dashboard.palette import REQUESTS, ROLES

pytestmark = needs_chromium


def test_the_timeline_shows_what_each_request_did(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    page.deliver(frame(steps=STEPS, requests=[request(0), request(1)]))

    def look(ordinal: int, row: int) -> tuple[int, ...]:
        return page.pixel(TIMELINE, column(page, ordinal, 9), AXIS + 18 * row + 9)

    for ordinal in (0, 1):
        assert_color(look(ordinal, 0), ROLES["prefill"])
    for ordinal in (2, 3, 4, 5, 6, 7):
        assert_color(look(ordinal, 0), ROLES["decode"])
    assert_color(look(1, 1), ROLES["prefill"])
    assert_color(look(4, 1), ROLES["decode"])
    assert_color(look(5, 1), ROLES["preempted"])
    assert_color(look(7, 1), ROLES["recompute"])
    assert_color(look(8, 1), ROLES["decode"])
    assert_color(page.pixel(TIMELINE, column(page, 1, 9) - 3, AXIS + 18 + 9), ROLES["hit"])
    assert look(8, 0)[3] < 255

    told = hover(page, TIMELINE, column(page, 0, 9), AXIS + 9).split("\n")
    assert told[0].startswith("step 1 · ")
    assert told[1:] == [
        "250 ms · 64 tokens",
        "64 prefill, 0 decode",
        "1 running, 2 waiting",
        "90 free blocks, 10 findable by prefix",
        "#0 Once upon a time",
        "prefill: 64 tokens",
    ]
    told = hover(page, TIMELINE, column(page, 1, 9), AXIS + 18 + 9).split("\n")
    assert told[-3:] == ["#1 Once upon a time", "prefill: 28 tokens", "32 found in the prefix cache"]
    assert hover(page, TIMELINE, column(page, 5, 9), AXIS + 18 + 9).endswith("preempted before this step")
    assert hover(page, TIMELINE, column(page, 7, 9), AXIS + 9).endswith("ended after this step")
    told = hover(page, TIMELINE, column(page, 7, 9), AXIS + 18 + 9).split("\n")
    assert told[-2:] == ["computed again: 60 tokens", "resumed"]
    assert "– · 1 token" in hover(page, TIMELINE, column(page, 8, 9), AXIS + 9)
    # Known later: how long it took, and who has ended since.
    page.deliver(frame(2, reset=False, steps=[[9, None, 0.125, [1]], [8, None, 0.01, [0]]]))
    told = hover(page, TIMELINE, column(page, 8, 9), AXIS + 18 + 9).split("\n")
    assert told[1] == "125 ms · 1 token"
    assert told[-1] == "ended after this step"
    assert "preemption" in page.text(".nbe-scheduler .nbe-now")


def test_the_timeline_can_be_paused_gone_back_in_and_zoomed(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    steps = [step(1, [0, 5, 1, -1]), *[step(number, [0, 1, 0, -1]) for number in range(2, 2001)]]
    page.deliver(frame(steps=steps))
    place, pause = page.page.locator(".nbe-place"), page.page.locator(".nbe-timeline button").first
    expect(place).to_contain_text("step 2,000")
    page.page.focus(TIMELINE)
    page.page.keyboard.press("ArrowLeft")
    assert page.text(TIP).startswith("step 2,000 ·")
    expect(pause).to_have_text("▶ Live")
    page.page.keyboard.press("Shift+ArrowLeft")
    assert page.text(TIP).startswith("step 1,990 ·")
    page.page.keyboard.press("ArrowUp")
    assert page.text(TIP).endswith("#0\ndecode: 1 token")
    expect(page.page.locator(".nbe-announcer")).to_contain_text("step 1,990")
    page.page.keyboard.press("Home")
    assert page.text(TIP).startswith("step 1 ·")
    page.page.keyboard.press("Escape")
    page.settle()
    assert page.page.locator(TIP).count() == 0
    before = place.inner_text()

    # New steps do not move what is paused; nor does a frame with a reset.
    page.deliver(frame(2, reset=False, steps=[step(2001), step(2002)]))
    assert place.inner_text() == before
    page.deliver(frame(1, steps=steps[:50]))
    page.deliver(frame(2, reset=False, steps=[*steps[50:], step(2001), step(2002)]))
    assert place.inner_text() == before
    expect(pause).to_have_text("▶ Live")
    page.page.wait_for_function("() => models[0].get('view').paused_at > 0 && models[0].saved > 0")

    page.page.keyboard.press("End")
    expect(place).to_contain_text("step 2,002")
    expect(pause).to_have_text("❚❚ Pause")
    page.page.keyboard.press("Space")
    expect(pause).to_have_text("▶ Live")
    pause.click()
    expect(pause).to_have_text("❚❚ Pause")

    # The slider, dragging and the wheel.
    page.page.locator(".nbe-slider").fill("700")
    expect(place).to_contain_text("step 700")
    box = page.page.locator(TIMELINE).bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 400, box["y"] + 100)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 460, box["y"] + 100, steps=3)
    page.page.mouse.up()
    expect(place).to_contain_text("step 690")
    page.page.mouse.wheel(120, 0)
    expect(place).to_contain_text("step 710")
    page.page.evaluate("document.activeElement.blur()")
    scrolled = page.page.evaluate("scrollY")
    page.page.set_viewport_size({"width": 1280, "height": 500})
    page.page.mouse.move(box["x"] + 400, box["y"] + 30)
    page.page.mouse.wheel(0, 60)
    page.page.wait_for_function("(before) => scrollY > before", arg=scrolled)
    expect(place).to_contain_text("step 710")

    # Zooming out shows all of it, in its own colours.
    page.page.set_viewport_size({"width": 1280, "height": 1000})
    page.page.get_by_label("Show all steps").click()
    page.settle()
    assert_color(page.pixel(TIMELINE, GUTTER + 600, AXIS + 9), ROLES["decode"])
    told = hover(page, TIMELINE, GUTTER + 10, AXIS + 9)
    assert 10 < int(told.split(" ")[1].replace(",", "")) < 25
    page.page.focus(TIMELINE)
    page.page.keyboard.press("+")
    page.page.keyboard.press("Home")
    assert page.text(TIP).startswith("step 1 ·")


def test_ten_thousand_steps_are_kept_and_told_right(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    engine = FakeEngine(num_blocks=150, seqs=8, is_computing=True)
    rank = engine.ranks[0]
    told: list[list[Any]] = []
    for _ in range(6):
        engine.run(1750, arrivals=0.12)
        told += list(rank.all_steps)[-len(rank.steps) :]
        page.deliver(engine.frame(reset=engine.seq == 0))
    expect(page.page.locator(".nbe-place")).to_contain_text(f"step {rank.step_number:,}")
    page.page.focus(TIMELINE)
    page.page.keyboard.press("Home")
    assert page.text(TIP).startswith(f"step {rank.step_number - 9_999:,} ·")

    # What the script remembers of each step is what was sent, whole and in parts.
    sent = [
        [*item[:7], None, *item[8:]] if index % 3 and is_same(told, index) else item
        for index, item in enumerate(told)
    ]
    text = page.page.evaluate(
        """async (text) => {
            const items = JSON.parse(text);
            const { History } = await import("/static/dashboard/history.js");
            const history = new History();
            for (const item of items) history.take(item);
            const steps = [];
            for (let ordinal = history.begin; ordinal < history.end; ordinal += 1) {
                const events = [[], []];
                history.visitEvents(ordinal, ordinal + 1, (_, number, kind) => events[kind].push(number));
                const entries = history.entriesAt(ordinal).map((e) => [e.number, e.tokens, e.kind, e.hit]);
                steps.push([history.at("step", ordinal), entries, ...events]);
            }
            return JSON.stringify(steps);
        }""",
        json.dumps(sent),
    )
    found = json.loads(text)
    assert len(found) == 10_000
    for (number, entries, preempted, finished), item in zip(found, told[-10_000:], strict=True):
        expected = [item[7][at : at + 4] for at in range(0, len(item[7]), 4)]
        assert number == item[0]
        assert sorted(entries) == sorted(expected)
        assert (preempted, finished) == (item[8] or [], item[9] or [])
    assert any(item[8] for item in told[-10_000:])


def test_what_comes_late_is_put_in_its_place(open_page: OpenPage) -> None:
    page = open_page()
    steps = [
        step(1, [0, 16, 2, -1, 7, 1, 0, -1]),
        # Preempted and admitted again in one step, with the same number of tokens.
        step(2, [0, 16, 2, 0], preempted=[0]),
        step(3, [0, 16, 2, -1], preempted=[5]),
        [1, None, 0.5, [7]],
        [1, None, None, [7, 8]],
        [9, None, 0.5, [3]],
    ]
    found = page.page.evaluate(
        """async (items) => {
            const { History } = await import("/static/dashboard/history.js");
            const history = new History();
            for (const item of items) history.take(item);
            return [0, 1, 2].map((ordinal) => {
                const events = [];
                history.visitEvents(ordinal, ordinal + 1, (_, number, kind) => events.push([number, kind]));
                const first = history.entriesAt(ordinal).find((entry) => entry.number === 0);
                return [events, first.tokens, first.hit, Math.round(100 * history.at("seconds", ordinal))];
            });
        }""",
        steps,
    )
    preempted, finished = 0, 1
    assert found == [
        [[[7, finished], [8, finished]], 16, -1, 50],
        [[[0, preempted]], 16, 0, 1],
        [[[5, preempted]], 16, -1, 1],
    ]


def is_same(steps: list[list[Any]], index: int) -> bool:
    """Return whether a step did what the one before did: a token each."""
    now, before = steps[index][7], steps[index - 1][7] if index else []
    one_each = all(now[at + 1 : at + 4] == [1, 0, -1] for at in range(0, len(now), 4))
    return one_each and now[::4] == before[::4] and not steps[index][8]


def test_a_lost_frame_is_noticed_and_a_reset_frame_mends_it(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(1, steps=[step(1, [0, 5, 1, -1])], words=[word(0)]))
    page.page.evaluate("models[0].sent.length = 0")
    freeze(page)
    page.page.evaluate("performance.now = () => 1e6")
    deliver = "([content, id]) => models[0].deliver(content, [])"
    page.page.evaluate(deliver, [frame(3, reset=False, steps=[step(7, [0, 9, 1, -1])])[0], 0])
    assert page.sent("hello") == [{"kind": "hello"}]
    page.page.evaluate(deliver, [frame(4, reset=False, steps=[step(8)])[0], 0])
    # It does not ask again at once, and takes nothing that is not connected.
    assert len(page.sent("hello")) == 1
    page.page.clock.run_for(100)
    expect(page.page.locator(".nbe-place")).to_contain_text("step 1 ·")
    page.page.evaluate(deliver, [frame(9, steps=[step(7, [0, 9, 1, -1]), step(8)])[0], 0])
    page.page.evaluate(deliver, [frame(10, reset=False, steps=[step(9)], history_lost=True)[0], 0])
    page.page.clock.run_for(100)
    expect(page.page.locator(".nbe-place")).to_contain_text("step 9 ·")
    page.page.focus(TIMELINE)
    page.page.keyboard.press("ArrowLeft")
    assert page.text(TIP).endswith("steps before it were lost")


def test_ranks_and_waves_are_shown_and_one_rank_can_be_chosen(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    engine = FakeEngine(ranks=2, num_blocks=20, lock_step=True)
    engine.ranks[0].add(100, 200, id="zero")
    engine.run(40, arrivals=0)
    for rank in engine.ranks:
        rank.wave = 5
        rank.now = START + 3
    page.deliver(engine.frame(reset=True))
    waves = ".nbe-waves canvas"
    assert page.text(".nbe-waves h3") == "Data-parallel waves"
    assert page.text(".nbe-waves .nbe-now") == "wave 5"
    width = page.page.evaluate(f"document.querySelector('{waves}').clientWidth")
    assert_color(page.pixel(waves, width - 100, AXIS + 10), ROLES["decode"])
    assert_color(page.pixel(waves, width - 100, AXIS + 30 + 10), ROLES["dummy"])
    told = hover(page, waves, width - 100, AXIS + 10).split("\n")
    assert told[0].startswith("rank 0 ·")
    assert told[1:] == ["wave 5 runs", "in 3.00 s: 8 steps", "0 dummy steps", "1 request"]
    page.page.focus(waves)
    page.page.keyboard.press("ArrowDown")
    assert page.text(TIP).split("\n")[3] == "8 dummy steps"
    # Where the request went: a mark below rank 0 when it came, and none below rank 1.
    assert_color(page.pixel(waves, GUTTER + 1, AXIS + 30 - 3), REQUESTS[0])
    assert page.pixel(waves, GUTTER + 1, AXIS + 60 - 3)[3] == 0
    assert page.text(".nbe-place").startswith("step 40 ·")
    page.page.select_option(".nbe-select", "1")
    expect(page.page.locator(".nbe-place")).to_have_text("")
    assert page.text(".nbe-blocks .nbe-now") == "0 held · 0 shared · 0 cached · 20 free"
    assert page.page.locator(".nbe-table .nbe-cell-rank").first.is_visible()
    # One core that steps for itself has no waves.
    page.deliver(FakeEngine().frame(reset=True))
    assert page.page.locator(".nbe-waves").is_hidden()
    assert page.page.locator(".nbe-rank").is_hidden()


def test_what_is_paused_stays_at_its_time_when_its_rank_leaves(open_page: OpenPage) -> None:
    page = open_page()
    page.mount(view={"axis": "steps"})
    content, buffers = FakeEngine(ranks=2, num_blocks=1).frame(reset=True)
    for rank, seconds in zip(content["ranks"], (0.01, 0.02), strict=True):
        rank["steps"] = [[number, START + number * seconds, *step(number)[2:]] for number in range(1, 401)]
    page.deliver((content, buffers))
    page.page.select_option(".nbe-select", "1")
    live = page.page.locator(".nbe-waves .nbe-live")
    expect(live).to_be_hidden()
    page.page.locator(".nbe-slider").fill("100")
    place = page.page.locator(".nbe-place")
    expect(place).to_contain_text("step 100 ·")
    # The figures of the engine cores are not kept, which is said.
    expect(live).to_be_visible()
    clock = place.inner_text().split(" · ")[1]
    alone, _ = FakeEngine(num_blocks=1).frame(reset=True)
    page.deliver((alone | {"seq": content["seq"] + 1, "reset": False}, [b"\0" * 4]))
    expect(place).to_have_text(f"step 200 · {clock}")
