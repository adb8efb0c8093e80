"""The cockpit as a person has it: dashboards, tokens, grids and conversations in JupyterLab."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from notebook_support.cockpit import Cockpit, DashboardView, color, faults_of_layout, mixed, number_of
from notebook_support.kernel import DEADLINE, Kernel
from notebook_support.lab import (
    NARROW,
    TOKEN,
    WIDE,
    jupyter_lab,
    jupyter_notebook,
    lab_browser,
    open_notebook,
    reload,
    restart_kernel,
    save,
    screenshot,
    set_theme,
    set_width,
    wait_until_idle,
    write_notebook,
)
from notebook_support.leaks import end_engines
from notebook_support.paced import start_line
from playwright.sync_api import Browser, expect

from nbengine.widgets.palette import CACHED_OPACITY, ROLES

CHROMIUM = shutil.which("chromium") or ""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENGINE = "paced"
ENDED = re.compile("the engine was (stopped|shut down)")
WHOLE = 1500
"""A window's height at which all of a dashboard and a cell below it are in sight."""

HASTE = """
import nbengine.widgets.dashboard as module
assert "ALIVE_MS = 5000;" in module.Dashboard._esm
module.Dashboard._esm = module.Dashboard._esm.replace("ALIVE_MS = 5000;", "ALIVE_MS = 200;")
module.SILENCE = 2.0
"""

