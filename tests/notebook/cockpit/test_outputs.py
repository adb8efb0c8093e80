"""All that cells show: hostile texts, looks, a branch, what outlives page and kernel; and Notebook 7."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from notebook_support.cockpit import (
    ALPHABET,
    ENGINE,
    MARKS,
    WHOLE,
    Cockpit,
    faults_of_layout,
    mixed,
    number_of,
    timeline_pixels,
)
from notebook_support.lab import (
    NARROW,
    TOKEN,
    WIDE,
    jupyter_notebook,
    open_notebook,
    reload,
    restart_kernel,
    save,
    screenshot,
    set_theme,
    set_width,
    write_notebook,
)
from notebook_support.paced import start_line
from playwright.sync_api import Browser, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from nbengine.widgets.dashboard.palette import CACHED_OPACITY, ROLES

ENDED = re.compile("the engine was (stopped|shut down)")
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
HOSTILE_NAME = "<img src=x onerror=window.pwned=1>"

pytestmark = MARKS


@pytest.fixture(scope="module")
def hostile(chromium: Browser, lab: str, directory: Path) -> Iterator[tuple[Cockpit, dict[str, int]]]:
    """A notebook with hostile texts in all that it shows, and the numbers of its cells."""
    name = f"{HOSTILE_NAME}.ipynb"
    write_notebook(directory / name, ["'the first cell'"])
    cockpit = Cockpit(open_notebook(chromium, lab, name, height=WHOLE))
    cockpit.run("%engine start random-tiny --name real --num-blocks 64 --dtype float32")
    cockpit.run(f"words = [{HOSTILE!r}, 'sea']")
    cells = {"dashboard": cockpit.start("%dashboard")}
    cockpit.finish(cells["dashboard"])
    says = f"--choice '{json.dumps([HOSTILE])}'"
    sources = {
        "tokens": f"%%generate --raw --logprobs 3 {says}\n{HOSTILE}",
        "grid": f"%%generate --raw --each words --temperature 0,1 {says}\n{HOSTILE} {{words}}",
        "chat": f"%%chat --system '{HOSTILE}' {says}\n{HOSTILE}",
        "conversation": "%%chat --show",
        "markdown": f"%%generate --raw --format markdown {says}\n{HOSTILE}",
        "code": f"%%generate --raw --format code {says}\n{HOSTILE}",
        "recover": "%engine recover --all",
        "name": f"%engine start random-tiny --name '{HOSTILE_NAME}'",
        "file": f"%%chat --save '{HOSTILE_NAME}.json' {says}\n{HOSTILE}",
    }
    for kind, source in sources.items():
        cells[kind] = cockpit.start(source)
        cockpit.finish(cells[kind])
    yield cockpit, cells
    cockpit.run("%engine stop real")
    cockpit.close()


def assert_harmless(cockpit: Cockpit) -> None:
    """Nothing that a text said was done."""
    page = cockpit.page
    assert cockpit.dialogs == []
    assert page.evaluate("window.pwned") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator(".jp-OutputArea script").count() == 0


def test_hostile_texts_are_shown_as_they_are(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, cells = hostile
    page = cockpit.page
    for kind, cell in cells.items():
        if kind != "dashboard":
            text = HOSTILE_NAME if kind in ("name", "file") else HOSTILE
            expect(cockpit.output(cell), kind).to_contain_text(text)
    assert_harmless(cockpit)
    cockpit.run("%%generate -a -o held --raw --max-tokens 512 --set ignore_eos=true\n" + HOSTILE)
    cockpit.run("held.cancel()")
    board = cockpit.board(cells["dashboard"])
    # In the window's usual width of a notebook there is no room for the column with texts.
    expect(board.root.locator(".nbe-preview").first).to_have_attribute("title", re.compile("<img src=x"))
    set_width(page, 1900, WHOLE)
    expect(board.root.locator("td.nbe-cell-text", has_text="<img src=x").first).to_be_visible()
    blocks = board.root.locator(".nbe-blocks canvas")
    blocks.hover(position={"x": 4, "y": 4})
    expect(page.locator(".nbe-tip:not([hidden])")).to_contain_text("<img src=x")
    set_width(page, WIDE, WHOLE)
    save(page)
    reload(page)
    board.wait_until_live()
    expect(cockpit.output(cells["tokens"])).to_contain_text(HOSTILE)
    assert_harmless(cockpit)


def test_everything_can_be_read_wide_and_narrow_light_and_dark(
    hostile: tuple[Cockpit, dict[str, int]],
) -> None:
    cockpit, cells = hostile
    board = cockpit.board(cells["dashboard"])
    grounds, pictures = set(), set()
    for dark in (False, True):
        set_theme(cockpit.page, dark=dark)
        for width in (WIDE, NARROW):
            set_width(cockpit.page, width, WHOLE)
            board.wait_until_live()
            board.wait_until_settled()
            ground = board.ground
            grounds.add(ground)
            board.wait_for_color("blocks", mixed(ROLES["cached"], CACHED_OPACITY, ground))
            name = f"{width}-{'dark' if dark else 'light'}"
            assert board.root.get_attribute("data-theme") == name.partition("-")[2]
            pictures.add(timeline_pixels(board))
            for kind, cell in cells.items():
                screenshot(cockpit.output(cell), f"cockpit-{kind}-{name}")
                assert faults_of_layout(cockpit.output(cell)) == [], (kind, name)
    assert len(grounds) == 2
    assert len(pictures) == 4


def test_a_click_on_a_token_begins_a_branch_that_streams(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    page = cockpit.page
    cell = cockpit.start(
        "%%generate -o root --raw --logprobs 5 --temperature 0 --max-tokens 400 --set ignore_eos=true\nOnce"
    )
    cockpit.finish(cell)
    tokens = cockpit.output(cell).locator(".nbt-token")
    expect(tokens).to_have_count(400)
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const note = () => window.lengths.add(document.querySelectorAll('.nbt-token').length);
            new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    other = page.locator(".nbt-popover:popover-open button").nth(1)
    # JupyterLab may draw the output anew just then, when the answer has ended.
    for _ in range(5):
        tokens.nth(10).click()
        with contextlib.suppress(PlaywrightTimeoutError):
            other.click(timeout=3000)
            break
    tabs = cockpit.output(cell).get_by_role("tab")
    expect(tabs).to_have_count(2)
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    expect(tokens).to_have_count(400)
    # It came piece by piece.
    assert page.evaluate("window.lengths.size") > 4
    assert "(2, 10, 400)" in cockpit.run("b = root.tree[1]\nlen(root.tree), b.position, len(b.token_ids)")


def test_a_page_loaded_anew_a_kernel_restarted_and_the_end_of_the_engine(
    chromium: Browser, lab: str, directory: Path
) -> None:
    write_notebook(directory / "long.ipynb", ["'the first cell'"])
    cockpit = Cockpit(open_notebook(chromium, lab, "long.ipynb", height=WHOLE))
    page = cockpit.page
    cockpit.run(start_line(name="own", tokens_per_second=40))
    before = cockpit.start("%dashboard")
    cockpit.finish(before)
    board = cockpit.board(before)
    cockpit.run("%%generate -a -o handle --raw --max-tokens 4000\nWrite")
    row = board.running()
    seen = board.wait_for_output(row, 60)
    number = number_of(row)
    save(page)
    reload(page)
    board.wait_until_live()
    board.wait_for_output(board.row(number), seen + 60)
    board.expect_state(number, "running")
    assert board.pixels_of_request(number) > 0
    row.get_by_role("button", name="Abort").click()
    board.expect_state(number, "abort")
    text = cockpit.run("print(handle.result().text)").strip()
    # What was on its way when the notebook had given it up is not in the text.
    assert board.wait_for_output(board.row(number), len(text)) - len(text) <= 3
    assert board.counts["held"] == 0

    cockpit.run("%%generate -a -o more --raw --max-tokens 4000\nWrite")
    board.wait_for_output(board.row(number + 1), 10)
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    restart_kernel(page)
    look_at_what_a_lost_kernel_left(cockpit, before, number + 1)
    assert failures == []
    cockpit.run("%load_ext nbengine")
    assert "attached to engine 'own'" in cockpit.run("%engine attach own")
    after = cockpit.start("%dashboard")
    cockpit.finish(after)
    board = cockpit.board(after)
    cockpit.run("%%generate --raw --max-tokens 30\nWrite")
    board.expect_state(number + 2, "length")

    cockpit.run("%engine stop own")
    picture = cockpit.output(after)
    # By whichever the kernel has heard of first: its own magic, or what the engine has published.
    expect(picture).to_contain_text(ENDED)
    expect(picture.locator(".nbe-dash")).to_have_count(0)
    save(page)
    (output,) = nbformat.read(directory / "long.ipynb", as_version=4).cells[after].outputs
    assert "application/vnd.jupyter.widget-view+json" not in output.data
    assert "data:image/svg+xml" in output.data["text/html"]
    assert ENDED.search(output.data["text/plain"])
    shown = picture.inner_text()
    cockpit.close()

    # No kernel can be had.
    alone = chromium.new_page(viewport={"width": WIDE, "height": WHOLE})
    alone.route(re.compile("/api/(sessions|kernels)"), lambda route: route.abort())
    alone.goto(f"{lab}/lab/workspaces/alone/tree/long.ipynb?reset&token={TOKEN}")
    again = alone.locator(".jp-CodeCell").nth(after).locator(".jp-Cell-outputArea")
    expect(again.locator("img").first).to_be_visible(timeout=20_000)
    assert again.inner_text() == shown
    screenshot(again, "dashboard-final")
    assert faults_of_layout(again) == []
    alone.close()


def look_at_what_a_lost_kernel_left(cockpit: Cockpit, cell: int, number: int) -> None:
    """A dashboard of the kernel before says that nobody answers, and its buttons do nothing to the new one's cells."""
    old = cockpit.board(cell)
    old.look()
    expect(old.root.locator(".nbe-banner")).to_contain_text(
        "The kernel does not answer. This is how things stood at"
    )
    running = cockpit.start("import time\ntime.sleep(4)\nprint('who' + 'le')")
    row = old.row(number)
    row.get_by_role("button", name="Abort").click()
    expect(old.root.locator(".nbe-status", has_text="the kernel does not answer").first).to_be_attached()
    old.root.get_by_role("button", name="Export as Chrome trace").click()
    expect(old.root.get_by_text("Export (no answer)")).to_be_visible()
    assert "whole" in cockpit.finish(running)


