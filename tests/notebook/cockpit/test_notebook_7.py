"""Notebook 7 instead of JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from notebook_support.cockpit import (
    ALPHABET,
    MARKS,
    WHOLE,
    Cockpit,
    DashboardView,
    faults_of_layout,
    number_of,
)
from notebook_support.desk import Desk
from notebook_support.lab import open_notebook, output_of, save, screenshot, wait_for_notebook, write_notebook
from notebook_support.paced import slowly
from playwright.sync_api import expect

pytestmark = MARKS


@pytest.fixture(scope="module")
def seven(desk: Desk, engine: str) -> Iterator[Cockpit]:
    """A notebook with the extension in Notebook 7, attached to the engine."""
    write_notebook(desk.directory / "seven.ipynb", ["'the first cell'"])
    page = open_notebook(desk.browser, desk.address, "seven.ipynb", height=WHOLE, frontend="notebooks")
    cockpit = Cockpit(page)
    assert "attached to engine" in cockpit.run(f"%engine attach {engine}")
    yield cockpit
    cockpit.close()
    page.close()
    desk.clear()


def test_a_dashboard_changes_and_aborts(seven: Cockpit) -> None:
    cell = seven.start("%dashboard")
    seven.finish(cell)
    board = seven.board(cell)
    with slowly():
        waiting = seven.start("%%generate -o answer --raw --max-tokens 3000\nWrite")
        row = board.running()
        board.wait_for_output(row, 30)
        number = number_of(row)
        assert board.pixels_of_request(number) > 0
        row.get_by_role("button", name="Abort").click()
        assert seven.finish(waiting).startswith(ALPHABET)
    board.expect_state(number, "abort")
    assert "abort" in seven.run("answer.finish_reason")
    screenshot(board.root, "notebook-7-dashboard")
    assert faults_of_layout(board.root) == []


def test_the_stop_button_ends_an_answer_and_what_is_written_stays(seven: Cockpit) -> None:
    with slowly():
        cell = seven.start("%%generate -o stopped --raw --max-tokens 3000\nWrite")
        seven.wait_for_text(cell, ALPHABET)
        stop = seven.output(cell).get_by_role("button", name="Stop this answer")
        screenshot(seven.output(cell), "notebook-7-stop")
        stop.click()
        shown = seven.finish(cell)
    assert shown.startswith(ALPHABET)
    assert "interrupted" in shown
    expect(stop).to_have_count(0)
    assert "abort" in seven.run("stopped.finish_reason")


def test_a_dashboard_pops_out_and_comes_back(seven: Cockpit) -> None:
    board = seven.dashboard()
    with seven.page.expect_popup() as opening:
        board.root.get_by_role("button", name="Pop out").click()
    own = DashboardView(opening.value, opening.value.locator(".nbe-dash"))
    own.wait_until_live()
    steps = own.num_steps
    seven.run("%%generate -a -o popped --raw --max-tokens 60 --set ignore_eos=true\nOnce")
    expect(own.root.locator("tbody tr").first.locator(".nbe-bar").nth(1)).to_have_text(re.compile("^60 / "))
    assert own.num_steps >= steps + 60
    screenshot(own.page, "notebook-7-window")
    own.page.close()
    board.wait_until_live()
    assert board.num_steps >= steps + 60


def test_an_answer_that_a_reload_has_cut_off_is_shown_again(seven: Cockpit) -> None:
    whole = (ALPHABET * 58)[:1500]
    with slowly():
        cell = seven.start("%%generate --max-tokens 1500\nhi")
        seven.wait_for_text(cell, ALPHABET)
        save(seven.page)
        seven.page.reload()
    wait_for_notebook(seven.page)
    # This is what the page has lost.
    assert whole not in output_of(seven.page, cell)
    shown = seven.run("%engine recover")
    assert whole in shown
    screenshot(seven.page, "recover-notebook-7")
