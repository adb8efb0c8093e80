"""Measure what the grid of a comparison costs a notebook: a real kernel and engine, a step every 32 ms.

Figures are kernel CPU, messages and bytes a second for each number of streams in one live grid; text that is
shown all the time changes in
every cell at each step.

python benchmarks/bench_grid.py [--json PATH] [--streams 2 16 64 256] [--tokens 300]
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import psutil
from common import parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

STEP_SECONDS = 1 / 31
START = (
    "%load_ext nbengine\n"
    "%engine start random-tiny --set distributed_executor_backend=fake_executor:FixedRateExecutor --max-model-len 4096"
)
CELL = "%%generate --raw --max-tokens {tokens} --set ignore_eos=true {streams}\nhello"


class Traffic:
    """The messages that a cell sends: their number and sizes, and the number of updates of the grid."""

    def __init__(self) -> None:
        self.messages = self.characters = self.largest = self.updates = 0
        self.last = ""

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        """Take in one message of the cell."""
        size = len(json.dumps(content))
        self.messages += 1
        self.characters += size
        self.largest = max(self.largest, size)
        if kind in ("display_data", "update_display_data"):
            self.updates += 1
            self.last = content["data"]["text/plain"]


def measure(client: Any, kernel: psutil.Process, streams: int, tokens: int) -> dict[str, Any]:
    """Measure one row: a grid of `streams` streams."""
    seeds = f"--seed {','.join(map(str, range(streams)))}"
    traffic = Traffic()
    before, start = kernel.cpu_times(), time.monotonic()
    execute(client, CELL.format(tokens=tokens, streams=seeds), traffic)
    seconds, after = time.monotonic() - start, kernel.cpu_times()
    if traffic.last.count(f"{tokens} tokens") < streams:
        raise RuntimeError(f"not all of {streams} answers have {tokens} tokens")
    cpu = after.user + after.system - before.user - before.system
    return {
        "streams": streams,
        "tokens/s": streams * tokens / seconds,
        "kernel CPU, % of a core": 100 * cpu / seconds,
        "grids/s": traffic.updates / seconds,
        "messages/s": traffic.messages / seconds,
        "kB/s": traffic.characters / seconds / 1e3,
        "largest message, kB": traffic.largest / 1e3,
    }


def main() -> None:
    """Measure a row for each number of streams."""
    arguments = parser(__doc__)
    arguments.add_argument("--streams", type=int, nargs="+", default=[2, 16, 64, 256])
    arguments.add_argument("--tokens", type=int, default=300)
    options = arguments.parse_args()
    environment = {
        **os.environ,
        "NBENGINE_BENCH_STEP_SECONDS": str(STEP_SECONDS),
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]),
    }
    manager, client = start_new_kernel(env=environment)
    try:
        execute(client, START)
        kernel = psutil.Process(manager.provisioner.process.pid)
        measure(client, kernel, 4, 30)
        rows = [measure(client, kernel, streams, options.tokens) for streams in options.streams]
        execute(client, "%engine stop")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    report("the grid of a comparison", rows, options.json)


if __name__ == "__main__":
    main()
