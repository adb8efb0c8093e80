"""The table of requests: what it says, aborting, and texts of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import needs_chromium
from dashboard_frames import START, Frame, table_change
from dashboard_page import DashboardPage
from notebook_support.dashboard_script import (
    AXIS,
    BLOCKS,
    STEPS,
    TIMELINE,
    TIP,
    OpenPage,
    cell,
    column,
    frame,
    hover,
    request,
    step,
    word,
)
from playwright.sync_api import expect

HOSTILE = '"><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>${window.pwned=1}'
SERVER = {"baseUrl": "/user/me/", "token": "t0ken"}

pytestmark = needs_chromium


def test_the_table_and_abort_with_an_answer(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    rows = [
        request(0, text="there was a"),
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
    assert first == ["#0Once upon a time", "running", prompt, output, "0.00 ms", "there was a", "Abort"]
    assert table.nth(0).locator(".nbe-id").get_attribute("title") == "cmpl-0: Once upon a time"
    phases = table.locator(".nbe-request-state").evaluate_all("(nodes) => nodes.map((n) => n.dataset.phase)")
    assert phases == ["recompute", "recompute", "waiting", "finished"]
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
    abort = page.page.get_by_role("button", name="Abort request #3 Once upon a time")
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
    change = table_change(
        {row["number"]: row for row in rows},
        [rows[0] | {"num_output_tokens": 6, "text": "there was a king"}, ended],
    )
    assert change == {
        "gone": [1, 2],
        "new": [],
        "status": change["status"],
        "progress": [0, 80, 6],
        "texts": [[0, "there was a king"]],
    }
    last = frame(3, reset=False)
    last[0]["ranks"][0]["requests"] = change
    page.deliver(last)
    assert table.count() == 2
    assert [table.nth(0).locator(".nbe-bar").nth(at).inner_text().strip() for at in (0, 1)] == [
        prompt,
        "6 / 50",
    ]
    assert "there was a king" in table.nth(0).inner_text()
    assert table.nth(1).get_by_role("button").count() == 0
    # The button that had the focus is gone: the table has it.
    scroller = page.page.locator(".nbe-scroller")
    expect(scroller).to_be_focused()
    assert page.posts == []
    page.page.get_by_role("button", name="Abort request #0 Once upon a time").focus()
    left = frame(4, reset=False)
    left[0]["ranks"][0]["requests"] = {"gone": [0], "new": [], "status": [], "progress": []}
    page.deliver(left)
    assert table.count() == 1
    expect(scroller).to_be_focused()


def test_no_row_moves_under_the_pointer(open_page: OpenPage) -> None:
    page = open_page()
    page.mount()
    first, second, third = (request(number, added_at=START + number) for number in range(3))
    page.deliver(frame(requests=[first, second, third], words=[word(1, holder=0)] * 40 + [word(0)] * 600))
    heights = "['.nbe-header', '.nbe-map'].map((name) => document.querySelector(name).offsetHeight)"
    header, blocks = page.page.evaluate(heights)
    button = page.page.get_by_role("button", name="Abort request #1 Once upon a time")
    box = button.bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.page.mouse.down()
    # The first one ends and leaves, another one comes that waits longer, while the button is pressed; above them steps
    # want rows, blocks a larger map, and a banner a place.
    change = {
        "gone": [0],
        "new": table_change({}, [request(7, added_at=START - 5)])["new"],
        "status": table_change({}, [request(7)])["status"],
        "progress": [7, 0, 0],
        "texts": [],
    }
    taken, note = {block: word(1, holder=1) for block in range(600)}, {"note": "its disk is full"}
    content, buffers = frame(2, reset=False, steps=STEPS, changed=taken, engine=note)
    content["ranks"][0]["requests"] = change
    page.deliver((content, buffers))
    page.settle()
    assert button.bounding_box() == box
    assert page.text(".nbe-banner") == note["note"]
    page.page.mouse.up()
    assert page.sent("abort") == [{"kind": "abort", "rank": 0, "number": 1}]
    rows = page.page.locator(".nbe-table tbody tr b")
    assert rows.all_inner_texts() == ["#0", "#1", "#2", "#7"]
    assert page.page.locator(".nbe-table tbody tr").first.locator(".nbe-status").inner_text() == "gone"
    page.page.mouse.move(0, 0)
    page.settle()
    assert rows.all_inner_texts() == ["#7", "#1", "#2"]
    page.settle()
    taller_header, taller_map = page.page.evaluate(heights)
    assert taller_header > header
    assert taller_map > blocks
    # What was held up comes when the pointer leaves, also while the engine tells nothing more.
    rows.first.hover()
    page.deliver(frame(3, reset=False, changed=dict.fromkeys(range(40, 600), word(0)), engine=note))
    page.settle()
    assert page.page.evaluate(heights) == [taller_header, taller_map]
    page.page.mouse.move(0, 0)
    page.settle()
    assert page.page.evaluate(heights) == [taller_header, blocks]


@pytest.mark.parametrize(
    ("foreground", "path", "status", "text", "posted"),
    [
        (True, "api/kernels/ab-12", 204, "the cell was interrupted", True),
        (True, "api/kernels/ab-12", 403, "not aborted: the server answered 403 Forbidden", True),
        (
            False,
            "api/kernels/ab-12",
            204,
            "the kernel is busy: the request will be aborted when the cell ends",
            False,
        ),
        (True, "", 204, "the kernel is busy: the request will be aborted when the cell ends", False),
        (
            True,
            "api/kernels/../../evil?",
            204,
            "the kernel is busy: the request will be aborted when the cell ends",
            False,
        ),
    ],
)
def test_abort_without_an_answer(
    open_page: OpenPage, foreground: bool, path: str, status: int, text: str, posted: bool
) -> None:
    page = open_page(frozen=True, config=SERVER)
    page.answer_status = status
    page.page.evaluate("document.cookie = 'other=1'; document.cookie = '_xsrf=2%7Cabc'")
    page.mount(interrupt_path=path)
    deliver_frozen(page, frame(requests=[request(0, foreground=foreground)]))
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


@pytest.mark.parametrize(
    ("change", "age", "text"),
    [
        ({"state": "finished", "finish_reason": "stop", "ended_at": START}, 0, ""),
        (None, 0, ""),
        ({"foreground": False}, 0, "the kernel is busy: the request will be aborted when the cell ends"),
        ({}, 5000, "the kernel does not answer"),
    ],
    ids=["ended", "gone", "in the background", "nothing heard"],
)
def test_abort_looks_again_before_it_interrupts(
    open_page: OpenPage, change: dict[str, Any] | None, age: int, text: str
) -> None:
    page = open_page(frozen=True, config=SERVER)
    page.mount(interrupt_path="api/kernels/ab-12")
    row = request(0, foreground=True)
    deliver_frozen(page, frame(requests=[row]))
    page.page.clock.run_for(age)
    page.page.evaluate("document.querySelector('.nbe-abort').click()")
    page.page.clock.run_for(1000)
    if change is None:
        deliver_frozen(page, frame(2, requests=[request(1)]))
    elif change:
        deliver_frozen(page, frame(2, requests=[row | change]))
    page.page.clock.run_for(1000)
    assert page.text(".nbe-status") == text
    assert page.posts == []


def deliver_frozen(page: DashboardPage, content: Frame) -> None:
    """Hand a frame without buffers to the dashboard of a page whose time passes when the test says so."""
    page.page.evaluate("(content) => models[0].deliver(content, [])", content[0])
    page.page.clock.run_for(100)


def test_hostile_text_stays_text(open_page: OpenPage) -> None:
    page = open_page()
    dialogs: list[str] = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    evil = dict.fromkeys(("name", "model", "topology", "device", "dtype", "state", "note"), HOSTILE)
    fields = {"id": HOSTILE, "preview": HOSTILE, "finish_reason": HOSTILE, "text": HOSTILE}
    rows = [request(0, **fields), request(1, **fields, state="finished")]
    page.mount(interrupt_path=HOSTILE, view={"axis": "steps"})
    page.deliver(frame(engine=evil, requests=rows, words=[word(1, False, 0)], steps=[step(1, [0, 5, 1, -1])]))
    page.page.locator(".nbe-abort").first.click()
    page.deliver(({"kind": "aborted", "rank": 0, "number": 0, "error": HOSTILE}, []))
    hover(page, BLOCKS, *cell(page, 0))
    page.page.wait_for_function("() => models[0].sent.some((m) => m.kind === 'block')")
    page.deliver(({"kind": "block", "rank": 0, "block": 0, "lines": [HOSTILE]}, []))
    assert page.text(TIP).endswith(HOSTILE)
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
    page.page.get_by_label("Export as Chrome trace").click()
    with page.page.expect_download() as downloading:
        page.deliver(({"kind": "export", "name": "../../" + HOSTILE, "text": HOSTILE}, []))
    assert "/" not in downloading.value.suggested_filename
    assert Path(downloading.value.path()).read_text() == HOSTILE
    assert page.page.evaluate("[window.pwned ?? null, document.querySelectorAll('img').length]") == [None, 0]
    assert page.page.locator(".nbe-dash script, .nbe-dash a, .nbe-tip *:not(div)").count() == 0
    assert dialogs == []
