"""Take the pictures that README.md and the pages of docs/ show: of real notebooks in a real browser, and drawn by engines.

python examples/pictures.py [live] [moving] [examples] [drawn]

`make pictures` takes all of them, and brings what they need.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from PIL import Image
from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT / "tests" / "notebook"), str(ROOT / "tests" / "support")]

from chromium import CHROMIUM, browser
from notebook_support.lab import (
    jupyter_lab,
    notebook_page,
    run_cell,
    wait_for_prompt,
    wait_for_text,
    write_notebook,
)

from nbengine import LLM, AsyncLLM, SamplingParams

PROMPT = (
    "You are a patient teacher, and you explain how things work to a child of ten years, in plain words and with an "
    "example from daily life. How does a {thing} work?"
)
DASHBOARD = [
    "%load_ext nbengine",
    "%engine start --max-num-batched-tokens 64 --max-num-seqs 8 --num-blocks 56 --max-model-len 512",
    "%dashboard",
    "things = 'kettle bicycle umbrella window ladder piano candle bridge lamp clock'.split()",
    f"%%generate -a --each thing=things --seed 1 --max-tokens 90 --set ignore_eos=true\n{PROMPT}",
    "%engine stop",
]
NOTEBOOK = [
    "%load_ext nbengine\n%engine start",
    'topic = "photosynthesis"',
    "%%generate -o answer --temperature 0\nExplain {topic} to a ten-year-old, in two short sentences.",
    "%%generate --temperature 0\nExplain {topic} to a ten-year-old, in one short sentence.",
    "answer.finish_reason, len(answer.token_ids), round(answer.metrics.time_to_first_token, 3)",
    "%engine status",
    "%engine stop",
]
TOKENS = [
    "%load_ext nbengine",
    "%engine start",
    "%%generate --temperature 0 --max-tokens 22 --logprobs 5\nName a fruit that is yellow, and say why people like it.",
    "%engine stop",
]
MOVING = [
    *DASHBOARD[:2],
    "%dashboard --height 560",
    DASHBOARD[3],
    DASHBOARD[4].replace("90", "130"),
    DASHBOARD[5],
]
"""The same with longer answers, and with a dashboard that leaves room for them below it."""
FRAME_SECONDS = 0.2
LAST_FRAME_SECONDS = 4.0
COLOURS = 64
EXAMPLES = {
    "01_quickstart": "%%generate -o second",
    "02_tensor_parallel": "%engine tree",
    "03_data_parallel": "%engine waves",
    "04_prompt_iteration": "%%generate -o moods",
    "05_structured_output": "%%generate -o place",
    "06_inside_the_scheduler": "%dashboard",
    "07_kv_cache": "display(board.static(), raw=True)",
    "08_tools": "%%chat --reset --tools parcel",
    "09_server": "%engine status",
    "10_watching": "%engine history",
}
"""For each notebook, the beginning of the cell that is shown."""


def take_live() -> None:
    """Take the shortest notebook, the dashboard while it works, and tokens with a branch."""
    with lab() as (directory, address):
        for cells, take in (
            (NOTEBOOK, take_notebook),
            (DASHBOARD, take_dashboard),
            (TOKENS, take_tokens),
        ):
            take_in_page(directory, address, cells, take, height=1500)


def take_moving() -> None:
    """Take the picture that moves: a dashboard and ten answers, from the first step to the last."""
    with lab() as (directory, address):
        take_in_page(directory, address, MOVING, record, height=1130, at_once=True)


@contextmanager
def lab() -> Iterator[tuple[Path, str]]:
    """Serve an empty directory in JupyterLab, and yield it with the server's address."""
    with tempfile.TemporaryDirectory(prefix="nbp-", dir="/tmp") as name:
        environment = os.environ | {"NBENGINE_RUNTIME_DIR": f"{name}/engines", "XDG_RUNTIME_DIR": name}
        with jupyter_lab(Path(name), dict(environment)) as address:
            yield Path(name), address


def take_in_page(
    directory: Path,
    address: str,
    cells: list[str],
    take: Callable[[Page], None],
    *,
    height: int,
    at_once: bool = False,
) -> None:
    """Run a notebook's cells down to the last but one, take a picture, and run the last one.

    `at_once`: the picture begins with the last but one.
    """
    write_notebook(directory / "live.ipynb", cells)
    with notebook_page(address, "live.ipynb", directory, width=1280, height=height) as page:
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
        last = len(cells) - 1
        for cell in range(last):
            run_cell(page, cell)
            if cell < last - 1 or not at_once:
                wait_for_prompt(page, cell)
        take(page)
        run_cell(page, last)
        wait_for_prompt(page, last)


