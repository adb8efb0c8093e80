"""Measure what a person waits for in a notebook (interrupt, restart), and what an idle engine costs.

The kernel is a real one, and the model the default one.

python benchmarks/bench_notebook.py [--json PATH]
"""

from __future__ import annotations

import re
import statistics
import time
from typing import Any

import psutil
from common import parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

LONG = "%%generate --raw --max-tokens 2000 --set ignore_eos=true\nOnce upon a time"
SHORT = "%%generate --raw --max-tokens 1\nOnce upon a time"
BLOCKS_OF_IDLE = """
import time
start = time.monotonic()
while (s := llm.stats_blocking().engines[0]).num_running_reqs or s.num_free_blocks < s.num_blocks:
    time.sleep(0.001)
print("idle after", time.monotonic() - start)
"""
IDLE_SECONDS = 10


class InterruptOnText:
    """A watcher that interrupts the kernel when a cell has shown some text, and remembers when."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.updates = 0
        self.moment = 0.0

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        """Take in one message of the cell."""
        self.updates += kind == "update_display_data"
        if self.updates == 3 and not self.moment:
            self.moment = time.monotonic()
            self.manager.interrupt_kernel()


def interrupt(manager: Any, client: Any) -> tuple[float, float]:
    """Return the seconds from an interrupt to the prompt, and from then until the engine is idle, its blocks
    free."""
    watcher = InterruptOnText(manager)
    execute(client, LONG, watcher)
    to_prompt = time.monotonic() - watcher.moment
    printed: list[str] = []
    execute(client, BLOCKS_OF_IDLE, lambda kind, c: printed.append(c["text"]) if kind == "stream" else None)
    found = re.search(r"idle after ([\d.e-]+)", "".join(printed))
    if not watcher.moment or found is None:
        raise RuntimeError("the cell ended before it was interrupted, or the engine did not get idle")
    return to_prompt, float(found[1])


def restart(manager: Any, client: Any) -> float:
    """Return the seconds from a kernel's restart to the first token of the engine that it had."""
    start = time.monotonic()
    manager.restart_kernel()
    client.wait_for_ready(timeout=60)
    for line in ("%load_ext nbengine", "%engine attach", SHORT):
        execute(client, line)
    return time.monotonic() - start


def idle_share(processes: list[psutil.Process]) -> list[float]:
    """Return the share of a core that each process uses while nothing happens, in percent."""
    before = [p.cpu_times() for p in processes]
    time.sleep(IDLE_SECONDS)
    after = [p.cpu_times() for p in processes]
    used = [b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True)]
    return [100 * seconds / IDLE_SECONDS for seconds in used]


def main() -> None:
    """Measure a row for each question, each over the rounds."""
    arguments = parser(__doc__).parse_args()
    manager, client = start_new_kernel()
    try:
        execute(client, "%load_ext nbengine")
        execute(client, "%engine start -o llm")
        execute(client, SHORT)
        printed: list[str] = []
        execute(
            client,
            "print(llm.connection.host_pid)",
            lambda kind, c: printed.append(c["text"]) if kind == "stream" else None,
        )
        host = psutil.Process(int("".join(printed)))
        prompts, idles = zip(*(interrupt(manager, client) for _ in range(2 * arguments.rounds)), strict=True)
        restarts = [restart(manager, client) for _ in range(arguments.rounds)]
        kernel = psutil.Process(manager.provisioner.process.pid)
        shares = idle_share([kernel, host, *host.children()])
        execute(client, "%engine stop")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    questions = (
        ("interrupt to prompt", prompts),
        ("prompt to idle engine", idles),
        ("kernel restart, load_ext, attach, first token", restarts),
    )
    rows: list[dict[str, Any]] = [
        {"what": name, "median ms": statistics.median(figures) * 1e3, "max ms": max(figures) * 1e3}
        for name, figures in questions
    ]
    names = ("kernel", "host", "engine core")
    idle = ", ".join(f"{name} {share:.1f} %" for name, share in zip(names, shares, strict=True))
    report(
        "in a notebook", rows, arguments.json, idle_percent_of_a_core=dict(zip(names, shares, strict=True))
    )
    print(f"\nidle, of a core: {idle}")


if __name__ == "__main__":
    main()
