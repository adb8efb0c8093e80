"""Measure what a dashboard costs a notebook: 64 streams, 2,000 tokens/s together, in cells and in dashboards.

A real kernel and a real engine process, whose model ends a step every 32 ms and whose KV cache has 20,000
blocks. This process plays the browser: it says hello and alive as the dashboard's script does, and counts
what the kernel publishes. A notebook's server drops what is above 1,000 messages or 1,000,000 bytes a second,
over three seconds; frames that were lost on the way, in the kernel or here, leave a gap in their numbers.

64 cells are measured from the moment at which all of them have been run, and what it costs to run one is told beside it.

python benchmarks/bench_cockpit.py [--json PATH] [--tokens 300] [--dashboards 0 1 10]
"""

from __future__ import annotations

import os
import queue
import re
import time
from pathlib import Path
from typing import Any

import psutil
from common import parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

STREAMS = 64
STEP_SECONDS = 0.032
WINDOW = 3.0
SETTLE_SECONDS = 20.0
"""Seconds in which new dashboards get their first frames, which are long."""
MOST_MESSAGES, MOST_BYTES = 1000, 1_000_000
UNCOUNTED = ("status", "comm_open", "execute_input")
START = (
    "%load_ext nbengine\n"
    "%engine start random-tiny --set distributed_executor_backend=fake_executor:FixedRateExecutor "
    f"--max-model-len 4096 --max-num-seqs {STREAMS} --num-blocks 20000 -o llm"
)
FLAGS = "--raw --max-tokens {tokens} --set ignore_eos=true"
ONE_CELL = f"%%generate {FLAGS} -n {STREAMS}\nOnce upon a time"
MANY = f"%%generate {FLAGS} -a -o handle\nOnce upon a time"
MANY_TIMES = 3
END = "while llm.stats_blocking().engines[0].num_running_reqs: time.sleep(0.1)"
UNSEEN = f"""
import asyncio
from nbengine import RequestOutputKind, SamplingParams
params = SamplingParams(max_tokens={{tokens}}, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
async def read(number):
    async for _ in llm.generate("Once upon a time", params):
        await asyncio.sleep(0.05)
await asyncio.gather(*(read(number) for number in range({STREAMS})))
"""
VIEW = "application/vnd.jupyter.widget-view+json"


class Browser:
    """A browser that takes in all that a kernel publishes, and answers for the dashboards that it is
    shown."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.models: list[str] = []
        self.seqs: dict[str, int] = {}
        self.arrivals: list[tuple[float, int]] = []
        """The moment and the bytes of each message that a server would count."""
        self.frames = self.frame_bytes = self.gaps = 0
        self.written: dict[str, int] = {}
        """The tokens that each output says it has."""
        self.updates = 0
        """The messages after which an output has more tokens."""
        self._said = 0.0

    def clear(self) -> None:
        """Start counting again at 0."""
        self.arrivals.clear()
        self.frames = self.frame_bytes = self.gaps = self.updates = 0

    def run(self, code: str) -> None:
        """Run a cell, and play the browser meanwhile."""
        self.wait(self.client.execute(code))

    def wait(self, request: str | None, seconds: float = 120.0) -> None:
        """Take in messages until a cell has ended, or for `seconds` seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._say_alive()
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            self._take(message)
            content = message["content"]
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            is_idle = message["msg_type"] == "status" and content["execution_state"] == "idle"
            if is_idle and message["parent_header"].get("msg_id") == request:
                return

    def peaks(self) -> tuple[float, float]:
        """Return the most messages and bytes a second, over any three seconds."""
        most_messages = most_bytes = first = held = 0
        for index, (moment, size) in enumerate(self.arrivals):
            held += size
            while self.arrivals[first][0] <= moment - WINDOW:
                held -= self.arrivals[first][1]
                first += 1
            most_messages, most_bytes = max(most_messages, index - first + 1), max(most_bytes, held)
        return most_messages / WINDOW, most_bytes / WINDOW

    def _take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind not in UNCOUNTED:
            size = len(repr(content)) + sum(len(buffer) for buffer in message["buffers"])
            self.arrivals.append((time.monotonic(), size))
            said = content.get("data", {}).get("content", {}) if kind == "comm_msg" else {}
            if said.get("kind") == "frame":
                self._frame(content["comm_id"], said, size)
        if kind in ("display_data", "update_display_data"):
            told = re.search(r"\[(\d+) tokens?", content["data"].get("text/plain", ""))
            if told is not None:
                display, number = content["transient"].get("display_id", ""), int(told[1])
                self.updates += number > self.written.get(display, 0)
                self.written[display] = number
        if kind == "display_data" and VIEW in content["data"]:
            model = content["data"][VIEW]["model_id"]
            self.models.append(model)
            self._say(model, "hello")

    def _frame(self, model: str, frame: dict[str, Any], size: int) -> None:
        self.frames += 1
        self.frame_bytes += size
        if not frame["reset"]:
            self.gaps += frame["seq"] != self.seqs.get(model, 0) + 1
        self.seqs[model] = frame["seq"]

    def _say_alive(self) -> None:
        if time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            for model in self.models:
                self._say(model, "alive")

    def _say(self, model: str, kind: str) -> None:
        content = {"comm_id": model, "data": {"method": "custom", "content": {"kind": kind}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))