def test_plain_text_is_no_mathematics(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    prices = r"It costs $5 and $10, or \(x\) and \[y\]"
    says = f"--choice '{json.dumps([prices])}'"
    cells = [
        cockpit.start(f"{line} {says}\n{prices}")
        for line in (
            "%%generate --raw",
            "%%generate --raw -n 2",
            "%%generate --raw --logprobs 2",
            "%%generate --raw --temperature 0,1",
            "%%chat",
        )
    ]
    for cell in cells:
        cockpit.finish(cell)
    # The page does typeset what is mathematics, and has come to it.
    typeset = cockpit.start("from IPython.display import HTML\nHTML('<p>$x^2$</p>')")
    cockpit.finish(typeset)
    expect(cockpit.output(typeset).locator("mjx-container")).to_have_count(1)
    for cell in cells:
        expect(cockpit.output(cell)).to_contain_text(prices)
        expect(cockpit.output(cell).locator("mjx-container")).to_have_count(0)


def test_notebook_7_has_a_dashboard_that_changes_and_aborts(
    chromium: Browser, notebook_environment: dict[str, str], tmp_path: Path
) -> None:
    write_notebook(tmp_path / "seven.ipynb", ["'the first cell'"])
    with jupyter_notebook(tmp_path, notebook_environment) as address:
        page = open_notebook(chromium, address, "seven.ipynb", height=WHOLE, frontend="notebooks")
        cockpit = Cockpit(page)
        cockpit.run(f"%engine attach {ENGINE}")
        cell = cockpit.start("%dashboard")
        cockpit.finish(cell)
        board = cockpit.board(cell)
        waiting = cockpit.start("%%generate -o answer --raw --max-tokens 3000\nWrite")
        row = board.running()
        board.wait_for_output(row, 30)
        number = number_of(row)
        assert board.pixels_of_request(number) > 0
        row.get_by_role("button", name="Abort").click()
        assert cockpit.finish(waiting).startswith(ALPHABET)
        board.expect_state(number, "abort")
        assert "abort" in cockpit.run("answer.finish_reason")
        screenshot(board.root, "notebook-7-dashboard")
        assert faults_of_layout(board.root) == []
        cockpit.close()
