"""See chunked prompts, prefix hits and preemptions: twenty requests in an engine with room for few.

python examples/scripts/inside_the_scheduler.py [PICTURE.html | PICTURE.png]
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams
from nbengine.widgets.dashboard.widget import Dashboard

MANUAL = "Keep the lid closed while the machine runs, and let it cool down before you open it again."
QUESTIONS = ["When may I open it?", "Why is it hot?", "Is the lid closed?", "Who made it?"]
LAST = 19
PAGE = (
    '<!doctype html><meta charset="utf-8"><title>nbengine</title><style>:root{color-scheme:light}'
    "body{font:14px sans-serif;margin:16px}td,th{padding:2px 8px}</style>"
)


async def answer(engine: AsyncLLM, number: int, seen: asyncio.Event, looked: asyncio.Event) -> None:
    """Ask one question; most begin with the manual."""
    question = QUESTIONS[number % len(QUESTIONS)]
    is_late = number > LAST - 3
    prompt = f"{MANUAL} {question}" if number % 3 or is_late else question * (2 + number % 4)
    max_tokens = 250 if is_late else 60 + 20 * (number % 5)
    sampling_params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA
    )
    goes_on = True
    while goes_on:
        async for _ in engine.generate(prompt, sampling_params, request_id=f"question-{number}"):
            if number == LAST:
                seen.set()
        # The last ones are asked again, so that there is something to be seen whenever the look comes.
        goes_on = is_late and not looked.is_set()


async def look(engine: AsyncLLM, dashboard: Dashboard) -> dict[str, str]:
    """Hold the engine, until a moment has all that there is to be seen; return the view of that moment."""
    while True:
        await engine.pause_generation("keep", clear_cache=False)
        view = dashboard.static()
        while "paused" not in view["text/plain"].partition("\n")[0]:
            # The engine publishes its events twenty times a second.
            await asyncio.sleep(0.02)
            view = dashboard.static()
        if shows_all(view["text/plain"]):
            return view
        await engine.resume_generation()


def shows_all(text: str) -> bool:
    """Return whether the last question is there, blocks are shared, and the timeline has a hit and a preemption."""
    timeline = "".join(line for line in text.splitlines() if " #" in line)
    shared = re.search(r"[1-9]\d* shared", text)
    return f"● question-{LAST}" in text and shared is not None and "◆" in timeline and "×" in timeline


async def main(picture: Path | None) -> None:
    """Ask everything at once, and hold the engine for a look when the last question has its first token."""
    engine = AsyncLLM(
        "random-tiny",
        max_model_len=512,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        num_gpu_blocks_override=40,
    )
    try:
        dashboard = engine.dashboard()
        dashboard.static()
        seen, looked = asyncio.Event(), asyncio.Event()
        requests = [asyncio.create_task(answer(engine, number, seen, looked)) for number in range(LAST + 1)]
        await seen.wait()
        form = await look(engine, dashboard)
        looked.set()
        await engine.resume_generation()
        await asyncio.gather(*requests)
        print(form["text/plain"])
        if picture is not None:
            write(picture, PAGE + form["text/html"])
    finally:
        engine.shutdown()


def write(picture: Path, html: str) -> None:
    """Write a page, or with Chromium a picture of it."""
    if picture.suffix != ".png":
        picture.write_text(html)
        return
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("a .png needs chromium; write a .html instead")
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
        page.write(html)
        page.flush()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=800,1090"]
        command = [chromium, *flags, f"--screenshot={picture.resolve()}", f"file://{page.name}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
