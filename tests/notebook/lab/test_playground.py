"""The playground in JupyterLab: two sides answer, stop, and become a cell and a script; keys and themes do what they should."""

from __future__ import annotations

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import CODE_CELL, run_command, screenshot, set_theme, set_width, wait_for_prompt
from notebook_support.paced import start_line
from playwright.sync_api import Locator, Page, expect

TEXT = "the quick brown fox <b>jumps</b> over {thing}"
LAST = "[(r['prompt'], r['max_tokens']) for r in nbengine.runs(last=2)]"

pytestmark = [needs_chromium, pytest.mark.timeout(240)]


def side_of(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=f"side {name}")


def set_field(side: Locator, flag: str, value: str) -> None:
    side.get_by_label(flag, exact=True).fill(value)


def test_two_sides_answer_stop_and_become_cells(open_lab: OpenLab) -> None:
    cells = [
        f"import nbengine\n%load_ext nbengine\n{start_line(tokens_per_second=200)}",
        "%playground",
        LAST,
        "%engine stop",
    ]
    page = open_lab("playground.ipynb", cells, width=1600)
    for _ in range(2):
        run_command(page, "notebook:run-cell-and-select-next")
    wait_for_prompt(page, 1)
    editor = page.get_by_label("prompt", exact=True)
    # Keys that are shortcuts of the notebook are text here.
    editor.click()
    editor.press_sequentially("dd")
    expect(editor).to_have_value("dd")
    editor.fill(TEXT)
    variable = page.get_by_label("thing", exact=True)
    variable.fill("the lazy dog")
    page.get_by_label("name of the prompt").fill("fox")
    a, b = side_of(page, "A"), side_of(page, "B")
    for side, tokens in ((a, 7), (b, 9)):
        set_field(side, "--max-tokens", str(tokens))
        set_field(side, "--set", "ignore_eos=true")
        side.get_by_label("raw").check()
    slider = a.get_by_label("--temperature slider")
    slider.focus()
    slider.press("ArrowRight")
    expect(a.get_by_label("--temperature", exact=True)).to_have_value("0.05")

    # Examples come and go, and the cursor goes where the next thing is to be written.
    page.locator(".nbp summary", has_text="examples (0)").click()
    for number in (1, 2):
        page.get_by_role("button", name="add an example").click()
        expect(page.get_by_label(f"question of example {number}")).to_be_focused()
        page.keyboard.insert_text(f"question {number}")
    page.get_by_role("button", name="remove example 1").click()
    expect(page.get_by_label("question of example 1")).to_have_value("question 2")
    expect(page.locator(".nbp summary", has_text="examples (1)")).to_be_visible()
    page.get_by_label("answer of example 1").fill("<b>an answer</b>")

    editor.press("Control+Enter")
    expect(a.get_by_role("status")).to_contain_text("7 tokens")
    expect(b.get_by_role("status")).to_contain_text("9 tokens")
    expect(b.locator(".nbp-answer")).not_to_be_empty()
    expect(page.locator(".nbp b")).to_have_count(0)
    screenshot(page, "playground-light-1600")
    set_theme(page, dark=True)
    screenshot(page, "playground-dark-1600")
    set_width(page, 700, 1600)
    box = page.locator(".nbp").bounding_box()
    assert box is not None
    assert page.locator(".nbp").evaluate("root => root.scrollWidth <= root.clientWidth + 1")
    screenshot(page, "playground-dark-700")
    set_theme(page, dark=False)
    screenshot(page, "playground-light-700")
    set_width(page, 1600)

    set_field(b, "--temperature", "-1")
    b.get_by_role("button", name="Run").click()
    expect(b.get_by_role("alert")).to_contain_text("temperature")
    set_field(b, "--temperature", "1")
    # It would write until the context is full, twenty seconds later.
    set_field(b, "--max-tokens", "100000")
    b.get_by_role("button", name="Run").click()
    b.get_by_role("button", name="Stop").click()
    expect(b.get_by_role("button", name="Run")).to_be_visible()
    expect(b.get_by_role("alert")).to_be_empty()

    a.get_by_role("button", name="as Python").click()
    expect(page.locator(".nbp-source")).to_contain_text("with LLM('random-tiny') as llm:")
    a.get_by_role("button", name="insert as cell").click()
    expect(page.locator(".nbp-source")).to_contain_text("%%generate @fox:1 'thing=the lazy dog'")
    # The next cell that runs brings it.
    page.locator(CODE_CELL).nth(2).locator(".jp-InputArea-editor").click()
    run_command(page, "notebook:run-cell")
    wait_for_prompt(page, 2)
    inserted = page.locator(CODE_CELL).nth(3)
    expect(inserted).to_contain_text("%%generate @fox:1")
    inserted.locator(".jp-InputArea-editor").click()
    run_command(page, "notebook:run-cell")
    wait_for_prompt(page, 3)
    expect(inserted.locator(".jp-OutputArea")).to_contain_text("7 tokens")
    page.locator(CODE_CELL).nth(4).locator(".jp-InputArea-editor").click()
    run_command(page, "notebook:run-cell")
    wait_for_prompt(page, 4)
