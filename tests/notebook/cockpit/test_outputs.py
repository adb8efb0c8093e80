"""All that cells show: hostile texts, looks, mathematics, and a branch."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pytest
from notebook_support.cockpit import (
    MARKS,
    WHOLE,
    Cockpit,
    Color,
    DashboardView,
    faults_of_layout,
    mixed,
    timeline_pixels,
)
from notebook_support.desk import Desk
from notebook_support.lab import (
    WIDE,
    reload,
    run_command,
    save,
    screenshot,
    set_theme,
    set_width,
)
from notebook_support.paced import start_line
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from nbengine.widgets.dashboard.palette import CACHED_OPACITY, ROLES

HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
TITLED = f"# Title\n\n| a | b |\n|---|---|\n| $x^2$ | {HOSTILE} |"
HOSTILE_NAME = "<img src=x onerror=window.pwned=1>"
SCORES = """
def size(result, row):
    return len(row["words"])

def hot(result, row):
    return row["words"] == "sea" and row["temperature"] > 0

def fails(result, row):
    raise ValueError(result.text)
"""

# The words that have no room in one line, of texts that are one word.
DIVIDED = """(nodes) => nodes.map((node) => {
    const range = document.createRange();
    range.selectNodeContents(node.querySelector("button")?.firstChild ?? node);
    const text = range.toString().trim();
    return text.includes(" ") || range.getClientRects().length < 2 ? "" : text;
}).filter(Boolean)"""

pytestmark = MARKS


@pytest.fixture(scope="module")
def hostile(desk: Desk, clean_after_module: None) -> Iterator[tuple[Cockpit, dict[str, int]]]:
    """A notebook with hostile texts in all that it shows, and the numbers of its cells."""
    cockpit = Cockpit(desk.open(f"{HOSTILE_NAME}.ipynb", ["'the first cell'"], height=WHOLE))
    cockpit.run("%engine start random-tiny --name real --num-blocks 64 --dtype float32")
    cockpit.run(f"words = [{HOSTILE!r}, 'sea']\n{SCORES}")
    cells = {"dashboard": cockpit.start("%dashboard")}
    cockpit.finish(cells["dashboard"])
    says = f"--choice '{json.dumps([HOSTILE])}'"
    titled = f"--choice '{json.dumps([TITLED])}'"
    sources = {
        "tokens": f"%%generate --raw --logprobs 3 {says}\n{HOSTILE}",
        "grid": f"%%generate --raw --each words --temperature 0,1 {says}\n{HOSTILE} {{words}}",
        "scores": f"%%generate --raw --each words --temperature 0,1 --score size,hot,fails {says}\n{HOSTILE} {{words}}",
        "markdown grid": f"%%generate --raw --each words --temperature 0,1 -f markdown {titled}\n{HOSTILE} {{words}}",
        "chat": f"%%chat --system '{HOSTILE}' {says}\n{HOSTILE}",
        "conversation": "%%chat --show",
        "markdown": f"%%generate --raw --format markdown {says}\n{HOSTILE}",
        "code": f"%%generate --raw --format code {says}\n{HOSTILE}",
        "recover": "%engine recover --all",
        "runs": "%runs --last 5",
        "prompt": f"%%prompt hostile\n{HOSTILE}",
        "prompts": "%prompts show hostile",
        "history": "%engine history --last 5m",
        "models": "%engine models",
        "name": f"%engine start random-tiny --name '{HOSTILE_NAME}'",
        "file": f"%%chat --save '{HOSTILE_NAME}.json' {says}\n{HOSTILE}",
    }
    for kind, source in sources.items():
        cells[kind] = cockpit.start(source)
        cockpit.finish(cells[kind])
    yield cockpit, cells
    cockpit.run("%engine stop real")
    cockpit.close()
    desk.clear()


def assert_harmless(cockpit: Cockpit) -> None:
    """Check that nothing that a text said was done."""
    page = cockpit.page
    assert cockpit.dialogs == []
    assert page.evaluate("window.pwned") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator(".jp-OutputArea script").count() == 0


def test_hostile_texts_are_shown_as_they_are(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, cells = hostile
    page = cockpit.page
    for kind, cell in cells.items():
        if kind not in ("dashboard", "prompt", "history", "models"):
            text = HOSTILE_NAME if kind in ("name", "file") else HOSTILE
            expect(cockpit.output(cell), kind).to_contain_text(text)
    assert_harmless(cockpit)
    answers = cockpit.output(cells["markdown grid"]).locator("tr[data-row] > td")
    expect(answers.locator("h1")).to_have_count(4)
    expect(answers.first.locator("table mjx-container")).to_have_count(1)
    expect(answers.first.locator("table tr").first).to_have_css("display", "table-row")
    cockpit.run("%%generate -a -o held --raw --max-tokens 512 --set ignore_eos=true\n" + HOSTILE)
    cockpit.run("held.cancel()")
    board = cockpit.board(cells["dashboard"])
    # In the window's usual width of a notebook there is no room for the column with texts.
    expect(board.root.locator(".nbe-preview").first).to_have_attribute("title", re.compile("<img src=x"))
    set_width(page, 1900, WHOLE)
    expect(board.root.locator("td.nbe-cell-text", has_text="<img src=x").first).to_be_visible()
    blocks = board.root.locator(".nbe-map canvas")
    blocks.hover(position={"x": 4, "y": 4})
    expect(page.locator(".nbe-tip:not([hidden])")).to_contain_text("<img src=x")
    set_width(page, WIDE, WHOLE)
    save(page)
    reload(page)
    board.wait_until_live()
    expect(cockpit.output(cells["tokens"])).to_contain_text(HOSTILE)
    assert_harmless(cockpit)


def test_everything_can_be_read_wide_and_narrow_light_and_dark(
    hostile: tuple[Cockpit, dict[str, int]],
) -> None:
    cockpit, cells = hostile
    board = cockpit.board(cells["dashboard"])
    grounds, pictures = set(), set()
    for dark in (False, True):
        set_theme(cockpit.page, dark=dark)
        # By itself, not because of another size.
        board.look()
        board.wait_for_color("map", mixed(ROLES["cached"], CACHED_OPACITY, board.ground))
        assert sum(board.colors("timeline").values()) > 0
        for width in (1600, 700):
            set_width(cockpit.page, width, WHOLE)
            board.wait_until_live()
            board.wait_until_settled()
            ground = board.ground
            grounds.add(ground)
            board.wait_for_color("map", mixed(ROLES["cached"], CACHED_OPACITY, ground))
            name = f"{width}-{'dark' if dark else 'light'}"
            assert board.root.get_attribute("data-theme") == name.partition("-")[2]
            pictures.add(timeline_pixels(board))
            for kind, cell in cells.items():
                screenshot(cockpit.output(cell), f"cockpit-{kind}-{name}")
                # A table of many columns is scrolled where there is no room for it.
                if kind not in ("history", "models"):
                    assert faults_of_layout(cockpit.output(cell)) == [], (kind, name)
            assert cockpit.output(cells["scores"]).locator(".nbs-table th").evaluate_all(DIVIDED) == []
    assert len(grounds) == 2
    assert len(pictures) == 4


def test_a_dashboard_pops_out_into_a_window_that_goes_on_and_has_the_notebook_s_theme(
    hostile: tuple[Cockpit, dict[str, int]],
) -> None:
    cockpit, cells = hostile
    page, output = cockpit.page, cockpit.output(cells["dashboard"])
    board = cockpit.board(cells["dashboard"])
    board.look()
    with page.expect_popup() as opening:
        board.root.get_by_role("button", name="Pop out").click()
    own = DashboardView(opening.value, opening.value.locator(".nbe-dash"))
    expect(output.locator(".nbe-away")).to_contain_text("shown in its own window")
    expect(output.locator(".nbe-still")).to_be_hidden()
    own.wait_until_live()
    steps = own.num_steps
    cockpit.run("%%generate -a -o popped --raw --max-tokens 400 --set ignore_eos=true\nOnce")
    # The newest of the requests that have ended is the first one of the table.
    expect(own.root.locator("tbody tr").first.locator(".nbe-bar").nth(1)).to_have_text(re.compile("^400 / "))
    assert own.num_steps >= steps + 400
    own.root.get_by_role("button", name="The last hour").click()
    expect(own.root.get_by_role("application", name="tokens/s")).to_be_visible()
    for dark in (True, False):
        set_theme(page, dark=dark)
        theme = "dark" if dark else "light"
        expect(own.root).to_have_attribute("data-theme", theme)
        assert own.ground == color_of(page, "--jp-layout-color1")
        own.wait_for_color("map", mixed(ROLES["cached"], CACHED_OPACITY, own.ground))
        own.wait_until_settled()
        screenshot(own.page, f"dashboard-window-hour-{theme}")
        screenshot(output, f"dashboard-window-notebook-{theme}")
        assert faults_of_layout(own.root) == []
        assert faults_of_layout(output) == []
    own.root.get_by_role("button", name="Steps, requests and blocks as they are").click()
    own.wait_until_settled()
    screenshot(own.page, "dashboard-window-now")
    own.page.close()
    expect(output.locator(".nbe-away")).to_have_count(0)
    board.wait_until_live()
    assert board.num_steps >= steps + 400
    cockpit.run("%%generate --raw --max-tokens 40 --set ignore_eos=true\nOnce")
    board.look()
    page.wait_for_function(
        "([slider, steps]) => Number(slider.max) >= steps + 440",
        arg=[board.root.locator(".nbe-slider").element_handle(), steps],
    )
    # A cell that is deleted takes its dashboard's window along.
    other = cockpit.dashboard("%dashboard")
    with page.expect_popup() as opening:
        other.root.get_by_role("button", name="Pop out").click()
    expect(opening.value.locator(".nbe-name")).to_have_text("real")
    with opening.value.expect_event("close"):
        run_command(page, "notebook:delete-cell")
    board.look()
    board.wait_until_live()


def color_of(page: Page, variable: str) -> Color:
    """The value of a variable of the notebook's theme, as a colour."""
    text = page.evaluate(
        """(name) => {
            const probe = document.body.appendChild(document.createElement("i"));
            probe.style.color = `var(${name})`;
            const { color } = getComputedStyle(probe);
            probe.remove();
            return color;
        }""",
        variable,
    )
    red, green, blue = (int(part) for part in re.findall(r"\d+", text)[:3])
    return red, green, blue


