"""Dashboards in JupyterLab: what changes in them and what their buttons do."""

from __future__ import annotations

import json
import re

from notebook_support.cockpit import (
    ALPHABET,
    ENGINE,
    MARKS,
    OpenCockpit,
    color,
    number_of,
    timeline_pixels,
)
from notebook_support.paced import slowly
from playwright.sync_api import expect

from nbengine.widgets.dashboard.palette import ROLES

NOTEBOOK_WIDGET = "window.jupyterapp.shell.currentWidget.content"

pytestmark = MARKS


def test_the_dashboard_changes_while_a_cell_streams_and_while_the_kernel_is_idle(
    open_cockpit: OpenCockpit,
) -> None:
    cockpit = open_cockpit()
    board = cockpit.dashboard()
    expect(board.state).to_have_text("idle")
    before = board.num_steps
    # While it is looked at, the answer is written so slowly that it does not end.
    with slowly():
        cell = cockpit.start("%%generate -o answer --raw --max-tokens 200\nWrite the alphabet")
        row = board.running()
        board.wait_for_output(row, 12)
        number = number_of(row)
        assert board.state.inner_text() == "running"
        assert board.counts["held"] > 0
        cell_pixels = board.pixels_of_request(number)
        assert cell_pixels > 50
        assert board.colors("timeline")[color(ROLES["decode"])] > 20
        steps = board.num_steps
        assert steps > before + 10
        # Another block's tokens: the request is longer, and holds more of them.
        board.wait_for_output(row, board.wait_for_output(row, 12) + 17)
        assert board.num_steps >= steps + 17
        assert board.tile("tokens out").endswith("/s")
        # It has a pace of 10 tokens a second, which a busy machine does not keep.
        assert 0 < float(board.tile("tokens out").removesuffix("/s")) < 20
        assert board.pixels_of_request(number) > cell_pixels
    assert (ALPHABET * 8)[:200] in cockpit.finish(cell)

    expect(board.state).to_have_text("idle")
    board.expect_state(number, "length")
    assert board.wait_for_output(board.row(number), 200) == 200
    assert board.counts["held"] == 0
    assert board.counts["cached"] > 0
    assert board.pixels_of_request(number) == 0

    # In the background: the kernel has nothing to do, and the dashboard changes.
    steps = board.num_steps
    second = number + 1
    with slowly():
        assert "answer" not in cockpit.run("%%generate -a -o handle --raw --max-tokens 150\nAgain")
        board.wait_for_output(board.row(second), 12)
        assert board.pixels_of_request(second) > 0
    expect(board.state).to_have_text("idle")
    board.expect_state(second, "length")
    assert board.num_steps >= steps + 150
    assert "150" in cockpit.run("len(handle.result().text)")


def test_abort_ends_a_request_while_a_cell_waits_for_it_and_while_one_computes(
    open_cockpit: OpenCockpit,
) -> None:
    cockpit = open_cockpit()
    board = cockpit.dashboard()
    with slowly():
        cell = cockpit.start("%%generate -o answer --raw --max-tokens 3000\nWrite")
        row = board.running()
        board.wait_for_output(row, 10)
        number = number_of(row)
        row.get_by_role("button", name="Abort").click()
        assert cockpit.finish(cell).startswith(ALPHABET[:10])
    board.expect_state(number, "abort")
    reason, text = cockpit.run("print(answer.finish_reason, answer.text)").split()
    assert reason == "abort"
    assert len(text) >= 10
    assert (ALPHABET * 200).startswith(text)

    with slowly():
        cockpit.run("%%generate -a -o handle --raw --max-tokens 3000\nWrite")
        cell = cockpit.start("while not handle.done: time.sleep(0.05)\n'not busy any more'")
        board.wait_for_output(row, 10)
        number = number_of(row)
        prompt = cockpit.page.locator(".jp-CodeCell").nth(cell).locator(".jp-InputPrompt")
        expect(prompt).to_contain_text("*")
        row.get_by_role("button", name="Abort").click()
        # By the widget's message alone: had the kernel been interrupted, this would be a traceback.
        assert "not busy any more" in cockpit.finish(cell)
    reason, text = cockpit.run("r = handle.result()\nprint(r.finish_reason, r.text)").split()
    assert reason == "abort"
    assert len(text) >= 10
    assert (ALPHABET * 200).startswith(text)
    board.expect_state(number, "abort")
    expect(board.state).to_have_text("idle")


