"""See chunked prompts, prefix hits and preemptions: twenty requests in an engine with room for few.

python examples/scripts/inside_the_scheduler.py [PICTURE.html | PICTURE.png]
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams

MANUAL = "Keep the lid closed while the machine runs, and let it cool down before you open it again."
QUESTIONS = ["When may I open it?", "Why is it hot?", "Is the lid closed?", "Who made it?"]
LAST = 19
PAGE = (
    '<!doctype html><meta charset="utf-8"><title>nbengine</title><style>:root{color-scheme:light}'
    "body{font:14px sans-serif;margin:16px}td,th{padding:2px 8px}</style>"
)


async def answer(engine: AsyncLLM, number: int, seen: asyncio.Event) -> None:
    """Ask one question; two of three begin with the manual."""
    question = QUESTIONS[number % len(QUESTIONS)]
    prompt = f"{MANUAL} {question}" if number % 3 else question * (2 + number % 4)
    # The last ones run for long, so that there is something to be seen whenever the look comes.
    max_tokens = 250 if number > LAST - 3 else 60 + 20 * (number % 5)
    sampling_params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA
    )
    async for _ in engine.generate(prompt, sampling_params, request_id=f"question-{number}"):
        if number == LAST:
            seen.set()


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
        seen = asyncio.Event()
        requests = [asyncio.create_task(answer(engine, number, seen)) for number in range(LAST + 1)]
        await seen.wait()
        await engine.pause_generation("keep", clear_cache=False)
        form = dashboard.static()
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
