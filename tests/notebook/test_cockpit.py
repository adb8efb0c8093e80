"""The cockpit as a person has it: dashboards, tokens, grids and conversations in JupyterLab."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notebook_support.cockpit import Cockpit, DashboardView, color, number_of
from notebook_support.kernel import Kernel
from notebook_support.lab import jupyter_lab, lab_browser, open_notebook, write_notebook
from notebook_support.paced import start_line
from playwright.sync_api import Browser, expect

from nbengine.widgets.palette import ROLES

CHROMIUM = shutil.which("chromium") or ""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENGINE = "paced"
WHOLE = 1500
"""A window's height at which all of a dashboard and a cell below it are in sight."""

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
HOSTILE_ANSWERS = [HOSTILE, f"{HOSTILE}</pre></td></table>{HOSTILE}"]


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
    assert step_of(board.place) == step_of(place) - (steps - (steps - 100))
    assert timeline_pixels(board) != picture

    with page.expect_download() as download:
        board.root.get_by_role("button", name="Export as Chrome trace").click()
    trace = json.loads(download.value.path().read_text())
    assert download.value.suggested_filename == f"{ENGINE}-trace.json"
    assert len(trace["traceEvents"]) > 100

    board.root.get_by_role("button", name="Go on live").click()
    assert step_of(board.place) > step_of(place) + 60
    cockpit.run("handle.cancel()")


@pytest.fixture
def hostile(open_cockpit: OpenCockpit) -> Cockpit:
    """A notebook with a second engine, one that says what it is told to say."""
    cockpit = open_cockpit(f"{HOSTILE_NAME}.ipynb")
    cockpit.run("%engine start random-tiny --name real --num-blocks 64 --dtype float32")
    cockpit.run(f"import json\nevil = {HOSTILE!r}\nchoices = json.dumps({HOSTILE_ANSWERS!r})")
    return cockpit


def test_hostile_texts_are_shown_as_they_are_and_everything_can_be_read(
    hostile: Cockpit, directory: Path
) -> None:
    page = hostile.page
    board = hostile.dashboard()
    shown = {
        "tokens": hostile.start(f"%%generate -o answer --raw --logprobs 3 --choice {{choices}}\n{HOSTILE}"),
        "grid": hostile.start(
            "%%generate -o grid --raw --each word=[evil,'sea'] --temperature 0,1 --choice {choices}\n"
            f"{HOSTILE} {{word}}"
        ),
        "chat": hostile.start("%%chat --system {evil}\n" + HOSTILE),
        "conversation": hostile.start("%%chat --show"),
        "markdown": hostile.start(f"%%generate --raw --format markdown --choice {{choices}}\n{HOSTILE}"),
        "difference": hostile.start("%%generate --raw --diff --choice {choices}\n" + HOSTILE),
        "recover": hostile.start("%engine recover --all"),
        "name": hostile.start(f"%engine start random-tiny --name '{HOSTILE_NAME}'"),
        "file": hostile.start(f"%%chat --save '{HOSTILE_NAME}.json'\n{HOSTILE}"),
    }
    for name, cell in shown.items():
        print(name, hostile.finish(cell)[:600])
    print(board.root.inner_text())
    for name, cell in shown.items():
        hostile.output(cell).screenshot(path=f"/tmp/b_{name}.png")
    board.root.screenshot(path="/tmp/b_board.png")
    assert 0