def take_notebook(page: Page) -> None:
    """Take a notebook down to its last but one cell."""
    panel = page.locator(".jp-NotebookPanel:visible").bounding_box()
    last = page.locator(".jp-CodeCell").nth(len(NOTEBOOK) - 2).bounding_box()
    assert panel is not None
    assert last is not None
    height = last["y"] + last["height"] - panel["y"]
    page.screenshot(path=IMAGES / "notebook.png", clip={**panel, "height": height})


def take_dashboard(page: Page) -> None:
    """Take the dashboard when some requests have been preempted, and some have ended."""
    page.wait_for_function(
        "() => /[1-9] preemption/.test(document.body.innerText) && /[2-8] of 10 answers/.test(document.body.innerText)"
    )
    output(page, 2).screenshot(path=IMAGES / "dashboard_live.png")
    wait_for_text(page, "10 answers", 4)


def record(page: Page) -> None:
    """Take a frame each time that one is due, until there are ten answers, and put them into one file."""
    panel = page.locator(".jp-NotebookPanel:visible .jp-WindowedPanel-outer").bounding_box()
    assert panel is not None
    answers = output(page, len(MOVING) - 2)
    frames: list[Image.Image] = []
    due = time.monotonic()
    is_done = False
    while not is_done:
        text = answers.inner_text()
        is_done = "10 answers" in text and "of 10 answers" not in text
        frames.append(Image.open(io.BytesIO(page.screenshot(clip={**panel}))).convert("RGB"))
        due = max(due + FRAME_SECONDS, time.monotonic())
        page.wait_for_timeout(max(0.0, 1000 * (due - time.monotonic())))
    # All frames have the colours of one with all requests: other ones in each would flicker.
    colours = frames[len(frames) // 2].quantize(COLOURS)
    first, *rest = (frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames)
    durations = [1000 * FRAME_SECONDS] * len(rest) + [1000 * LAST_FRAME_SECONDS]
    first.save(
        IMAGES / "live.gif", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True
    )


def take_tokens(page: Page) -> None:
    """Go on from another token, and look at the alternatives of one."""
    tokens = output(page, 2).locator(".nbt-token")
    tokens.nth(4).click()
    page.locator("button.nbt-row").nth(0).click()
    output(page, 2).locator(".nbt-tab").nth(1).click()
    output(page, 2).locator(".nbt-footer", has_text="limit").wait_for()
    tokens.nth(6).hover()
    page.locator(".nbt-popover:popover-open").wait_for()
    box = output(page, 2).bounding_box()
    assert box is not None
    page.screenshot(path=IMAGES / "tokens.png", clip={**box, "height": box["height"] + 170})


def take_examples() -> None:
    """Take a cell of each example, as it was committed."""
    with tempfile.TemporaryDirectory() as directory, browser(Path(directory)) as started:
        page = started.new_page(viewport={"width": 1000, "height": 900})
        for stem, beginning in EXAMPLES.items():
            notebook = nbformat.read(ROOT / "examples" / f"{stem}.ipynb", as_version=4)
            html, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
            page.set_content(html)
            code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
            last = max(index for index, source in enumerate(code) if source.startswith(beginning))
            page.locator(".jp-CodeCell").nth(last).screenshot(path=IMAGES / f"example_{stem}.png")


def take_drawn() -> None:
    """Have an engine of several workers draw its processes, and two cores in lock step their waves."""
    with LLM("smollm2-135m", tensor_parallel_size=3, pipeline_parallel_size=2) as llm:
        llm.generate("hello", SamplingParams(max_tokens=8))
        (IMAGES / "process_tree.svg").write_text(llm.process_tree().svg())
    asyncio.run(_take_waves())


async def _take_waves() -> None:
    """Let rank 1 wait for rank 0's request in the first wave, and rank 0 for that of rank 1 in the second."""
    async with AsyncLLM("random-tiny-moe", data_parallel_size=2, num_gpu_blocks_override=128) as engine:

        async def ask(num_tokens: int, rank: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            async for _ in engine.generate("hello", params, data_parallel_rank=rank):
                pass

        with engine.record_waves() as recording:
            await asyncio.gather(ask(400, 0), *(ask(60, 1) for _ in range(3)))
            await asyncio.sleep(0.5)
            await ask(150, 1)
            await asyncio.sleep(0.5)
        (IMAGES / "waves.svg").write_text(recording.timeline.svg())


def output(page: Page, cell: int):
    """Return the output area of a code cell."""
    return page.locator(".jp-CodeCell").nth(cell).locator(".jp-Cell-outputArea")


if __name__ == "__main__":
    if CHROMIUM is None:
        sys.exit("pictures need chromium (Debian's package chromium)")
    wanted = sys.argv[1:] or ["live", "moving", "examples", "drawn"]
    for part in wanted:
        {"live": take_live, "moving": take_moving, "examples": take_examples, "drawn": take_drawn}[part]()
