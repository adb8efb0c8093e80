"""Measure what streaming costs a notebook: a real kernel, a real engine process, a step every 5 ms.

The figures are kernel CPU a token, and the time from the end of a step in the engine to the text arriving at
the notebook's side.

python benchmarks/bench_streaming.py [--json PATH] [--tokens 1000]
"""

from __future__ import annotations

import bisect
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

START = (
    "%load_ext nbengine\n"
    "%engine start random-tiny --set distributed_executor_backend=fake_executor:FixedRateExecutor --max-model-len 16384"
)
CELL = "%%generate --raw --max-tokens {tokens} --format {format} --set ignore_eos=true\nhello"


class Arrivals:
    """The moments at which each number of tokens had arrived; a token is one letter "a" of the streamed
    text."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.streamed = 0

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        """Take in one message of the cell."""
        if kind == "stream":
            self.streamed += content["text"].count("a")
            count = self.streamed
        elif kind in ("display_data", "update_display_data"):
            text = content["data"].get("text/plain", "")
            count = max((len(run) for run in text.split() if set(run) == {"a"}), default=0)
        else:
            return
        if count > (self.counts[-1] if self.counts else 0):
            self.times.append(time.monotonic())
            self.counts.append(count)

    def delays(self, produced: list[float]) -> list[float]:
        """Return the seconds from each token's production to the message that showed it."""
        waits = []
        for token, moment in enumerate(produced[: self.counts[-1]], start=1):
            waits.append(self.times[bisect.bisect_left(self.counts, token)] - moment)
        return waits


def measure(client: Any, kernel: psutil.Process, log: Path, format_name: str, tokens: int) -> dict[str, Any]:
    """Measure one row: a cell of `tokens` tokens in one output format."""
    log.write_text("")
    arrivals = Arrivals()
    before = kernel.cpu_times()
    start = time.monotonic()
    execute(client, CELL.format(tokens=tokens, format=format_name), arrivals)
    seconds = time.monotonic() - start
    after = kernel.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    produced = [float(line) for line in log.read_text().split()]
    delays = sorted(arrivals.delays(produced))
    return {
        "format": format_name,
        "tokens/s": tokens / seconds,
        "kernel CPU µs/token": cpu / tokens * 1e6,
        "token to cell, median ms": statistics.median(delays) * 1e3,
        "95th percentile ms": delays[int(len(delays) * 0.95)] * 1e3,
        "messages": len(arrivals.times),
    }


def main() -> None:
    """Measure each format after a warm-up cell."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=1000)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "tokens"
        environment = {
            **os.environ,
            "NBENGINE_BENCH_TOKEN_LOG": str(log),
            "PYTHONPATH": str(Path(__file__).parent),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        manager, client = start_new_kernel(env=environment)
        try:
            for line in START.splitlines():
                execute(client, line)
            kernel = psutil.Process(manager.provisioner.process.pid)
            rows = []
            for format_name in ("text", "markdown"):
                execute(client, CELL.format(tokens=50, format=format_name))
                rows.extend(
                    measure(client, kernel, log, format_name, arguments.tokens)
                    for _ in range(arguments.rounds)
                )
            execute(client, "%engine stop")
        finally:
            client.stop_channels()
            manager.shutdown_kernel()
    report("streaming into a cell at 200 tokens/s", rows, arguments.json)


if __name__ == "__main__":
    main()
