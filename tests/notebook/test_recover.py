"""No written text is lost when a kernel restarts or is killed, or a page is loaded again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.kernel import Kernel
from notebook_support.lab import (
    NARROW,
    WIDE,
    output_of,
    reload,
    restart_kernel,
    run_cell,
    save,
    screenshot,
    set_theme,
    set_width,
    wait_for_prompt,
    wait_for_text,
)
from notebook_support.paced import start_line
from playwright.sync_api import expect

StartKernel = Callable[[], Kernel]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_alphabet(text: str, at_least: int) -> bool:
    """Return whether a text of `at_least` characters is the beginning of what the paced engine writes."""
    return len(text) >= at_least and (ALPHABET * 200).startswith(text)


def test_a_kernel_killed_in_the_middle_of_an_answer_finds_it_after_its_restart(
    start_kernel: StartKernel,
) -> None:
    kernel = start_kernel()
    kernel.run(start_line(tokens_per_second=200))
    kernel.run("%%generate -a -n 2 --max-tokens 3000\nin the background")
    cell = kernel.start("%%generate --max-tokens 3000\nin the cell")
    kernel.wait_for_text(cell, ALPHABET)
    kernel.restart(now=True)
    # Without `%engine attach`: it joins its own engine by itself.
    shown = kernel.run("%engine recover -o newest")
    assert "attached to engine 'random-tiny'" in shown.text
    assert shown.text.index("> in the cell") < shown.text.index("> in the background")
    assert shown.text.count("ended early: the client that had asked left the engine") >= 2
    text, prompt, tokens, reason = kernel.value(
        "(newest.text, newest.prompt, newest.token_ids, newest.finish_reason)"
    )
    assert is_alphabet(text, at_least=26)
    assert (prompt, reason, len(tokens)) == ("in the cell", "abort", len(text))
    listing = kernel.run("%engine recover -l").text.splitlines()
    assert [line.split()[0] for line in listing if "in the" in line] == ["1", "2"]
    assert "new" not in "".join(listing[1:]).split()
    kernel.run("%engine recover 2 -o both")
    both = kernel.value("[answer.text for answer in both.outputs]")
    assert len(both) == 2
    assert all(is_alphabet(answer, at_least=26) for answer in both)
    # The new kernel's answers and the old one's are one list, and what goes on in the background streams on.
    kernel.run("%%generate -a -o handle --max-tokens 150\nnow")
    shown = kernel.run("%engine recover")
    assert "> now" in shown.text
    assert (ALPHABET * 6)[:150] in shown.text
    assert "150 tokens" in shown.text
    assert kernel.value("handle.result().text") == (ALPHABET * 6)[:150]
    assert "3 answers forgotten" in kernel.run("%engine recover --clear").text
    assert "no answer of this notebook is kept" in kernel.run("%engine recover").text
    kernel.run("%engine stop")
    assert "is gone with it" in kernel.run("%engine recover").text


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
    for cell in range(3):
        run_cell(page, cell)
    wait_for_text(page, ALPHABET * 2, 2)
    save(page)
    late = page.locator(".jp-CodeCell").nth(2).locator(".nbe-late")
    expect(late).to_be_attached()
    expect(late).to_be_hidden()
    reload(page)
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