def measure(browser: Browser, kernel: psutil.Process, name: str, code: str, tokens: int) -> dict[str, Any]:
    """Measure one row: cells that generate, and the dashboards that there are."""

    def cpu() -> float:
        times = kernel.cpu_times()
        return float(times.user + times.system)

    begun = 0.0
    if code is MANY:
        before = cpu()
        for _ in range(STREAMS):
            # They go on for longer than is measured.
            browser.run(code.format(tokens=MANY_TIMES * tokens))
        begun = cpu() - before
    browser.clear()
    written, before, start = sum(browser.written.values()), cpu(), time.monotonic()
    if code is MANY:
        browser.wait(None, tokens * STEP_SECONDS)
        written = sum(browser.written.values()) - written
    else:
        browser.run(code.format(tokens=tokens))
        written = STREAMS * tokens
    seconds, used = time.monotonic() - start, cpu() - before
    updates = browser.updates / seconds / STREAMS if code is MANY else None
    messages, num_bytes = browser.peaks()
    row = {
        "what": name,
        "dashboards": len(browser.models),
        "tokens/s": written / seconds,
        "kernel CPU %": 100 * used / seconds,
        "to run a cell, ms of CPU": 1e3 * begun / STREAMS if code is MANY else "",
        "updates/s of a cell": "" if updates is None else updates,
        "messages/s": messages,
        "kB/s": num_bytes / 1000,
        "frames/s": browser.frames / seconds,
        "kB a frame": browser.frame_bytes / max(1, browser.frames) / 1000,
        "frames lost": browser.gaps,
        "would be dropped": messages > MOST_MESSAGES or num_bytes > MOST_BYTES,
    }
    if code is MANY:
        browser.run(END)
    return row


def main() -> None:
    """Measure each way to read the streams, without a dashboard, with one and with ten."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    options.add_argument("--dashboards", type=int, nargs="+", default=[0, 1, 10], help="numbers, ascending")
    arguments = options.parse_args()
    environment = {
        **os.environ,
        "NBENGINE_BENCH_STEP_SECONDS": str(STEP_SECONDS),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    ways = {"not shown": UNSEEN, "one cell, -n 64": ONE_CELL, "64 cells, -a": MANY}
    manager, client = start_new_kernel(env=environment)
    rows = []
    try:
        for line in (*START.splitlines(), "import time"):
            execute(client, line)
        kernel, browser = psutil.Process(manager.provisioner.process.pid), Browser(client)
        for number in arguments.dashboards:
            while len(browser.models) < number:
                browser.run("%dashboard")
            if number:
                browser.wait(None, SETTLE_SECONDS)
            for name, code in ways.items():
                rows.append(measure(browser, kernel, name, code, arguments.tokens))
        browser.run("%engine stop")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    report("64 streams, 2,000 tokens/s together, in a kernel", rows, arguments.json)


if __name__ == "__main__":
    main()
