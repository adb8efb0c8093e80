"""The dashboard's script in a browser, on a bare page with a model that stands in for the notebook's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_frames import NUMBERS, START, FakeEngine, Frame, table_change
from dashboard_page import DARK, LIGHT, DashboardPage, browser
from playwright.sync_api import Browser, expect

from nbengine.widgets.palette import CACHED_OPACITY, FREE_OPACITY, REQUESTS, ROLES

CHROMIUM = shutil.which("chromium") or ""
PICTURES = os.environ.get("NBENGINE_TEST_PICTURES")
BLOCKS = ".nbe-blocks canvas"
TIMELINE = ".nbe-timeline canvas"
TIP = ".nbe-tip:not([hidden])"
GUTTER, AXIS, LARGEST = 56, 20, 26
HOSTILE = '"><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>${window.pwned=1}'
SERVER = {"baseUrl": "/user/me/", "token": "t0ken"}

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (Debian's package chromium)")
OpenPage = Callable[..., DashboardPage]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """Open bare pages; no script may have failed on them."""
    pages: list[DashboardPage] = []
    contexts = []

    def open_one(**options: Any) -> DashboardPage:
        contexts.append(chromium.new_context())
        pages.append(DashboardPage(contexts[-1].new_page(), **options))
        return pages[-1]

    yield open_one
    for page in pages:
        assert page.failures() == []
    for context in contexts:
        context.close()


def rgb(color: str) -> np.ndarray[Any, Any]:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])


def assert_color(pixel: tuple[int, ...], color: str, opacity: float = 1, ground: str = "#ffffff") -> None:
    expected = opacity * rgb(color) + (1 - opacity) * rgb(ground)
    assert np.abs(np.array(pixel[:3]) - expected).max() <= 2, (pixel, expected)


def word(references: int, cached: bool = False, holder: int | None = None) -> int:
    return min(references, 4095) | cached << 12 | (NUMBERS if holder is None else holder % NUMBERS) << 13


def step(number: int, entries: list[int] | None = None, **how: Any) -> list[Any]:
    running, waiting = how.get("running", 1), how.get("waiting", 0)
    end = [entries, how.get("preempted"), how.get("finished")]
    return [number, START + number * 0.01, how.get("seconds", 0.01), running, waiting, 90, 10, *end]


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "number": number,
        "id": f"cmpl-{number}",
        "client": 0,
        "state": "running",
        "num_prompt_tokens": 100,
        "num_cached_tokens": 32,
        "num_computed_tokens": 80,
        "num_output_tokens": 5,
        "max_total_tokens": 150,
        "num_preemptions": 0,
        "added_at": START,
        "first_token_at": None,
        "ended_at": None,
        "finish_reason": None,
        "own": True,
        "foreground": False,
        "preview": "Once upon a time",
    } | fields


def frame(
    seq: int = 1,
    *,
    reset: bool = True,
    steps: list[list[Any]] | None = None,
    words: list[int] | None = None,
    changed: dict[int, int] | None = None,
    requests: list[dict[str, Any]] | None = None,
    engine: dict[str, Any] | None = None,
    **info: Any,
) -> Frame:
    """A frame of one engine core, by hand."""
    content, _ = FakeEngine(num_blocks=1).frame(reset=True)
    buffers = []
    rank = content["ranks"][0]
    if words is not None:
        buffers, rank["blocks"] = [np.array(words, "<u4").tobytes()], {"buffer": 0, "full": True}
    elif changed is not None:
        pairs = np.array(list(changed.items()), "<u4")
        buffers, rank["blocks"] = [pairs.tobytes()], {"buffer": 0, "full": False}
    else:
        rank["blocks"] = None
    rank.update(steps=steps or [], requests=table_change({}, requests or []), **info)
    content["engine"].update(engine or {})
    content.update(seq=seq, reset=reset)
    return content, buffers


def cell(page: DashboardPage, index: int) -> tuple[float, float]:
    """The place of a block's cell in a map of few blocks: its upper left quarter."""
    columns = int(page.page.evaluate("document.querySelector('.nbe-blocks canvas').clientWidth")) // LARGEST
    return (index % columns) * LARGEST + 4, (index // columns) * LARGEST + 4


def hover(page: DashboardPage, canvas: str, x: float, y: float) -> str:
    page.page.hover(canvas, position={"x": x, "y": y})
    page.settle()
    return page.text(TIP) if page.page.locator(TIP).count() else ""


def freeze(page: DashboardPage) -> None:
    """From now on the page's time passes when the test says so."""
    page.page.clock.install(time=0)
    page.page.clock.pause_at(1000)


def tile(page: DashboardPage, label: str) -> str:
    return page.page.locator(".nbe-tile", has_text=label).locator(".nbe-value").inner_text()


def test_the_header_says_what_was_published_and_a_dash_for_what_was_not(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    assert page.sent("hello") == [{"kind": "hello"}]
    assert page.text(".nbe-banner") == "waiting for the kernel …"
    content, buffers = frame(
        num_blocks=400, num_free_blocks=300, prefix_cache_queries=80, prefix_cache_hits=20
    )
    content["rates"].update(time_to_first_token=None, tokens_in_per_second=0)
    page.deliver((content, buffers))
    assert page.text(".nbe-title").split("\n") == [
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
    assert page.text(".nbe-banner") == "it was stopped"


def test_blocks_have_the_colours_of_who_holds_them(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = [
        word(0),
        word(0, True, 3),
        word(1, False, 0),
        word(1, True, 9),
        word(3, True, 1),
        word(4095, True, 2),
    ]
    page.deliver(frame(words=words))
    assert page.text(".nbe-blocks .nbe-now") == "4 held · 2 shared · 1 cached · 1 free"

    def look(index: int) -> tuple[int, ...]:
        return page.pixel(BLOCKS, *cell(page, index))

    def assert_look(ground: str) -> None:
        assert_color(look(0), ROLES["free"], FREE_OPACITY, ground)
        assert_color(look(1), ROLES["cached"], CACHED_OPACITY, ground)
        for index, number in ((2, 0), (3, 9), (4, 1), (5, 2)):
            assert_color(look(index), REQUESTS[number % len(REQUESTS)])

    assert_look("#ffffff")
    assert look(6)[3] == 0
    assert hover(page, BLOCKS, *cell(page, 5)).startswith("block 5: 4,095 or more references, cached")
    page.page.mouse.move(0, 0)
    # Digits in the middle of those that are shared, and of no others.
    x, y = cell(page, 4)
    inside = {page.pixel(BLOCKS, x + dx, y + 8) for dx in range(4, 13)}
    assert len(inside) > 1
    x, y = cell(page, 3)
    assert len({page.pixel(BLOCKS, x + dx, y + 8) for dx in range(4, 13)}) == 1

    page.deliver(frame(2, reset=False, changed={0: word(1, False, 4), 3: word(0, True, 9)}))
    assert_color(look(0), REQUESTS[4])
    assert_color(look(3), ROLES["cached"], CACHED_OPACITY)
    assert_color(look(2), REQUESTS[0])
    assert page.text(".nbe-blocks .nbe-now") == "4 held · 2 shared · 2 cached · 0 free"
    page.deliver(frame(3, reset=False, changed={0: word(0), 3: word(1, True, 9)}))
    # The page's theme changes while it is shown.
    page.set_theme(DARK)
    page.settle()
    page.settle()
    assert page.page.get_attribute(".nbe-dash", "data-theme") == "dark"
    assert_look("#111111")
    page.set_theme(LIGHT)
    page.settle()
    page.settle()
    assert page.page.get_attribute(".nbe-dash", "data-theme") == "light"
    assert_look("#ffffff")


def test_pointer_and_keyboard_tell_of_a_block(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = [word(0), word(0, True, 12), word(2, True, NUMBERS + 5), word(1, False, 77)]
    requests = [request(5, state="finished", id="old"), request(NUMBERS + 5, id="new"), request(12)]
    page.deliver(frame(words=words, requests=requests))
    assert hover(page, BLOCKS, *cell(page, 0)) == "block 0: free"
    assert hover(page, BLOCKS, *cell(page, 1)) == "block 1: free, cached\nlast taken by #12 cmpl-12"
    assert hover(page, BLOCKS, *cell(page, 3)) == "block 3: 1 reference\nheld by #77"
    both = f"block 2: 2 references, cached\nheld by #{NUMBERS + 5} new"
    assert hover(page, BLOCKS, *cell(page, 2)) == both
    page.page.wait_for_function("() => models[0].sent.some((m) => m.kind === 'block' && m.block === 2)")
    lines = ["held by new and other", "prefix: Once upon"]
    page.deliver(({"kind": "block", "rank": 0, "block": 2, "lines": lines}, []))
    assert page.text(TIP).split("\n") == both.split("\n") + lines
    # The answer is old when the block is another's.
    page.deliver(frame(2, reset=False, changed={2: word(1, False, 12)}))
    assert page.text(TIP) == "block 2: 1 reference\nheld by #12 cmpl-12"

    page.page.mouse.move(0, 0)
    assert page.page.locator(TIP).count() == 0
    page.page.focus(BLOCKS)
    said = page.page.locator(".nbe-announcer")
    for key, told in (("ArrowRight", 0), ("ArrowRight", 1), ("End", 3), ("ArrowLeft", 2), ("Home", 0)):
        page.page.keyboard.press(key)
        assert page.text(TIP).startswith(f"block {told}:")
    expect(said).to_have_text("block 0: free")
    assert page.page.locator(".nbe-cell-mark").is_visible()
    page.page.keyboard.press("Escape")
    assert page.page.locator(TIP).count() == 0


def test_a_hundred_thousand_blocks_are_mixed_in_cells(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    words = np.full(100_000, word(0), np.uint32)
    words[:30_000] = word(1, False, 2)
    words[30_000:50_000] = word(0, True, 2)
    page.deliver(frame(words=words.tolist()))
    assert page.text(".nbe-blocks .nbe-now") == "30,000 held · 0 shared · 20,000 cached · 50,000 free"
    size = page.page.evaluate(
        f"(({{clientWidth: w, clientHeight: h}}) => [w, h])(document.querySelector('{BLOCKS}'))"
    )
    columns, rows = size[0] // 9, size[1] // 9
    bin_size = -(-100_000 // (columns * rows))
    assert page.text(".nbe-blocks .nbe-legend").endswith(f"a cell: {bin_size} blocks")

    def look(block: int, dx: int = 4) -> tuple[int, ...]:
        index = block // bin_size
        return page.pixel(BLOCKS, (index % columns) * 9 + dx, (index // columns) * 9 + 4)

    assert_color(look(15_000), REQUESTS[2])
    assert_color(look(40_000), ROLES["cached"], CACHED_OPACITY)
    assert_color(look(75_000), ROLES["free"], FREE_OPACITY)
    # A bin of which a half is another's shows both.
    first = 75_000 // bin_size * bin_size
    changed = {block: word(2, False, 1) for block in range(first, first + bin_size // 2)}
    page.deliver(frame(2, reset=False, changed=changed))
    assert_color(look(75_000, 1), REQUESTS[1])
    assert_color(look(75_000, 7), ROLES["free"], FREE_OPACITY)
    index = 75_000 // bin_size
    told = hover(page, BLOCKS, (index % columns) * 9 + 4, (index // columns) * 9 + 4).split("\n")
    assert told[0] == f"blocks {first:,} to {first + bin_size - 1:,}"
    half = bin_size // 2
    assert told[1] == f"{half} held ({half} shared), 0 cached, {bin_size - half} free"
    assert told[2] == f"block {first:,}: 2 references"


STEPS = [
    step(1, [0, 64, 1, -1], seconds=0.25, waiting=2),
    step(2, [0, 36, 1, -1, 1, 28, 1, 32]),
    step(3, [0, 1, 0, -1, 1, 1, 0, -1]),
    step(4),
    step(5),
    step(6, [0, 1, 0, -1], preempted=[1], waiting=1),
    step(7),
    step(8, [0, 1, 0, -1, 1, 60, 2, 0], finished=[0]),
    step(9, [1, 1, 0, -1], seconds=None),
]


def column(page: DashboardPage, ordinal: int, count: int, scale: float = 6) -> float:
    """The middle of a step's column while the newest step is at the right edge."""
    width = float(page.page.evaluate("document.querySelector('.nbe-timeline canvas').clientWidth"))
    return width - (count - ordinal - 0.5) * scale


def test_the_timeline_shows_what_each_request_did(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
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
        "90 free blocks, 10 cached",
        "#0 cmpl-0",
        "prefill: 64 tokens",
    ]
    told = hover(page, TIMELINE, column(page, 1, 9), AXIS + 18 + 9).split("\n")
    assert told[-3:] == ["#1 cmpl-1", "prefill: 28 tokens", "32 found in the prefix cache"]
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


def test_pausing_going_back_and_zooming(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    steps = [step(1, [0, 5, 1, -1]), *[step(number, [0, 1, 0, -1]) for number in range(2, 2001)]]
    page.deliver(frame(steps=steps))
    place, pause = page.page.locator(".nbe-place"), page.page.locator(".nbe-tools button").first
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

    # New steps do not move what is paused; nor does a frame that begins anew.
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
    engine = FakeEngine(num_blocks=150, seqs=8)
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
    """Whether a step did what the one before did: a token each."""
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


def test_the_table_and_abort_with_an_answer(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    rows = [
        request(0),
        request(1, own=False),
        request(
            2,
            state="finished",
            finish_reason="length",
            ended_at=START + 2,
            num_computed_tokens=140,
            num_output_tokens=40,
        ),
        request(3, state="waiting", num_computed_tokens=0, num_cached_tokens=-1, num_output_tokens=0),
    ]
    page.deliver(frame(requests=rows))
    table = page.page.locator(".nbe-table tbody tr")
    first = [text.strip() for text in table.nth(0).locator("td:visible").all_inner_texts()]
    prompt, output = "80 / 100, 32 hit", "5 / 50"
    assert first == ["#0cmpl-0", "running", prompt, output, "0.00 ms", "Once upon a time", "Abort"]
    widths = (
        table.nth(0).locator(".nbe-track i").evaluate_all("(nodes) => nodes.map((node) => node.style.width)")
    )
    assert widths == ["32%", "48%", "10%", "0%"]
    assert table.nth(0).get_by_role("progressbar").nth(1).get_attribute("aria-valuenow") == "5"
    assert "another client's" in table.nth(1).inner_text()
    assert table.nth(2).locator(".nbe-cell-prompt").inner_text() == "0 / 100"
    # Those that have ended come last.
    assert "length" in table.nth(3).inner_text()
    assert "2.00 s" in table.nth(3).inner_text()
    assert [table.nth(row).get_by_role("button").count() for row in range(4)] == [1, 0, 1, 0]
    assert page.text(".nbe-requests .nbe-now") == "2 running · 1 waiting · 0 preempted"

    # By keyboard; the focus stays while rows move.
    abort = page.page.get_by_role("button", name="Abort request cmpl-3")
    abort.focus()
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("Enter")
    assert page.sent("abort") == [{"kind": "abort", "rank": 0, "number": 3}]
    expect(table.nth(2).locator(".nbe-status")).to_have_text("aborting …")
    page.deliver(frame(2, reset=False, requests=[rows[3] | {"added_at": START - 1}]))
    expect(abort).to_be_focused()
    page.deliver(({"kind": "aborted", "rank": 0, "number": 3, "error": "it is not yours"}, []))
    expect(table.nth(0).locator(".nbe-status")).to_have_text("not aborted: it is not yours")
    page.page.keyboard.press("Enter")
    page.deliver(({"kind": "aborted", "rank": 0, "number": 3, "error": None}, []))
    expect(table.nth(0).locator(".nbe-status")).to_have_text("aborted")
    ended = rows[3] | {"state": "finished", "finish_reason": "abort"}
    # What stays of the first one is not said again.
    change = table_change({row["number"]: row for row in rows}, [rows[0] | {"num_output_tokens": 6}, ended])
    assert change == {"gone": [1, 2], "new": [], "status": change["status"], "progress": [0, 80, 6]}
    last = frame(3, reset=False)
    last[0]["ranks"][0]["requests"] = change
    page.deliver(last)
    assert table.count() == 2
    assert [table.nth(0).locator(".nbe-bar").nth(at).inner_text().strip() for at in (0, 1)] == [
        prompt,
        "6 / 50",
    ]
    assert "cmpl-0" in table.nth(0).inner_text()
    assert table.nth(1).get_by_role("button").count() == 0
    assert page.posts == []


@pytest.mark.parametrize(
    ("foreground", "path", "status", "text", "posted"),
    [
        (True, "api/kernels/ab-12", 204, "the cell was interrupted", True),
        (True, "api/kernels/ab-12", 403, "not aborted: the server answered 403 Forbidden", True),
        (False, "api/kernels/ab-12", 204, "the kernel is busy: it will be aborted when the cell ends", False),
        (True, "", 204, "the kernel is busy: it will be aborted when the cell ends", False),
        (
            True,
            "api/kernels/../../evil?",
            204,
            "the kernel is busy: it will be aborted when the cell ends",
            False,
        ),
    ],
)
def test_abort_without_an_answer(
    open_page: OpenPage, foreground: bool, path: str, status: int, text: str, posted: bool
) -> None:
    page = open_page(config=SERVER)
    page.answer_status = status
    page.page.evaluate("document.cookie = 'other=1'; document.cookie = '_xsrf=2%7Cabc'")
    page.mount(interrupt_path=path)
    page.deliver(frame(requests=[request(0, foreground=foreground)]))
    freeze(page)
    page.page.evaluate("document.querySelector('.nbe-abort').click()")
    page.page.clock.run_for(1400)
    assert page.text(".nbe-status") == "aborting …"
    page.page.clock.run_for(200)
    while page.text(".nbe-status").endswith("…"):
        page.page.clock.run_for(20)
    assert page.text(".nbe-status") == text
    assert [address for address, _ in page.posts] == ["/user/me/api/kernels/ab-12/interrupt"] * posted
    for _, headers in page.posts:
        assert headers["x-xsrftoken"] == "2|abc"
        assert headers["authorization"] == "token t0ken"


def test_hostile_text_stays_text(open_page: OpenPage) -> None:
    page = open_page()
    dialogs: list[str] = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    evil = dict.fromkeys(("name", "model", "topology", "device", "dtype", "state", "note"), HOSTILE)
    fields = {"id": HOSTILE, "preview": HOSTILE, "finish_reason": HOSTILE}
    rows = [request(0, **fields), request(1, **fields, state="finished")]
    page.mount(interrupt_path=HOSTILE)
    page.deliver(frame(engine=evil, requests=rows, words=[word(1, False, 0)], steps=[step(1, [0, 5, 1, -1])]))
    page.page.locator(".nbe-abort").first.click()
    page.deliver(({"kind": "aborted", "rank": 0, "number": 0, "error": HOSTILE}, []))
    hover(page, BLOCKS, *cell(page, 0))
    page.page.wait_for_function("() => models[0].sent.some((m) => m.kind === 'block')")
    page.deliver(({"kind": "block", "rank": 0, "block": 0, "lines": [HOSTILE]}, []))
    assert page.text(TIP).endswith(f"held by #0 {HOSTILE}\n{HOSTILE}")
    hover(page, TIMELINE, column(page, 0, 1), AXIS + 9)
    expect(page.page.locator(".nbe-tip")).to_contain_text(HOSTILE)
    for selector in (
        ".nbe-name",
        ".nbe-model",
        ".nbe-state",
        ".nbe-banner",
        ".nbe-id",
        ".nbe-preview",
        ".nbe-status",
    ):
        assert HOSTILE in page.text(selector)
    with page.page.expect_download() as downloading:
        page.deliver(({"kind": "export", "name": "../../" + HOSTILE, "text": HOSTILE}, []))
    assert "/" not in downloading.value.suggested_filename
    assert Path(downloading.value.path()).read_text() == HOSTILE
    assert page.page.evaluate("[window.pwned ?? null, document.querySelectorAll('img').length]") == [None, 0]
    assert page.page.locator(".nbe-dash script, .nbe-dash a, .nbe-tip *:not(div)").count() == 0
    assert dialogs == []


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


def test_a_saved_state_is_drawn_and_says_that_it_is_one(open_page: OpenPage) -> None:
    page = open_page()
    engine = FakeEngine(num_blocks=6)
    engine.ranks[0].add(40, 3, id="saved-1", own=True)
    engine.run(2, arrivals=0)
    snapshot = engine.snapshot()
    freeze(page)
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
    live["ranks"][0]["requests"]["new"][0]["id"] = "live-1"
    page.page.evaluate("([content]) => models[0].deliver(content, [btoa('\\0'.repeat(24))])", [live])
    page.page.clock.run_for(100)
    assert page.page.locator(".nbe-banner").is_hidden()
    assert "live-1" in page.text(".nbe-table")
    assert page.page.locator(".nbe-abort:visible").count() == 1
    # A kernel that falls silent is missed after a while.
    page.page.clock.run_for(25_000)
    assert page.text(".nbe-banner").startswith("The kernel does not answer.")


def test_only_what_is_seen_is_alive(open_page: OpenPage) -> None:
    page = open_page()
    freeze(page)
    page.mount()
    page.page.wait_for_function("() => models[0].sent.some((m) => m.kind === 'alive')")
    page.page.clock.run_for(10_500)
    assert len(page.sent("alive")) == 3
    page.page.evaluate("document.getElementById('cells').style.marginTop = '5000px'")
    page.page.wait_for_function(
        "() => document.querySelector('.nbe-dash').getBoundingClientRect().top > 4000"
    )
    page.page.evaluate(
        "() => new Promise((done) => new IntersectionObserver((e, o) => { o.disconnect(); done(); }).observe(document.body))"
    )
    page.page.clock.run_for(20_000)
    assert len(page.sent("alive")) == 3
    page.page.evaluate("document.getElementById('cells').style.marginTop = '0'")
    page.page.wait_for_function("() => models[0].sent.filter((m) => m.kind === 'alive').length === 4")


def test_several_are_independent_and_leave_nothing(open_page: OpenPage) -> None:
    page = open_page(height=2400, as_bundle=True)
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
    assert page.page.locator(".nbe-tools button:first-child").all_inner_texts() == ["▶ Live", "❚❚ Pause"]
    assert page.page.locator(".nbe-table").nth(1).locator("tbody tr").count() == 2
    assert page.sent("abort", 0) == page.sent("abort", 1) == []
    page.page.evaluate("cleanups[0]()")
    assert page.page.locator(".nbe-dash").count() == page.page.locator(".nbe-tip").count() == 1
    assert page.page.evaluate("models.map((model) => model.listeners.length > 0)") == [False, True]
    page.deliver(frame(2, reset=False, steps=[step(5)]), 1)
    assert places.inner_text().startswith("step 5 ·")


def test_ranks_waves_and_the_choice_of_one(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
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
    assert_color(page.pixel(waves, width - 100, AXIS + 10), ROLES["running"])
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
    page.page.keyboard.press("Home")
    assert page.page.evaluate("models[0].get('height')") == 0
    # As high as its content: nothing of it has to be scrolled to.
    assert root.evaluate("(node) => node.style.height") == ""
    assert page.page.evaluate(
        "() => { const body = document.querySelector('.nbe-body'); return body.scrollHeight <= body.clientHeight; }"
    )


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


LOOKS = [(1280, "light"), (800, "dark"), (480, "light")]
MORE_LOOKS = [(1280, "dark"), (800, "light")]


@pytest.mark.parametrize(("width", "theme"), LOOKS + (MORE_LOOKS if PICTURES else []))
def test_nothing_overlaps_or_is_cut_off(open_page: OpenPage, width: int, theme: str) -> None:
    page = open_page(width=width, height=1000, theme=DARK if theme == "dark" else LIGHT)
    page.mount()
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
    page.page.mouse.move(0, 0)
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.page.screenshot(path=Path(PICTURES) / f"dashboard-{theme}-{width}.png", full_page=True)


def test_everything_can_be_reached_by_tab(open_page: OpenPage, chromium: Browser) -> None:
    page = open_page()
    page.mount()
    page.deliver(frame(steps=STEPS, requests=[request(0)], words=[word(0)]))
    reached = []
    for _ in range(12):
        page.page.keyboard.press("Tab")
        label = page.page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")
        reached.append(label.split(".")[0])
    assert reached[:11] == [
        "KV block map",
        "Pause",
        "Position among the last steps",
        "Zoom out",
        "Zoom in",
        "Show all steps",
        "Export as Chrome trace",
        "Step timeline",
        "Requests",
        "Abort request cmpl-0",
        "Height of the dashboard",
    ]
    page.page.focus(TIMELINE)
    page.page.keyboard.press("Shift+Tab")
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
