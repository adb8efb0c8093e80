"""Tokens in JupyterLab: an answer streams into the widget, and branches begin at a click, also while a cell is busy."""

from __future__ import annotations

import contextlib

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import NOTEBOOK, output_of, run_command, screenshot, wait_for_prompt
from notebook_support.paced import start_line
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

FLAGS = "--raw --temperature 0 --max-tokens 40 --set ignore_eos=true"
PROMPT = "the quick brown fox jumps over the lazy dog"
BUSY = "import time\nfor _ in range(3000):\n    if len(answer.tree) > 2: break\n    time.sleep(0.01)\nlen(answer.tree)"
LOOK = """\
first, busy = answer.tree[1], answer.tree[2].result()
(first.position, first.num_cached_tokens, first.finish_reason, len(first.token_ids), busy.parent is first)"""
SAVED_HTML = """() => {
    const output = window.jupyterapp.shell.currentWidget.content.model.cells.get(1).outputs.get(0);
    return output.data['text/html'];
}"""

pytestmark = [
    needs_chromium,
    pytest.mark.timeout(180),
]


def choose(page: Page, token: int, alternative: int) -> None:
    """Click a token and then one of its alternatives."""
    other = page.locator(".nbt-popover:popover-open button").nth(alternative)
    # Everything may come once more in between, which closes it.
    for _ in range(5):
        page.locator(".nbt-token").nth(token).click()
        with contextlib.suppress(PlaywrightTimeoutError):
            other.click(timeout=3000)
            return
    raise AssertionError("no alternative can be chosen")


def run_cell(page: Page, cell: int) -> None:
    """Begin to run a cell, whichever one was clicked last."""
    page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(cell).locator(".jp-InputArea-editor").click()
    run_command(page, "notebook:run-cell-and-select-next")


def test_a_click_on_an_alternative_begins_a_tab_also_while_a_cell_is_busy(
    open_lab: OpenLab,
) -> None:
    cells = [
        f"%load_ext nbengine\n{start_line(tokens_per_second=200)}",
        f"%%generate -o answer --logprobs 6 {FLAGS}\n{PROMPT}",
        BUSY,
        LOOK,
        "%engine stop",
    ]
    page = open_lab("tokens.ipynb", cells, width=1100)
    for _ in range(2):
        run_command(page, "notebook:run-cell-and-select-next")
    wait_for_prompt(page, 1)
    tokens = page.locator(".nbt-token")
    expect(tokens).to_have_count(40)
    assert "40 tokens" in output_of(page, 1)
    assert "stopped at the limit" in output_of(page, 1)

    choose(page, token=30, alternative=1)
    tabs = page.locator(".nbt").get_by_role("tab")
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    expect(page.locator(".nbt-footer")).to_contain_text("reused")
    expect(tokens).to_have_count(40)
    # With nobody in it, it is drawn again once what is saved has the branch; not under the next click.
    page.mouse.move(1, 1)
    page.wait_for_function(f"() => ({SAVED_HTML})().split('<span title=').length == 1 + 40 + 10")
    expect(tokens).to_have_count(40)

    run_cell(page, 2)
    expect(page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(2).locator(".jp-InputPrompt")).to_contain_text("*")
    choose(page, token=35, alternative=0)
    expect(tabs).to_have_count(3)
    expect(tabs.nth(2)).to_have_attribute("aria-selected", "true")
    wait_for_prompt(page, 2)
    assert output_of(page, 2).strip().endswith("3")
    run_cell(page, 3)
    wait_for_prompt(page, 3)
    assert output_of(page, 3).strip().endswith("(30, 64, 'length', 40, True)")

    # What would be saved has the branches, too, and the widget is still the same to look at.
    page.wait_for_function(f"() => ({SAVED_HTML})().split('<span title=').length == 1 + 40 + 10 + 5")
    expect(tabs).to_have_count(3)
    expect(tabs.nth(2)).to_have_attribute("aria-selected", "true")
    screenshot(page, "tokens")
    run_cell(page, 4)
    wait_for_prompt(page, 4)