OpenCockpit = Callable[..., Cockpit]

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (Debian's package chromium)"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebooks are."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(notebook_environment: dict[str, str], kernel: Kernel, directory: Path) -> Iterator[str]:
    """One JupyterLab, and an engine that all notebooks may attach to, which writes the alphabet."""
    kernel.run(start_line(name=ENGINE, tokens_per_second=150))
    with jupyter_lab(directory, notebook_environment) as address:
        yield address
    kernel.run(f"%engine stop {ENGINE}")
    # Those of notebooks whose test has failed.
    end_engines()


@pytest.fixture(scope="module")
def chromium(lab: str, directory: Path) -> Iterator[Browser]:
    """One browser."""
    with lab_browser(CHROMIUM, directory) as browser:
        yield browser


@pytest.fixture
def open_cockpit(chromium: Browser, lab: str, directory: Path) -> Iterator[OpenCockpit]:
    """Open notebooks with the extension, attached to the engine."""
    opened: list[Cockpit] = []

    def open_one(name: str = "cockpit.ipynb", *, height: int = WHOLE) -> Cockpit:
        write_notebook(directory / name, ["'the first cell'"])
        opened.append(Cockpit(open_notebook(chromium, lab, name, height=height)))
        assert "attached to engine" in opened[-1].run(f"%engine attach {ENGINE}")
        return opened[-1]

    yield open_one
    for cockpit in opened:
        cockpit.close()


HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
HOSTILE_NAME = "<img src=x onerror=window.pwned=1>"


def step_of(text: str) -> int:
    """The first step that a text names."""
    found = re.search(r"step ([\d,]+)", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def timeline_pixels(board: DashboardView) -> str:
    """The timeline's picture."""
    picture: str = board.root.locator(".nbe-timeline canvas").evaluate("(canvas) => canvas.toDataURL()")
    return picture


def test_the_dashboard_changes_while_a_cell_streams_and_while_the_kernel_is_idle(
    open_cockpit: OpenCockpit,
) -> None:
    cockpit = open_cockpit()
    board = cockpit.dashboard()
    expect(board.state).to_have_text("idle")
    before = board.num_steps
    cell = cockpit.start("%%generate -o answer --raw --max-tokens 300\nWrite the alphabet")
    row = board.running()
    seen = [board.wait_for_output(row, 20)]
    number = number_of(row)
    assert board.state.inner_text() == "running"
    assert board.counts["held"] > 0
    cell_pixels = board.pixels_of_request(number)
    assert cell_pixels > 50
    assert board.colors("timeline")[color(ROLES["decode"])] > 20
    steps = board.num_steps
    assert steps > before + 10
    seen.append(board.wait_for_output(row, seen[0] + 60))
    assert board.num_steps >= steps + 60
    assert board.tile("tokens out").endswith("/s")
    assert 50 < float(board.tile("tokens out").removesuffix("/s")) < 200
    # Longer, it holds more blocks.
    assert board.pixels_of_request(number) > cell_pixels
    assert (ALPHABET * 12)[:300] in cockpit.finish(cell)

    expect(board.state).to_have_text("idle")
    board.expect_state(number, "length")
    assert board.wait_for_output(board.row(number), 300) == 300
    assert board.counts["held"] == 0
    assert board.counts["cached"] > 0
    assert board.pixels_of_request(number) == 0

    # In the background: the kernel has nothing to do, and the dashboard changes.
    steps = board.num_steps
    assert "answer" not in cockpit.run("%%generate -a -o handle --raw --max-tokens 150\nAgain")
    row = board.running()
    second = number_of(row)
    assert second != number
    board.wait_for_output(row, 75)
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
    cell = cockpit.start("%%generate -o answer --raw --max-tokens 3000\nWrite")
    row = board.running()
    board.wait_for_output(row, 30)
    number = number_of(row)
    row.get_by_role("button", name="Abort").click()
    assert cockpit.finish(cell).startswith(ALPHABET)
    board.expect_state(number, "abort")
    reason, text = cockpit.run("print(answer.finish_reason, answer.text)").split()
    assert reason == "abort"
    assert len(text) >= 30
    assert (ALPHABET * 200).startswith(text)

    cockpit.run("%%generate -a -o handle --raw --max-tokens 3000\nWrite")
    cell = cockpit.start("while not handle.done: time.sleep(0.05)\n'not busy any more'")
    board.wait_for_output(row, 30)
    number = number_of(row)
    prompt = cockpit.page.locator(".jp-CodeCell").nth(cell).locator(".jp-InputPrompt")
    expect(prompt).to_contain_text("*")
    row.get_by_role("button", name="Abort").click()
    # By the widget's message alone: had the kernel been interrupted, this would be a traceback.
    assert "not busy any more" in cockpit.finish(cell)
    reason, text = cockpit.run("r = handle.result()\nprint(r.finish_reason, r.text)").split()
    assert reason == "abort"
    assert len(text) >= 30
    assert (ALPHABET * 200).startswith(text)
    board.expect_state(number, "abort")
    expect(board.state).to_have_text("idle")


def test_scrubbing_shows_earlier_steps_while_live_goes_on(open_cockpit: OpenCockpit) -> None:
    cockpit = open_cockpit()
    page = cockpit.page
    board = cockpit.dashboard()
    cockpit.run("%%generate -a -o handle --raw --max-tokens 1500\nWrite")
    row = board.running()
    at_pause = board.wait_for_output(row, 200)
    board.root.get_by_role("button", name="Pause").click()
    timeline = board.root.locator(".nbe-timeline")
    expect(timeline).to_have_attribute("data-live", "false")
    place, steps = board.place, board.num_steps
    picture = timeline_pixels(board)
    board.wait_for_output(row, at_pause + 60)
    assert board.num_steps > steps
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
    assert "decode" in told[0].lower()

    page.keyboard.press("Escape")
    canvas.hover(position={"x": 70, "y": 10})
    far = step_of(board.tip())
    board.root.get_by_role("button", name="Zoom in").click()
    canvas.hover(position={"x": 71, "y": 10})
    assert far < step_of(board.tip()) < step_of(place)
    board.root.get_by_role("button", name="Zoom out").click()
    canvas.hover(position={"x": 70, "y": 10})
    assert step_of(board.tip()) == far

    slider = board.root.locator(".nbe-slider")
    slider.fill(str(steps - 100))
    expect(board.root.locator(".nbe-place")).to_contain_text(f"step {step_of(place) - 100:,} ")
    assert timeline_pixels(board) != picture

    with page.expect_download() as download:
        board.root.get_by_role("button", name="Export as Chrome trace").click()
    trace = json.loads(download.value.path().read_text())
    assert download.value.suggested_filename == f"{ENGINE}-trace.json"
    assert len(trace["traceEvents"]) > 100

    board.root.get_by_role("button", name="Go on live").click()
    expect(timeline).to_have_attribute("data-live", "true")
    assert step_of(board.place) > step_of(place) + 60
    cockpit.run("handle.cancel()")


@pytest.fixture(scope="module")
def hostile(chromium: Browser, lab: str, directory: Path) -> Iterator[tuple[Cockpit, dict[str, int]]]:
    """A notebook with hostile texts in all that it shows, and the numbers of its cells."""
    name = f"{HOSTILE_NAME}.ipynb"
    write_notebook(directory / name, ["'the first cell'"])
    cockpit = Cockpit(open_notebook(chromium, lab, name, height=WHOLE))
    cockpit.run("%engine start random-tiny --name real --num-blocks 64 --dtype float32")
    cockpit.run(f"words = [{HOSTILE!r}, 'sea']")
    cells = {"dashboard": cockpit.start("%dashboard")}
    cockpit.finish(cells["dashboard"])
    says = f"--choice '{json.dumps([HOSTILE])}'"
    sources = {
        "tokens": f"%%generate --raw --logprobs 3 {says}\n{HOSTILE}",
        "grid": f"%%generate --raw --each words --temperature 0,1 {says}\n{HOSTILE} {{words}}",
        "chat": f"%%chat --system '{HOSTILE}' {says}\n{HOSTILE}",
        "conversation": "%%chat --show",
        "markdown": f"%%generate --raw --format markdown {says}\n{HOSTILE}",
        "code": f"%%generate --raw --format code {says}\n{HOSTILE}",
        "recover": "%engine recover --all",
        "name": f"%engine start random-tiny --name '{HOSTILE_NAME}'",
        "file": f"%%chat --save '{HOSTILE_NAME}.json' {says}\n{HOSTILE}",
    }
    for kind, source in sources.items():
        cells[kind] = cockpit.start(source)
        cockpit.finish(cells[kind])
    yield cockpit, cells
    cockpit.run("%engine stop real")
    cockpit.close()


def assert_harmless(cockpit: Cockpit) -> None:
    """Nothing that a text said was done."""
    page = cockpit.page
    assert cockpit.dialogs == []
    assert page.evaluate("window.pwned") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator(".jp-OutputArea script").count() == 0


def test_hostile_texts_are_shown_as_they_are(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, cells = hostile
    page = cockpit.page
    for kind, cell in cells.items():
        if kind != "dashboard":
            text = HOSTILE_NAME if kind in ("name", "file") else HOSTILE
            expect(cockpit.output(cell), kind).to_contain_text(text)
    assert_harmless(cockpit)
    cockpit.run("%%generate -a -o held --raw --max-tokens 512 --set ignore_eos=true\n" + HOSTILE)
    cockpit.run("held.cancel()")
    board = cockpit.board(cells["dashboard"])
    # In the window's usual width of a notebook there is no room for the column with texts.
    expect(board.root.locator(".nbe-preview").first).to_have_attribute("title", re.compile("<img src=x"))
    set_width(page, 1900, WHOLE)
    expect(board.root.locator("td.nbe-cell-text", has_text="<img src=x").first).to_be_visible()
    blocks = board.root.locator(".nbe-blocks canvas")
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
        for width in (WIDE, NARROW):
            set_width(cockpit.page, width, WHOLE)
            board.wait_until_live()
            ground = board.ground
            grounds.add(ground)
            board.wait_for_color("blocks", mixed(ROLES["cached"], CACHED_OPACITY, ground))
            name = f"{width}-{'dark' if dark else 'light'}"
            assert board.root.get_attribute("data-theme") == name.partition("-")[2]
            pictures.add(timeline_pixels(board))
            for kind, cell in cells.items():
                screenshot(cockpit.output(cell), f"cockpit-{kind}-{name}")
                assert faults_of_layout(cockpit.output(cell)) == [], (kind, name)
    assert len(grounds) == 2
    assert len(pictures) == 4


def test_a_click_on_a_token_begins_a_branch_that_streams(hostile: tuple[Cockpit, dict[str, int]]) -> None:
    cockpit, _ = hostile
    page = cockpit.page
    cell = cockpit.start(
        "%%generate -o root --raw --logprobs 5 --temperature 0 --max-tokens 400 --set ignore_eos=true\nOnce"
    )
    cockpit.finish(cell)
    tokens = cockpit.output(cell).locator(".nbt-token")
    expect(tokens).to_have_count(400)
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const note = () => window.lengths.add(document.querySelectorAll('.nbt-token').length);
            new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    tokens.nth(10).click()
    page.locator(".nbt-popover button").nth(1).click()
    tabs = cockpit.output(cell).get_by_role("tab")
    expect(tabs).to_have_count(2)
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    expect(tokens).to_have_count(400)
    # It came piece by piece.
    assert page.evaluate("window.lengths.size") > 4
    assert "(2, 10, 400)" in cockpit.run("b = root.tree[1]\nlen(root.tree), b.position, len(b.token_ids)")


def test_a_page_loaded_anew_a_kernel_restarted_and_the_end_of_the_engine(
    chromium: Browser, lab: str, directory: Path
) -> None:
    write_notebook(directory / "long.ipynb", ["'the first cell'"])
    cockpit = Cockpit(open_notebook(chromium, lab, "long.ipynb", height=WHOLE))
    page = cockpit.page
    cockpit.run(start_line(name="own", tokens_per_second=200))
    before = cockpit.start("%dashboard")
    cockpit.finish(before)
    board = cockpit.board(before)
    cockpit.run("%%generate -a -o handle --raw --max-tokens 4000\nWrite")
    row = board.running()
    seen = board.wait_for_output(row, 60)
    number = number_of(row)
    save(page)
    reload(page)
    board.wait_until_live()
    board.wait_for_output(board.row(number), seen + 60)
    board.expect_state(number, "running")
    assert board.pixels_of_request(number) > 0
    row.get_by_role("button", name="Abort").click()
    board.expect_state(number, "abort")
    text = cockpit.run("print(handle.result().text)").strip()
    # What was on its way when the notebook had given it up is not in the text.
    assert board.wait_for_output(board.row(number), len(text)) - len(text) <= 3
    assert board.counts["held"] == 0

    restart_kernel(page)
    cockpit.run("%load_ext nbengine")
    assert "attached to engine 'own'" in cockpit.run("%engine attach own")
    after = cockpit.start("%dashboard")
    cockpit.finish(after)
    board = cockpit.board(after)
    cockpit.run("%%generate --raw --max-tokens 30\nWrite")
    board.expect_state(number + 1, "length")

    cockpit.run("%engine stop own")
    picture = cockpit.output(after)
    # By whichever the kernel has heard of first: its own magic, or what the engine has published.
    expect(picture).to_contain_text(ENDED)
    expect(picture.locator(".nbe-dash")).to_have_count(0)
    save(page)
    (output,) = nbformat.read(directory / "long.ipynb", as_version=4).cells[after].outputs
    assert "application/vnd.jupyter.widget-view+json" not in output.data
    assert "data:image/svg+xml" in output.data["text/html"]
    assert ENDED.search(output.data["text/plain"])
    shown = picture.inner_text()
    cockpit.close()

    # No kernel can be had.
    alone = chromium.new_page(viewport={"width": WIDE, "height": WHOLE})
    alone.route(re.compile("/api/(sessions|kernels)"), lambda route: route.abort())
    alone.goto(f"{lab}/lab/workspaces/test/tree/long.ipynb?reset&token={TOKEN}")
    again = alone.locator(".jp-CodeCell").nth(after).locator(".jp-Cell-outputArea")
    expect(again.locator("img").first).to_be_visible(timeout=20_000)
    assert again.inner_text() == shown
    screenshot(again, "dashboard-final")
    assert faults_of_layout(again) == []
    alone.close()


def test_two_dashboards_of_two_engines_and_a_tab_that_is_closed(open_cockpit: OpenCockpit) -> None:
    cockpit = open_cockpit()
    cockpit.run(start_line(name="second", tokens_per_second=150))
    # Signs of life come more often, so that their end is known sooner.
    cockpit.run(HASTE)
    cells = {}
    for name in (ENGINE, "second"):
        cells[name] = cockpit.start(f"%dashboard {name} -o {name}_board")
        cockpit.finish(cells[name])
    first, second = (cockpit.board(cell) for cell in cells.values())
    set_width(cockpit.page, WIDE, 2 * WHOLE)
    first.look()
    expect(first.state).to_have_text("idle")
    steps = first.num_steps
    cockpit.run("%%generate --raw --engine second --max-tokens 40\nWrite")
    second.expect_state(0, "length")
    assert second.wait_for_output(second.row(0), 40) == 40
    assert first.num_steps == steps
    assert "closed 1 dashboard" in cockpit.run("%dashboard second --close")
    expect(cockpit.output(cells["second"]).locator(".nbe-dash")).to_have_count(0)
    expect(cockpit.output(cells["second"]).locator("img").first).to_be_visible()
    cockpit.start(f"%%generate --raw --engine {ENGINE} --max-tokens 40\nWrite")
    first.wait_for_output(first.running(), 10)
    wait_until_idle(cockpit.page)

    connection = cockpit.run(
        "from ipykernel.connect import get_connection_file\nprint(get_connection_file())"
    )
    client = BlockingKernelClient(connection_file=connection.strip())
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=DEADLINE)
    try:
        assert follows(client)
        cockpit.page.close()
        end = time.monotonic() + 15
        while follows(client):
            assert time.monotonic() < end
        execute(client, "%engine stop second")
    finally:
        client.stop_channels()


def execute(client: BlockingKernelClient, code: str, expression: str = "None") -> str:
    """Run code in a kernel; returns how an expression is written afterwards."""
    reply = client.execute(code, user_expressions={"it": expression}, reply=True, timeout=DEADLINE)
    text: str = reply["content"]["user_expressions"]["it"]["data"]["text/plain"]
    return text


def follows(client: BlockingKernelClient) -> bool:
    """Whether a kernel still follows the engine for its dashboard."""
    return {"True": True, "False": False}[execute(client, "", f"{ENGINE}_board.follows")]


def test_notebook_7_has_a_dashboard_that_changes_and_aborts(
    chromium: Browser, notebook_environment: dict[str, str], tmp_path: Path
) -> None:
    write_notebook(tmp_path / "seven.ipynb", ["'the first cell'"])
    with jupyter_notebook(tmp_path, notebook_environment) as address:
        page = open_notebook(chromium, address, "seven.ipynb", height=WHOLE, frontend="notebooks")
        cockpit = Cockpit(page)
        cockpit.run(f"%engine attach {ENGINE}")
        cell = cockpit.start("%dashboard")
        cockpit.finish(cell)
        board = cockpit.board(cell)
        waiting = cockpit.start("%%generate -o answer --raw --max-tokens 3000\nWrite")
        row = board.running()
        board.wait_for_output(row, 30)
        number = number_of(row)
        assert board.pixels_of_request(number) > 0
        row.get_by_role("button", name="Abort").click()
        assert cockpit.finish(waiting).startswith(ALPHABET)
        board.expect_state(number, "abort")
        assert "abort" in cockpit.run("answer.finish_reason")
        screenshot(board.root, "notebook-7-dashboard")
        assert faults_of_layout(board.root) == []
        cockpit.close()
