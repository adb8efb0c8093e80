"""No written text is lost when a page is loaded again, or its kernel restarts."""

from __future__ import annotations

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import (
    NARROW,
    WIDE,
    output_of,
    restart_kernel,
    run_cell,
    save,
    screenshot,
    set_theme,
    set_width,
    wait_for_notebook,
    wait_for_prompt,
    wait_for_text,
)
from notebook_support.paced import slowly, start_line
from playwright.sync_api import expect

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@needs_chromium
@pytest.mark.timeout(180)
def test_a_page_loaded_again_in_the_middle_of_an_answer_shows_all_of_it(
    open_lab: OpenLab,
) -> None:
    cells = [
        "%load_ext nbengine",
        start_line(tokens_per_second=200),
        "%%generate -o answer --max-tokens 1600\nWrite the <b>alphabet</b>",
        "%engine recover -o again",
        "again is answer, answer.finish_reason, len(answer.text)",
        "%load_ext nbengine\n%engine recover -l\n%engine recover",
        "%engine stop",
    ]
    page = open_lab("demo.ipynb", cells)
    whole = (ALPHABET * 62)[:1600]
    for cell in range(2):
        run_cell(page, cell)
    with slowly():
        run_cell(page, 2)
        wait_for_text(page, ALPHABET * 2, 2)
        save(page)
        late = page.locator(".jp-CodeCell").nth(2).locator(".nbe-late")
        expect(late).to_be_attached()
        expect(late).to_be_hidden()
        page.reload()
    wait_for_notebook(page)
    # Nothing replaces what the page has kept: the hint stays, and is shown after a while.
    expect(late).to_be_visible(timeout=120_000)
    assert "%engine recover" in late.inner_text()
    run_cell(page, 3)
    run_cell(page, 4)
    wait_for_prompt(page, 4)
    # This is what the page has lost.
    assert whole not in output_of(page, 2)
    shown = output_of(page, 3)
    assert whole in shown
    assert "Write the <b>alphabet</b>" in shown
    assert "1,600 tokens" in shown
    assert "(True, 'length', 1600)" in output_of(page, 4)
    screenshot(page, "recover-after-reload")
    restart_kernel(page)
    run_cell(page, 5)
    wait_for_prompt(page, 5)
    after = output_of(page, 5)
    assert whole in after
    assert "stopped at the limit" in after
    screenshot(page, f"recover-after-restart-{WIDE}-light")
    set_width(page, NARROW)
    set_theme(page, dark=True)
    page.locator(".jp-CodeCell").nth(5).scroll_into_view_if_needed()
    screenshot(page, f"recover-after-restart-{NARROW}-dark")
    run_cell(page, 6)
    wait_for_prompt(page, 6)
    assert "processes are gone" in output_of(page, 6)