def test_scrubbing_shows_earlier_steps_while_live_goes_on(open_cockpit: OpenCockpit) -> None:
    cockpit = open_cockpit()
    page = cockpit.page
    board = cockpit.dashboard()
    cockpit.run("%%generate -a -o handle --raw --max-tokens 1500\nWrite")
    row = board.running()
    board.wait_for_output(row, 200)
    board.root.get_by_role("button", name="Show steps, each as wide as the others").click()
    board.root.get_by_role("button", name="Pause").click()
    timeline = board.root.locator(".nbe-timeline")
    expect(timeline).to_have_attribute("data-live", "false")
    slider = board.root.locator(".nbe-slider")
    place, position, steps = board.place, int(slider.input_value()), board.num_steps
    picture = timeline_pixels(board)
    # The steps go on, and the requests are shown as they were.
    output = row.locator(".nbe-cell-output").inner_text()
    page.wait_for_function(
        "([slider, steps]) => Number(slider.max) > steps", arg=[slider.element_handle(), steps + 20]
    )
    assert row.locator(".nbe-cell-output").inner_text() == output
    assert board.place == place
    assert timeline_pixels(board) == picture

    canvas = board.root.locator(".nbe-timeline canvas")
    canvas.focus()
    told = []
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
        told.append(board.tip())
    newest, older = (step_of(text) for text in told)
    assert (newest - older, newest) == (1, step_of(place))
    assert "0 prefill, 1 decode" in told[0]

    page.keyboard.press("Escape")
    canvas.hover(position={"x": 70, "y": 10})
    far = step_of(board.tip())
    board.root.get_by_role("button", name="Zoom in").click()
    canvas.hover(position={"x": 71, "y": 10})
    assert far < step_of(board.tip()) < step_of(place)
    board.root.get_by_role("button", name="Zoom out").click()
    canvas.hover(position={"x": 70, "y": 10})
    assert step_of(board.tip()) == far

    slider.fill(str(position - 100))
    expect(board.root.locator(".nbe-place")).to_contain_text(f"step {step_of(place) - 100:,} ")
    assert timeline_pixels(board) != picture

    with page.expect_download() as download:
        board.root.get_by_role("button", name="Export as Chrome trace").click()
    trace = json.loads(download.value.path().read_text())
    assert download.value.suggested_filename == f"{ENGINE}-trace.json"
    assert len(trace["traceEvents"]) > 100

    board.root.get_by_role("button", name="Go on live").click()
    expect(timeline).to_have_attribute("data-live", "true")
    assert step_of(board.place) > step_of(place) + 20
    cockpit.run("handle.cancel()")


def test_keys_of_the_dashboard_are_not_the_notebooks(open_cockpit: OpenCockpit) -> None:
    cockpit = open_cockpit()
    page = cockpit.page
    board = cockpit.dashboard()
    cockpit.run("%%generate --raw --max-tokens 40\nWrite")
    # It was idle before the first step, too.
    expect(board.root.locator(".nbe-request-state").first).to_have_text("length")
    look = f"() => [{NOTEBOOK_WIDGET}.activeCellIndex, {NOTEBOOK_WIDGET}.widgets.length]"
    slider = board.root.locator(".nbe-slider")
    board.root.get_by_role("button", name="Pause").click()
    slider.focus()
    before, position = page.evaluate(look), int(slider.input_value())
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert int(slider.input_value()) == position - 3
    for part, key in (
        (".nbe-scroller", "ArrowUp"),
        (".nbe-timeline canvas", "b"),
        (".nbe-map canvas", "x"),
    ):
        board.root.locator(part).focus()
        page.keyboard.press(key)
    assert page.evaluate(look) == before


def step_of(text: str) -> int:
    """The first step that a text names."""
    found = re.search(r"step ([\d,]+)", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))
