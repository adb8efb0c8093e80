"""Notebook 7 instead of JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_support.cockpit import ALPHABET, MARKS, WHOLE, Cockpit, faults_of_layout, number_of
from notebook_support.desk import Desk
from notebook_support.lab import open_notebook, output_of, save, screenshot, wait_for_notebook, write_notebook
from notebook_support.paced import slowly

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
