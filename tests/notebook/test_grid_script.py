"""The scripts of a grid, of its scores and of the playground, in a page whose kernel answers or has gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import needs_chromium
from dashboard_page import ADDRESS, MODELS
from notebook_support.bare import BarePages
from playwright.sync_api import Page, expect

from nbengine.magics.generation.markdown import harmless_markdown
from nbengine.magics.playground.controls import controls
from nbengine.widgets.scripts import bundled, stylesheet

GONE = "void (Model.prototype.send = () => { throw new Error('Cannot send'); })"
NO_KERNEL = "No kernel answers, and 80 rows are not in this page: run the cell again."
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
RENDERER = """() => {
window.rendered = [];
window.typeset = [];
Model.prototype.widget_manager = {
  rendermime: {
    createModel: (contents) => contents,
    createRenderer: (kind) => {
      const node = document.createElement("div");
      const renderModel = async ({ data, trusted }) => {
        rendered.push([kind, trusted]);
        node.innerHTML = data[kind]
          .replace(/^# (.*)$/gm, "<h1>$1</h1>")
          .replace(/^- (.*)$/gm, "<li>$1</li>")
          .replace("| in | it |", "<table><tbody><tr><td>in</td><td>it</td></tr></tbody></table>");
      };
      return { node, renderModel };
    },
    latexTypesetter: { typeset: (node) => typeset.push(node.isConnected) },
  },
};
}"""
"""A stand-in for the notebook's renderer, in which HTML is live as in a notebook that is trusted."""

pytestmark = needs_chromium


@pytest.fixture
def page(bare_pages: BarePages) -> Iterator[Page]:
    """A page with widgets, of which no script may fail."""
    page = bare_pages.take()
    page.set_default_timeout(10_000)
    styles = "".join(f"<style>{stylesheet(name)}</style>" for name in ("cells", "scores", "playground"))
    text = f"<!doctype html><html lang=en><meta charset=utf-8>{styles}<body><div id=cells></div><script>{MODELS}</script>"
    page.route(f"{ADDRESS}/**", lambda route: route.fulfill(body=text, content_type="text/html"))
    page.goto(f"{ADDRESS}/")
    yield page
    failures = page.evaluate("failures")
    bare_pages.give_back(page)
    assert failures == []


def mount(page: Page, name: str, **traits: Any) -> None:
    page.evaluate(
        """([script, traits]) => {
            window.script = URL.createObjectURL(new Blob([script], { type: 'text/javascript' }));
            return mount(traits);
        }""",
        [bundled(name), traits],
    )


def cell(*answers: str, is_markdown: bool = False) -> dict[str, Any]:
    return {
        "answers": answers,
        "error": "",
        "foot": "",
        "scores": [],
        "thumb": 0,
        "pinned": False,
        "code": False,
        "markdown": [harmless_markdown(answer) for answer in answers] if is_markdown else [],
    }


def row(number: int) -> dict[str, Any]:
    return {"row": number, "labels": [["word", f"w{number}"]], "cells": [cell(f"answer {number}")]}


def drawn(page: Page) -> list[int]:
    return [
        int(number)
        for number in page.locator("tr[data-row]").evaluate_all("rows => rows.map((r) => r.dataset.row)")
    ]


def show_grid(page: Page) -> None:
    """Show a grid of 120 rows, of which the page has 40, and its table of scores."""
    first = [row(number) for number in range(40)]
    mount(page, "cells", grid="g", columns=[[]], num_rows=120, first_rows=first, foot=[])
    means = {"title": "setting", "scores": ["size"], "rows": [{"label": "a", "cells": ["3"]}] * 2, "note": ""}
    differences = {**means, "title": "against a", "rows": [{"label": "b", "cells": ["+0, n 9"]}]}
    order = {"size": list(range(120))}
    mount(
        page,
        "scores",
        grid="g",
        summary={**means, "differences": differences},
        order=order,
        differing=[number < 3 for number in range(120)],
    )


def test_without_a_kernel_a_grid_sorts_and_filters_the_rows_that_it_has(page: Page) -> None:
    page.evaluate(GONE)
    show_grid(page)
    page.get_by_role("button", name="size").click()
    expect(page.locator(".nbc").get_by_role("status")).to_have_text(NO_KERNEL)
    assert drawn(page) == list(range(39, -1, -1))
    page.get_by_role("checkbox").check()
    assert drawn(page) == [2, 1, 0]
    page.get_by_title("ask this again").first.click()
    expect(page.locator(".nbc").get_by_role("status")).to_have_text("No kernel answers: run the cell again.")
    # A kernel that answers after all brings the rest.
    page.get_by_role("checkbox").uncheck()
    page.evaluate("delete Model.prototype.send")
    page.evaluate("(rows) => models[0].deliver({ kind: 'rows', rows }, [])", [row(n) for n in range(40, 120)])
    assert drawn(page) == list(range(119, 79, -1))


def test_scores_that_change_are_shown_and_move_no_row(page: Page) -> None:
    show_grid(page)
    page.evaluate("models[1].set('order', { size: Array.from({ length: 120 }, (_, n) => -n) })")
    table = page.get_by_role("table").filter(has_text="against a")
    expect(table.get_by_role("row")).to_have_text(["against asize", "b+0, n 9"])
    page.evaluate(
        """() => {
            const { differences, ...means } = models[1].get('summary');
            const rows = (text) => [{ label: 'b', cells: [text] }];
            const changed = { ...differences, rows: rows('+1, n 9') };
            models[1].set('summary', { ...means, rows: rows('4'), differences: changed });
        }"""
    )
    expect(page.locator(".nbs td")).to_have_text(["4", "+1, n 9"])
    assert drawn(page) == list(range(40))
    page.get_by_role("button", name="size").click()
    assert drawn(page) == list(range(40))


def show_markdown(page: Page, *answers: str) -> None:
    """Show a grid with a cell for each answer, in Markdown."""
    rows = [{**row(number), "cells": [cell(text, is_markdown=True)]} for number, text in enumerate(answers)]
    mount(page, "cells", grid="g", columns=[[]], num_rows=len(rows), first_rows=rows, foot=[])


def test_markdown_in_a_cell_is_elements_and_hostile_html_in_it_is_text(page: Page) -> None:
    page.evaluate(RENDERER)
    show_markdown(
        page, f"# Title\n- one\n- two\n{HOSTILE}", "short " * 100 + "\n| in | it |", "# long\n- line\n" * 30
    )
    cells = page.locator("tr[data-row] > td")
    expect(cells.nth(0).locator("h1")).to_have_text("Title")
    expect(cells.nth(0).locator("li")).to_have_text(["one", "two"])
    expect(cells.nth(0)).to_contain_text(HOSTILE)
    # A table in an answer is no row of the grid's boxes.
    assert cells.nth(1).locator("tr").evaluate("(row) => getComputedStyle(row).display") == "table-row"
    # It opens where what is rendered has no room.
    openers = page.get_by_title("show the whole answer")
    expect(openers.nth(1)).to_be_hidden()
    expect(openers.nth(2)).to_be_visible()
    openers.nth(2).click()
    expect(cells.nth(2).locator(".nbc-text")).to_have_class("nbc-text")
    page.evaluate("document.getElementById('cells').style.width = '200px'")
    expect(openers.nth(1)).to_be_visible()
    cells.nth(1).get_by_title("ask this again").click()
    assert page.evaluate("models[0].sent") == [{"kind": "again", "position": 1}]
    news = {"kind": "cell", "position": 1, "cell": cell(f"# New {HOSTILE}", is_markdown=True)}
    page.evaluate("(news) => models[0].deliver(news, [])", news)
    expect(cells.nth(1).locator("h1")).to_have_text(f"New {HOSTILE}")
    assert page.evaluate("rendered") == [["text/markdown", False]] * 4
    assert page.evaluate("typeset") == [True] * 4
    assert page.locator(".nbc img, .nbc script").count() == 0
    assert page.evaluate("window.pwned") is None


def test_where_a_page_renders_no_markdown_for_widgets_it_stays_text(page: Page) -> None:
    show_markdown(page, f"# Title\n{HOSTILE}")
    expect(page.locator(".nbc-answer")).to_have_text(f"# Title\n{HOSTILE}")
    assert page.locator(".nbc img, .nbc script").count() == 0


def test_a_playground_whose_kernel_has_gone_says_so(page: Page) -> None:
    side = {"engine": "", "raw": False, "settings": {}}
    state = {"name": "", "text": "hi", "values": {}, "sides": [side, side]}
    mount(page, "playground", controls=[], state=state, answers=[])
    notice = page.locator(".nbp-notice")
    expect(notice).to_be_empty()
    page.evaluate(GONE)
    for name in ("keep", "▶ Run both", "insert as cell"):
        page.evaluate("document.querySelector('.nbp-notice').textContent = ''")
        page.get_by_role("button", name=name).first.click()
        expect(notice).to_have_text("The kernel does not answer: run the cell again.")


def test_keys_move_the_slider_of_every_quantity_from_its_place_and_beyond_is_the_field(page: Page) -> None:
    sides = [{"engine": "", "raw": False, "settings": {}} for _ in range(2)]
    state = {"name": "", "text": "hi", "values": {}, "sides": sides}
    mount(page, "playground", controls=controls(), state=state, answers=[])
    side = page.get_by_role("region", name="side A")
    sliders = side.get_by_role("slider")
    given: dict[str, str] = {}
    for number, control in enumerate(control for control in controls() if "low" in control):
        slider = sliders.nth(number)
        assert slider.get_attribute("aria-valuetext") == "as the model wants it"
        # It is at one of its ends, or has both ways to go.
        up = control["start"] < control["high"]
        slider.press("ArrowRight" if up else "ArrowLeft")
        value = control["start"] + (control["step"] if up else -control["step"])
        given[control["name"]] = f"{value:g}"
        expect(side.get_by_label(control["flag"], exact=True)).to_have_value(given[control["name"]])
    expect(sliders).to_have_count(len(given))
    field, slider = side.get_by_label("--max-tokens", exact=True), side.get_by_label("--max-tokens slider")
    field.fill("100000")
    expect(slider).to_have_attribute("aria-valuetext", "100000")
    page.get_by_role("button", name="insert as cell").first.click()
    sent = page.evaluate("models[0].sent.at(-1).state.sides[0].settings")
    assert sent == {**given, "max_tokens": "100000"}
    field.fill("")
    expect(slider).to_have_value("512")
