"""Measure the dashboard's script in a browser: frames a second while scrubbing, and its heap over an hour.

10,000 steps of 64 requests and 100,000 KV blocks are drawn by Chromium without a GPU; frames go on coming at
5 Hz while somebody scrubs through the steps, or through the hour that the engine's host has kept. A processor
that is four times slower is Chromium's own emulation. The heap is what is left after a collection, each minute
of frames at 2,000 tokens/s in 64 streams, fed as fast as the script takes them in and paints each fifth of them.

python benchmarks/bench_dashboard_script.py [--json PATH] [--minutes 60]
"""

from __future__ import annotations

import base64
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import parser, report
from playwright.sync_api import CDPSession

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import CHROMIUM, browser
from dashboard_frames import FakeEngine, kept_hour
from dashboard_page import DashboardPage

from nbengine.widgets.dashboard.labels import MOST_LABEL

STEPS_PER_FRAME = 6
FRAMES_PER_MINUTE = 300
SCRUB_SECONDS = 5
NEWEST = "the newest output of an answer that is being written " * 3
SCRUB = """async ([selector, seconds]) => {
    const slider = document.querySelector(selector);
    const times = [];
    const [low, high] = [Number(slider.min), Number(slider.max)];
    const end = performance.now() + 1000 * seconds;
    let last = await new Promise(requestAnimationFrame);
    for (let frame = 0; last < end; frame += 1) {
        const share = 0.5 + 0.45 * Math.sin(frame / 20);
        slider.value = String(Math.round(low + share * (high - low)));
        slider.dispatchEvent(new Event("input"));
        const now = await new Promise(requestAnimationFrame);
        times.push(now - last);
        last = now;
    }
    return times;
}"""
FEED = """(texts) => {
    let next = 0;
    window.feeding = setInterval(() => {
        const [content, buffers] = texts[next];
        models[0].deliver({ ...content, seq: (window.seq += 1) }, buffers);
        next += 1;
        if (next === texts.length) clearInterval(window.feeding);
    }, 200);
}"""


PAINT = """async (texts) => {
    const start = performance.now();
    for (const [at, [content, buffers]] of texts.entries()) {
        models[0].deliver(content, buffers);
        if (at % 5 === 4) await new Promise(requestAnimationFrame);
    }
    return performance.now() - start;
}"""


def busy_engine(steps: int) -> FakeEngine:
    """Make an engine that has 64 requests at any time, in 100,000 blocks."""
    engine = FakeEngine(num_blocks=100_000, budget=2048, seqs=64, is_computing=True)
    keep_busy(engine, steps)
    return engine


def keep_busy(engine: FakeEngine, steps: int) -> None:
    """Make steps, with a new request for each that has ended."""
    rank = engine.ranks[0]
    for _ in range(steps):
        while len(rank.waiting) + len(rank.running) < 64:
            rank.add(
                engine.random.choice((100, 300, 900)),
                engine.random.randrange(50, 400),
                engine.random.choice((-1, 0, 1)),
            )
        rank.step()


def scrubbing(page: DashboardPage, session: CDPSession, engine: FakeEngine) -> list[dict[str, Any]]:
    """Measure frames a second at two zooms and in the hour's history, here and on a slower processor."""
    page.deliver(engine.frame(reset=True))
    page.page.evaluate("(seq) => { window.seq = seq; }", engine.seq)
    frames = []
    for _ in range(FRAMES_PER_MINUTE):
        frames.append(next_frame(engine))
    page.page.evaluate(FEED, frames)
    rows = []
    for slowdown in (1, 4):
        session.send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
        for label, clicks, what in (
            ("Show all steps", 1, "10,000 steps in sight"),
            ("Zoom in", 6, "900 steps in sight"),
            ("The last hour", 1, "an hour"),
        ):
            for _ in range(clicks):
                page.page.get_by_label(label).first.click()
            if what == "an hour":
                page.deliver(kept_hour(engine.ranks[0].now))
            before = main_thread_seconds(session)
            slider = ".nbe-scrubber" if what == "an hour" else ".nbe-slider"
            times = page.page.evaluate(SCRUB, [slider, SCRUB_SECONDS])
            used = main_thread_seconds(session) - before
            rows.append(
                {
                    "what": f"scrubbing, {what}",
                    "processor": f"{slowdown} times slower" if slowdown > 1 else "this one",
                    "frames a second": 1000 / statistics.fmean(times),
                    "95 % of frames within ms": sorted(times)[int(len(times) * 0.95)],
                    "main thread's CPU ms a frame": 1000 * used / len(times),
                }
            )
        page.page.get_by_role("button", name="Steps, requests and blocks").click()
    session.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    page.page.evaluate("clearInterval(feeding); models[0].sent.length = 0")
    paused = page.page.get_by_label("Go on live")
    if paused.count():
        paused.click()
    return rows


def next_frame(engine: FakeEngine) -> list[Any]:
    """Let an engine work for the time of a frame, and make the frame as a page takes it."""
    keep_busy(engine, STEPS_PER_FRAME)
    content, buffers = engine.frame()
    running = engine.ranks[0].running
    texts = [[each.number, f"{each.output} {NEWEST}"[:MOST_LABEL]] for each in running]
    content["ranks"][0]["requests"]["texts"] = texts
    return [content, [base64.b64encode(buffer).decode() for buffer in buffers]]


def main_thread_seconds(session: CDPSession) -> float:
    """Return the CPU time of the page's main thread, which does not depend on other programs on the
    machine."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def heap_bytes(session: CDPSession) -> int:
    """Return the bytes that are in use after a collection, array buffers included."""
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    return int(usage["usedSize"] + usage.get("backingStorageSize", 0))


def heap(page: DashboardPage, session: CDPSession, engine: FakeEngine, minutes: int) -> list[dict[str, Any]]:
    """Measure the heap after each minute of frames, and the time that a frame takes."""
    page.deliver(engine.frame(reset=True))
    rows = []
    for minute in range(1, minutes + 1):
        milliseconds = page.page.evaluate(PAINT, [next_frame(engine) for _ in range(FRAMES_PER_MINUTE)])
        rows.append(
            {
                "what": f"minute {minute} of frames",
                "heap MiB": heap_bytes(session) / 2**20,
                "ms a frame": milliseconds / FRAMES_PER_MINUTE,
            }
        )
    return rows


def main() -> None:
    """Measure the script and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=int, default=60, help="minutes of frames for the heap")
    options = arguments.parse_args()
    if CHROMIUM is None:
        sys.exit("chromium is not installed")
    engine = busy_engine(10_200)
    with tempfile.TemporaryDirectory() as directory, browser(Path(directory)) as started:
        page = DashboardPage(started.new_page())
        page.mount()
        session = page.page.context.new_cdp_session(page.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        rows = scrubbing(page, session, engine)
        rows += heap(page, session, engine, options.minutes)
        failures = page.failures()
    if failures:
        sys.exit("\n".join(failures))
    report("dashboard_script", rows, options.json)


if __name__ == "__main__":
    main()
