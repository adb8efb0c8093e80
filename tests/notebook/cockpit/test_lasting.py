"""A dashboard's output outlives the page, the kernel and the engine."""

from __future__ import annotations

import json
import re

import nbformat
from notebook_support.cockpit import MARKS, WHOLE, Cockpit, faults_of_layout, number_of
from notebook_support.desk import Desk, OpenLab
from notebook_support.lab import TOKEN, WIDE, reload, restart_kernel, save, screenshot
from notebook_support.paced import start_line
from playwright.sync_api import expect

ENDED = re.compile("the engine was (stopped|shut down)")

HASTE = """
from nbengine.widgets.dashboard import still
assert still.STILL_INTERVAL == 10.0
still.STILL_INTERVAL = 1.0
"""
"""Nobody waits ten seconds for the picture in the saved notebook."""

pytestmark = MARKS


def test_a_dashboard_lasts_over_a_reload_a_restart_of_the_kernel_and_the_end_of_the_engine(
    desk: Desk, open_lab: OpenLab
) -> None:
    cockpit = Cockpit(open_lab("long.ipynb", ["'the first cell'"], height=WHOLE))
    page = cockpit.page
    cockpit.run(start_line(name="own", tokens_per_second=40))
    cockpit.run(HASTE)
    before = cockpit.start("%dashboard")
    cockpit.finish(before)
    board = cockpit.board(before)
    cockpit.run("%%generate -a -o handle --raw --max-tokens 4000\nWrite")
    row = board.running()
    seen = board.wait_for_output(row, 20)
    number = number_of(row)
    expect_a_picture_in_the_saved_notebook(cockpit, desk, before)
    reload(page)
    board.wait_until_live()
    board.wait_for_output(board.row(number), seen + 20)
    board.expect_state(number, "running")
    assert board.pixels_of_request(number) > 0
    row.get_by_role("button", name="Abort").click()
    board.expect_state(number, "abort")
    text = cockpit.run("print(handle.result().text)").strip()
    # What was on its way when the notebook had given it up is not in the text.
    assert len(text) <= board.wait_for_output(board.row(number), len(text)) < 4000
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
    expect(picture.locator(".nbe-banner")).to_contain_text(ENDED)
    # The same dashboard as before, in which the steps can be looked through and exported.
    expect(picture.locator(".nbe-dash")).to_have_attribute("data-ended", "true")
    expect(picture.locator(".nbe-still")).to_be_hidden()
    board.root.locator(".nbe-slider").fill("3")
    expect(board.root.locator(".nbe-place")).to_contain_text("step")
    expect(board.root.get_by_role("button", name="Go on live")).to_be_visible()
    with page.expect_download() as download:
        board.root.get_by_role("button", name="Export as Chrome trace").click()
    assert len(json.loads(download.value.path().read_text())["traceEvents"]) > 100
    screenshot(picture, "dashboard-ended")
    save(page)
    outputs = nbformat.read(desk.directory / "long.ipynb", as_version=4).cells[after].outputs
    assert "data:image/svg+xml" in outputs[1].data["text/html"]
    assert ENDED.search(outputs[1].data["text/plain"])
    cockpit.close()
    desk.clear()

    # No kernel can be had.
    alone = desk.browser.new_page(viewport={"width": WIDE, "height": WHOLE})
    alone.route(re.compile("/api/(sessions|kernels)"), lambda route: route.abort())
    alone.goto(f"{desk.address}/lab/workspaces/alone/tree/long.ipynb?reset&token={TOKEN}")
    again = alone.locator(".jp-CodeCell").nth(after).locator(".jp-Cell-outputArea")
    expect(again.locator("img").first).to_be_visible()
    # The widget is not to be had without its kernel: below its place is the last picture.
    expect(again.locator(".nbe-still")).to_contain_text(ENDED)
    screenshot(again, "dashboard-final")
    assert faults_of_layout(again) == []
    alone.close()


def expect_a_picture_in_the_saved_notebook(cockpit: Cockpit, desk: Desk, cell: int) -> None:
    """Save the notebook, and a page made of it, in which the dashboard is shown as it is now."""
    still = cockpit.output(cell).locator(".nbe-still")
    # It is renewed now and then.
    expect(still).not_to_contain_text("no requests yet", timeout=120_000)
    expect(still).to_be_hidden()
    save(cockpit.page)
    notebook = nbformat.read(desk.directory / "long.ipynb", as_version=4)
    picture = notebook.cells[cell].outputs[1].data["text/html"]
    assert "no requests yet" not in picture
    assert picture.count("data:image/svg+xml;base64") >= 3
    # Every process that collects the tests would import it for nothing.
    from nbconvert import HTMLExporter

    # Without the state of widgets, which a notebook's own settings leave out.
    notebook.metadata.pop("widgets", None)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert 'class="nbe-still"' in page
    assert picture.split("base64,")[1][:200] in page


def look_at_what_a_lost_kernel_left(cockpit: Cockpit, cell: int, number: int) -> None:
    """Check that a dashboard of the kernel before says that nobody answers, and that its buttons do
    nothing."""
    old = cockpit.board(cell)
    old.look()
    expect(old.root.locator(".nbe-banner")).to_contain_text(
        "The kernel does not answer. This is the state at"
    )
    running = cockpit.start("import time\ntime.sleep(4)\nprint('who' + 'le')")
    row = old.row(number)
    row.get_by_role("button", name="Abort").click()
    expect(old.root.locator(".nbe-status", has_text="the kernel does not answer").first).to_be_attached()
    old.root.get_by_role("button", name="Export as Chrome trace").click()
    expect(old.root.get_by_text("Export (no answer)")).to_be_visible()
    assert "whole" in cockpit.finish(running)