def test_the_keyboard_sorts_a_grid_by_its_scores_and_leaves_the_rows_that_differ(
    hostile: tuple[Cockpit, dict[str, int]],
) -> None:
    cockpit, cells = hostile
    output, press = cockpit.output(cells["scores"]), cockpit.page.keyboard.press
    rows, status = output.locator("tr[data-row]"), output.locator(".nbs").get_by_role("status")
    means, differences = output.locator(".nbs").get_by_role("table").all()
    head = means.get_by_role("columnheader", name="size")

    def order() -> list[str | None]:
        return [row.get_attribute("data-row") for row in rows.all()]

    expect(rows.first).to_contain_text("fails: failed, ValueError: <img src=x")
    expect(differences.get_by_role("rowheader")).to_have_text("temperature 1")
    head.get_by_role("button").focus()
    press("Enter")
    expect(status).to_have_text("2 of 2 rows, sorted by size, highest first")
    assert order() == ["0", "1"]
    press("Enter")
    expect(status).to_have_text("2 of 2 rows, sorted by size, lowest first")
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert order() == ["1", "0"]
    press("Tab")
    press("Tab")
    press("Tab")
    expect(output.get_by_role("checkbox", name="only where the settings differ")).to_be_focused()
    press("Space")
    expect(status).to_have_text("1 of 2 rows, sorted by size, lowest first")
    expect(rows).to_have_count(1)
    expect(rows.first).to_be_visible()
    screenshot(output, "cockpit-scores-filtered")
    press("Space")
    expect(rows).to_have_count(2)
    head.get_by_role("button").press("Enter")
    expect(status).to_have_text("2 of 2 rows")
    assert order() == ["0", "1"]


