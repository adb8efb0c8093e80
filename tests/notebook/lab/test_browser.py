"""A person who opens JupyterLab in a browser sees a cell stream, and stops it with the toolbar's button."""

from __future__ import annotations

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import (
    CODE_CELL,
    POLL_MS,
    output_of,
    run_cell,
    run_command,
    screenshot,
    set_theme,
    wait_for_prompt,
    wait_for_text,
)
from notebook_support.paced import start_line
from playwright.sync_api import Locator, Page, expect

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

pytestmark = [
    needs_chromium,
    # Chromium and the lab's server take their time on two cores.
    pytest.mark.timeout(180),
]


def test_a_cell_streams_and_the_stop_button_ends_it(open_lab: OpenLab) -> None:
    cells = [
        "%load_ext nbengine",
        start_line(tokens_per_second=100),
        "%%generate -o answer --max-tokens 3000\nhi",
        "answer.finish_reason, answer.text[:26]",
        "%%generate --max-tokens 26\nhi",
        "%%generate -o answer --max-tokens 3000\nhi",
        "%%generate -o both --seed 1,2 --max-tokens 3000\nhi",
        "%%chat --max-tokens 3000\nhi",
        "get_ipython().run_cell('%%generate -o blocked --max-tokens 3000\\nhi')",
        "[a.finish_reason for a in (answer, *both, blocked)]",
        "%engine stop",
    ]
    page = open_lab("demo.ipynb", cells, width=1100)
    for _ in range(3):
        run_command(page, "notebook:run-cell-and-select-next")
    page.wait_for_function("() => document.body.innerText.includes('" + ALPHABET * 3 + "')", polling=POLL_MS)
    assert "✓ ready" in output_of(page, 1)
    page.click('[data-jp-item-name="interrupt"]')
    wait_for_prompt(page, 2)
    stopped = output_of(page, 2)
    assert stopped.startswith(ALPHABET * 3)
    assert "interrupted" in stopped
    for _ in range(2):
        run_command(page, "notebook:run-cell-and-select-next")
    wait_for_prompt(page, 4)
    assert output_of(page, 3).strip().endswith(f"('abort', '{ALPHABET}')")
    assert output_of(page, 4).startswith(ALPHABET)
    assert "26 tokens" in output_of(page, 4)
    stops_by_its_own_button(page)
    run_cell(page, 10)
    wait_for_prompt(page, 10)
    assert "2 processes are gone" in output_of(page, 10)


def stops_by_its_own_button(page: Page) -> None:
    """Press the button beside the answers of cells 5 to 8, with the mouse and with the keyboard.

    The last cell blocks the kernel, which reads no message meanwhile: the script interrupts it.
    """
    stop = page.get_by_role("button", name="Stop this answer; what has been written stays")
    for cell in range(5, 9):
        expect(stop).to_have_count(0)
        run_cell(page, cell)
        wait_for_text(page, ALPHABET, cell)
        area = page.locator(CODE_CELL).nth(cell)
        expect(area.locator(".nbe-stop")).to_have_count(1)
        if cell < 7:
            stop.click()
        else:
            if cell == 7:
                set_theme(page, dark=True)
            focus(stop)
            screenshot(page, f"stop-button-{cell}")
            keeps_focus(stop, area)
            page.keyboard.press("Enter" if cell == 7 else "Space")
        wait_for_prompt(page, cell)
        assert output_of(page, cell).startswith(ALPHABET) or cell == 6
        assert "interrupted" in output_of(page, cell)
        if cell == 7:
            set_theme(page, dark=False)
    expect(stop).to_have_count(0)
    run_cell(page, 9)
    wait_for_prompt(page, 9)
    assert output_of(page, 9).strip().endswith(str(["abort"] * 4))


def focus(button: Locator) -> None:
    """Put the focus on a button; once more where JupyterLab has just taken it for the cell that it has started."""
    for _ in range(5):
        button.focus()
        if button.evaluate(
            """async (button) => {
                await new Promise(requestAnimationFrame);
                return document.activeElement === button;
            }"""
        ):
            return
    raise AssertionError(f"the button does not have the focus, which is on {who_has_focus(button.page)}")


def keeps_focus(button: Locator, cell: Locator) -> None:
    """Check that a button keeps the focus while the answer beside it grows and its output is replaced."""
    cell.page.wait_for_function(
        "([cell, length]) => cell.innerText.length > length",
        arg=[cell.element_handle(), len(cell.inner_text()) + len(ALPHABET)],
        polling=POLL_MS,
    )
    is_focused = button.evaluate("(button) => document.activeElement === button")
    assert is_focused, f"the button has lost the focus to {who_has_focus(button.page)}"


def who_has_focus(page: Page) -> str:
    """The element that has the focus."""
    text: str = page.evaluate("() => document.activeElement.outerHTML.slice(0, 500)")
    return text
