"""Compare 10,000 rows on a real model, in a real kernel that is killed once, on an engine that is killed once.

Both are killed with SIGKILL, at a third and at two thirds of the rows, and the cell is run again with `--resume`. In
the end each row must have one answer, in the grid and in the kept runs. The figures are the processor time of the
kernel and of the engine for each row, the time that each run of the cell took, and the memory of the kernel before it
and at its most.

python benchmarks/bench_rows.py [--json PATH] [--model smollm2-135m] [--rows 10000] [--tokens 4]
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from common import parser, report
from jupyter_client.manager import start_new_kernel
from kernel_client import execute

from nbengine.client.engines.directory import list_engines
from nbengine.client.engines.processes import kill_session, session_processes

NAME = "rows"
START = "%engine start {model} --name rows --max-model-len 512 --max-num-seqs 64"
ATTACH = "%engine attach rows"
CELL = "%%generate --raw --each row=rows --temperature 0 --max-tokens {tokens} --resume -o grid\nThe number after {{row}} is"
TOLD = "import json, pathlib; _ = pathlib.Path({path!r}).write_text(json.dumps([(r['row'], r['text']) for r in grid.rows()]))"
POLL_SECONDS = 0.2
SILENCE = 300.0
"""Seconds without a message of the kernel after which the benchmark gives up."""


class Notebook:
    """A kernel, and what it and its engine have used of the processors."""

    def __init__(self, environment: dict[str, str], begin: str, rows: int) -> None:
        self.manager, self.client = start_new_kernel(env=environment)
        self.process = psutil.Process(self.manager.provisioner.process.pid)
        execute(self.client, "%load_ext nbengine")
        execute(self.client, begin)
        execute(self.client, f"rows = list(range({rows}))")

    def run(self, cell: str, is_due: Callable[[], bool], kill: Callable[[], object]) -> str:
        """Run a cell, and call `kill` once when it is due; return "ended", "killed" or the error's name.

        The kernel that has killed itself does not answer any more.
        """
        request, heard, outcome, is_killed = self.client.execute(cell), time.monotonic(), "ended", False
        while time.monotonic() - heard < SILENCE:
            if not is_killed and is_due():
                is_killed = True
                kill()
            if not _runs(self.process):
                return "killed"
            try:
                message = self.client.get_iopub_msg(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            heard, content = time.monotonic(), message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "error":
                outcome = content["ename"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return outcome
        raise TimeoutError(f"no message for {SILENCE:g} s from:\n{cell}")

    def close(self) -> None:
        """End the kernel, if it still runs."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


class Meter:
    """A meter of a kernel and its engine during one run of the cell: processor time, and the kernel's memory."""

    def __init__(self, kernel: psutil.Process, store: Path) -> None:
        info = next(engine.info for engine in list_engines() if engine.info.name == NAME)
        self._engine = [psutil.Process(each.pid) for each in session_processes(info)]
        self._kernel, self._store = kernel, store
        self._rows, self._began = num_answers(store), time.monotonic()
        self._first = self._last = self._seconds()
        self._memory = self._most = kernel.memory_info().rss

    def look(self) -> None:
        """Note what has been used by now; what has ended keeps what it had used at the last look."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._last = self._seconds()
            self._most = max(self._most, self._kernel.memory_info().rss)

    def row(self, what: str) -> dict[str, Any]:
        """Return the figures from the beginning to the last look."""
        rows = num_answers(self._store) - self._rows
        kernel, engine = (1e3 * (b - a) / max(1, rows) for a, b in zip(self._first, self._last, strict=True))
        return {
            "run of the cell": what,
            "rows answered": rows,
            "seconds": time.monotonic() - self._began,
            "kernel CPU, ms a row": kernel,
            "engine CPU, ms a row": engine,
            "kernel MiB before": self._memory / 2**20,
            "kernel MiB, most": self._most / 2**20,
        }

    def _seconds(self) -> tuple[float, float]:
        return _cpu(self._kernel), sum(map(_cpu, self._engine))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def num_answers(store: Path) -> int:
    """Count the answers in the kept runs, without the code that keeps them."""
    if not store.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute(
                "SELECT count(*) FROM runs WHERE error = '' AND finish_reason != 'abort'"
            )
        except sqlite3.OperationalError:
            # The table is being made.
            return 0
        return int(found.fetchone()[0])


def answers(store: Path) -> Counter[tuple[str, str]]:
    """Count each prompt with its answer among the kept runs."""
    with contextlib.closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "SELECT prompt, text FROM runs WHERE error = '' AND finish_reason != 'abort'"
        )
        return Counter((prompt.strip(), text) for prompt, text in found)


def measure(folder: Path, model: str, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Run the cell three times: until the kernel is killed, until the engine is, and to the end.

    Raises:
        RuntimeError: a row lacks its answer or has two, or a kill had another effect than it should have.
    """
    store = folder / "runs" / "runs.sqlite"
    environment = {
        **os.environ,
        "NBENGINE_RUNS_DIR": str(store.parent),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    cell, start, figures = CELL.format(tokens=tokens), START.format(model=model), []

    def run(notebook: Notebook, what: str, due: int, kill: Callable[[], object], expected: str) -> None:
        meter = Meter(notebook.process, store)

        def is_due() -> bool:
            meter.look()
            return num_answers(store) >= due

        outcome = notebook.run(cell, is_due, kill)
        meter.look()
        figures.append(meter.row(what))
        print(f"{what}: {outcome}, {num_answers(store)} answers are kept; {figures[-1]}", flush=True)
        if outcome != expected:
            raise RuntimeError(f"{what}: {outcome!r} instead of {expected!r}")

    def kill_engine() -> None:
        kill_session(next(engine.info for engine in list_engines() if engine.info.name == NAME))

    notebook = Notebook(environment, start, rows)
    try:
        pid = notebook.process.pid
        run(notebook, "kernel killed", rows // 3, lambda: os.kill(pid, signal.SIGKILL), "killed")
        notebook.close()
        notebook = Notebook(environment, ATTACH, rows)
        run(notebook, "engine killed", 2 * rows // 3, kill_engine, "EngineDeadError")
        execute(notebook.client, start)
        run(notebook, "to the end", rows + 1, lambda: None, "ended")
        told = folder / "told.json"
        execute(notebook.client, TOLD.format(path=str(told)))
        execute(notebook.client, "%engine stop")
    finally:
        notebook.close()
        for engine in list_engines():
            if engine.info.name == NAME:
                kill_session(engine.info)
    check(json.loads(told.read_text()), answers(store), rows)
    return figures


def check(grid: list[list[Any]], kept: Counter[tuple[str, str]], rows: int) -> None:
    """Compare the grid and the kept runs with the rows.

    Raises:
        RuntimeError: a row lacks its answer, or has two.
    """
    expected = Counter((f"The number after {row} is", text) for row, text in grid)
    if sorted(row for row, _ in grid) != list(range(rows)):
        raise RuntimeError(f"the grid has {len(grid)} rows, and not each of {rows} once")
    if kept != expected:
        lacking, beyond = expected - kept, kept - expected
        raise RuntimeError(
            f"{lacking.total()} rows have no answer among the kept runs, {beyond.total()} one too many"
        )


def main() -> None:
    """Measure a comparison that loses its kernel and its engine, and check its answers."""
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--rows", type=int, default=10_000)
    options.add_argument("--tokens", type=int, default=4, help="tokens of each answer")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.model, arguments.rows, arguments.tokens)
    name = f"{arguments.rows:,} rows on {arguments.model}, one answer each after two kills"
    report(name, rows, arguments.json)


if __name__ == "__main__":
    main()