def test_a_click_on_a_token_begins_a_branch_that_streams(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    # An answer takes half a minute, so that it does not end before the page has shown a part of it.
    cockpit.run(start_line(name="paced", tokens_per_second=100))
    try:
        expect_branch_that_streams(cockpit)
    finally:
        cockpit.run("%engine stop paced")


def expect_branch_that_streams(cockpit: Cockpit) -> None:
    page = cockpit.page
    cell = cockpit.start("%%generate --engine paced -a -o root --raw --logprobs 5 --max-tokens 3000\nOnce")
    tokens = cockpit.output(cell).locator(".nbt-token")
    expect(tokens.nth(20)).to_be_visible()
    cockpit.run("root.cancel()\nroot = root.result()")
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const note = () => window.lengths.add(document.querySelectorAll('.nbt-token').length);
            new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    other = page.locator(".nbt-popover:popover-open button").nth(1)
    # JupyterLab may draw the output again just then, when the answer has ended.
    for _ in range(5):
        tokens.nth(10).click()
        with contextlib.suppress(PlaywrightTimeoutError):
            other.click(timeout=3000)
            break
    tabs = cockpit.output(cell).get_by_role("tab")
    expect(tabs).to_have_count(2)
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    # It comes piece by piece.
    page.wait_for_function("window.lengths.size > 4")
    assert "(2, 10, False)" in cockpit.run("b = root.tree[1]\nlen(root.tree), b.position, b.done")
    length = int(re.findall(r"\d+", cockpit.run("b.cancel()\nawait b\nlen(b.token_ids)"))[-1])
    assert 10 < length < 3000
    expect(tokens).to_have_count(length)


def test_plain_text_is_no_mathematics(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    prices = r"It costs $5 and $10, or \(x\) and \[y\]"
    says = f"--choice '{json.dumps([prices])}'"
    cells = [
        cockpit.start(f"{line} {says}\n{prices}")
        for line in (
            "%%generate --raw",
            "%%generate --raw -n 2",
            "%%generate --raw --logprobs 2",
            "%%generate --raw --temperature 0,1",
            "%%chat",
        )
    ]
    for cell in cells:
        cockpit.finish(cell)
    # The page does typeset what is mathematics, and has come to it.
    typeset = cockpit.start("from IPython.display import HTML\nHTML('<p>$x^2$</p>')")
    cockpit.finish(typeset)
    expect(cockpit.output(typeset).locator("mjx-container")).to_have_count(1)
    for cell in cells:
        expect(cockpit.output(cell)).to_contain_text(prices)
        expect(cockpit.output(cell).locator("mjx-container")).to_have_count(0)


def test_a_grid_of_many_rows_is_judged_compared_and_read_on(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    cockpit.run("many = [f'number {row}' for row in range(300)]")
    line = "%%generate --raw --each many --temperature 0,1 --max-tokens 10 --set ignore_eos=true -o judged\n{many}"
    cell = cockpit.start(line)
    cockpit.finish(cell)
    output = cockpit.output(cell)
    rows = output.locator("tr[data-row]")
    expect(output.locator("thead th[scope=col]")).to_have_count(3)
    expect(rows.first).to_contain_text("number 0")
    # The page is at the next cell, with the grid's end in sight: only as much is drawn as the view has room for.
    drawn = rows.count()
    assert drawn <= 80
    more = output.get_by_role("button", name="more rows")
    expect(more).to_have_text(f"{300 - drawn} more rows")
    first, second = (rows.first.locator("td").nth(column) for column in (0, 1))
    first.get_by_role("button", name="a thumb up").click()
    expect(first.get_by_role("button", name="a thumb up")).to_have_attribute("aria-pressed", "true")
    second.get_by_role("button", name="a thumb down").press("Enter")
    expect(second.get_by_role("button", name="a thumb down")).to_have_attribute("aria-pressed", "true")
    assert "[1, -1, None]" in cockpit.run("[row['thumb'] for row in judged.rows()[:3]]")
    first.get_by_role("button", name="compare with another answer").click()
    second.get_by_role("button", name="compare with another answer").click()
    expect(output.locator(".nbc-diff ins").first).to_be_visible()
    second.get_by_role("button", name="ask this again").click()
    expect(second.get_by_role("button", name="a thumb down")).to_have_attribute("aria-pressed", "false")
    rows.last.scroll_into_view_if_needed()
    expect(rows.nth(drawn)).to_be_attached()
    drawn = rows.count()
    more.press("Enter")
    expect(rows.nth(drawn)).to_be_attached()
    assert_harmless(cockpit)
