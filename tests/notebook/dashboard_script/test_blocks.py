"""The map of KV blocks."""

from __future__ import annotations

import numpy as np
from chromium import needs_chromium
from dashboard_frames import NUMBERS
from dashboard_page import DARK, LIGHT
from notebook_support.dashboard_script import (
    BLOCKS,
    TIP,
    OpenPage,
    assert_color,
    cell,
    frame,
    hover,
    request,
    word,
)
from playwright.sync_api import expect

from nbengine.widgets.dashboard.palette import CACHED_OPACITY, FREE_OPACITY, REQUESTS, ROLES

pytestmark = needs_chromium


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

    slots = {"num_state_slots": 9, "num_free_state_slots": 7, "num_checkpoints": 1}
    page.deliver(frame(2, reset=False, changed={0: word(1, False, 4), 3: word(0, True, 9)}, **slots))
    assert_color(look(0), REQUESTS[4])
    assert_color(look(3), ROLES["cached"], CACHED_OPACITY)
    assert_color(look(2), REQUESTS[0])
    counts = "4 held · 2 shared · 2 cached · 0 free · 2 of 9 state slots held · 1 checkpoint"
    assert page.text(".nbe-blocks .nbe-now") == counts
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
    requests = [
        request(5, state="finished", id="old"),
        request(NUMBERS + 5, preview="Name a sea"),
        request(12),
    ]
    page.deliver(frame(words=words, requests=requests))
    assert hover(page, BLOCKS, *cell(page, 0)) == "block 0: free"
    assert hover(page, BLOCKS, *cell(page, 1)) == "block 1: free, cached\nlast taken by #12 Once upon a time"
    assert hover(page, BLOCKS, *cell(page, 3)) == "block 3: 1 reference\nheld by #77"
    both = f"block 2: 2 references, cached\nheld by #{NUMBERS + 5} Name a sea"
    assert hover(page, BLOCKS, *cell(page, 2)) == both
    page.page.wait_for_function("() => models[0].sent.some((m) => m.kind === 'block' && m.block === 2)")
    lines = ["block 2: shared by 2 requests, cached", "held by new and other", "prefix: Once upon"]
    page.deliver(({"kind": "block", "rank": 0, "block": 2, "lines": lines}, []))
    # The answer says all of it: nothing is said twice.
    assert page.text(TIP).split("\n") == lines
    # The answer is old when the block is another's.
    page.deliver(frame(2, reset=False, changed={2: word(1, False, 12)}))
    assert page.text(TIP) == "block 2: 1 reference\nheld by #12 Once upon a time"
    # The kernel is asked once more, and not again for what happens to other blocks.
    asked = "models[0].sent.filter((m) => m.kind === 'block' && m.block === 2).length"
    page.page.wait_for_function(f"() => {asked} === 2")
    page.deliver(frame(3, reset=False, changed={3: word(0)}))
    page.deliver(({"kind": "block", "rank": 0, "block": 2, "lines": lines}, []))
    assert page.text(TIP).split("\n") == lines
    assert page.page.evaluate(asked) == 2

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
    legend = page.text(".nbe-blocks .nbe-legend")
    assert "blocks 0 to 65,535 of 100,000" in legend
    page.page.get_by_role("button", name="Show every block").click()
    page.settle()
    assert page.text(".nbe-blocks .nbe-now") == "30,000 held · 0 shared · 20,000 cached · 50,000 free"
    size = page.page.evaluate(
        f"(({{clientWidth: w, clientHeight: h}}) => [w, h])(document.querySelector('{BLOCKS}'))"
    )
    columns, rows = size[0] // 9, size[1] // 9
    bin_size = -(-100_000 // (columns * rows))
    assert f"\na cell: {bin_size} blocks\n" in page.text(".nbe-blocks .nbe-legend")

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
