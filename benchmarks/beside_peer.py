"""Measure the control plane beside a peer's, in one run: the peer's script, ours, the peer's, ours, …

    python benchmarks/beside_peer.py [--peer DIR] [--only NAME ...] [--rounds 5] [--json PATH]

DIR holds the peer's scripts and, as `DIR/venv`, the environment that they run in; each script prints one JSON
line a row, whose fields `CASES` names. Shapes, settings of the collector and what is timed are the same on
both sides, every round is a fresh process on each, and the ratio is the median of those of neighbouring
rounds. Without `--peer` only our side runs. The exit status is 1 if a ratio is above its limit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import median_ratio, parser, report

HERE = Path(__file__).parent
COUNTS = (1, 32, 256)
STEP_US = 2000
OVERLAPPED_US = 0.02 * STEP_US
"""A peer's host cost below this is as good as hidden behind the model: no ratio is taken, but ours has to be
below it, too."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Round:
    """The output of the two scripts in one round, and the time that a model of `STEP_US` really took in
    it."""

    peer: Rows
    ours: Rows
    model_us: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of both sides; smaller is better."""

    name: str
    limit: float
    peer: Callable[[Round], float]
    ours: Callable[[Round], float]
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """A script of each side, with its arguments, and the figures to be compared."""

    name: str
    peer: tuple[str, ...]
    ours: tuple[str, ...]
    metrics: tuple[Metric, ...]


@dataclass(slots=True)
class Figures:
    """The figures of one metric, one a round."""

    peer: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


def decoding(count: int) -> Case:
    """Return the case of schedule() and update_from_output() of a step."""
    return Case(
        f"scheduler-{count}",
        ("bench_vllm_sched.py", "--requests", str(count), "--repeats", "1"),
        ("bench_scheduler.py", "--only", "decode", "--requests", str(count), "--rounds", "1"),
        (
            Metric(
                f"schedule + update, {_count(count, 'request')}",
                0.5,
                lambda r: r.peer[0]["step"]["median_us"],
                lambda r: r.ours[0]["total"],
            ),
        ),
    )


def new_requests() -> Case:
    """Return the case of a request of 1,000 tokens, 800 of them in the prefix cache."""
    return Case(
        "new-requests",
        (
            "bench_vllm_sched.py",
            "--mode",
            "prefill",
            "--requests",
            "256",
            "--budget",
            "65536",
            "--repeats",
            "1",
        ),
        ("bench_scheduler.py", "--only", "new", "--rounds", "1"),
        (
            Metric(
                "1,000-token prompt: all of it",
                0.6,
                lambda r: r.peer[0]["total_per_req_us"],
                lambda r: r.ours[0]["total"],
            ),
            Metric(
                "1,000-token prompt: prefix lookup",
                0.6,
                lambda r: r.peer[0]["mgr_get_computed_blocks"]["median_us"],
                lambda r: r.ours[0]["lookup"],
            ),
            Metric(
                "1,000-token prompt: allocation",
                0.6,
                lambda r: r.peer[0]["mgr_allocate_slots"]["median_us"],
                lambda r: r.ours[0]["allocate"],
            ),
        ),
    )


def serial(name: str, label: str, kind: str, count: int, peer_encode: str) -> Case:
    """Return the case of encoding and decoding one message."""
    return Case(
        name,
        ("bench_vllm_serial.py", "--what", kind, "--requests", str(count), "--repeats", "1"),
        ("bench_serial.py", "--only", kind, "--requests", str(count), "--rounds", "1"),
        (
            Metric(
                f"encode {label}",
                1.0,
                lambda r: r.peer[0][peer_encode]["median_us"],
                lambda r: r.ours[0]["encode µs"],
            ),
            Metric(
                f"decode {label}",
                1.0,
                lambda r: r.peer[0]["decode"]["median_us"],
                lambda r: r.ours[0]["decode µs"],
            ),
        ),
    )


def output_processor(count: int) -> Case:
    """Return the case of process_outputs() of one token of every request."""
    return Case(
        f"outputs-{count}",
        ("bench_vllm_output.py", "--requests", str(count), "--repeats", "1"),
        ("bench_output_processor.py", "--requests", str(count), "--settings", "deltas", "--rounds", "1"),
        (
            Metric(
                f"process_outputs, {_count(count, 'request')}",
                0.6,
                lambda r: r.peer[0]["step"]["median_us"],
                lambda r: r.ours[0]["median_us"],
            ),
        ),
    )


def host_cost(step_us: int, asynchronous: bool) -> Case:
    """Return the case of a step through AsyncLLM, without the model's time."""
    mode, switch = ("async", "on") if asynchronous else ("sync", "off")
    ours = "--async-scheduling" if asynchronous else "--no-async-scheduling"

    def model(r: Round) -> float:
        # With a step in flight the next one's end is counted from this one's, however late that was noticed.
        return step_us if asynchronous or not step_us else r.model_us

    return Case(
        f"host-{mode}-{step_us}",
        ("bench_vllm_e2e.py", "--step-us", str(step_us), "--repeats", "3", "--async-sched", switch),
        ("bench_host_cost.py", "--step-us", str(step_us), "--rounds", "3", ours),
        tuple(
            Metric(
                f"host cost of a step, {_count(count, 'stream')}, {mode} scheduling, model {step_us / 1000:g} ms",
                0.5,
                lambda r, row=row: r.peer[row]["us_per_token_per_stream"] - model(r),
                lambda r, row=row: r.ours[row]["interval_us"] - model(r),
                floor=OVERLAPPED_US if step_us else 0.0,
            )
            for row, count in enumerate(COUNTS)
        ),
    )


def message_queue(readers: int, reply: str) -> Case:
    """Return the case of a round trip of a step's plan and its output between the executor and its
    workers."""
    label = _count(readers, "reader") + (f", {reply} replying" if readers > 1 else "")
    chosen = ("--readers", str(readers), "--reply", reply)
    return Case(
        f"queue-{readers}-{reply}",
        ("bench_vllm_shm.py", *chosen, "--requests", "32", "--repeats", "1"),
        ("bench_message_queue.py", *chosen, "--rounds", "1"),
        (
            Metric(
                f"message queue round trip, {label}",
                1.0,
                lambda r: r.peer[0]["round_trip"]["median_us"],
                lambda r: r.ours[0]["round trip µs"],
            ),
        ),
    )


CASES = (
    *(decoding(count) for count in COUNTS),
    new_requests(),
    *(
        serial(f"serial-{n}", f"a step's outputs, {_count(n, 'request')}", "outputs", n, "encode_into")
        for n in COUNTS
    ),
    serial("serial-request", "a request of 1,000 tokens", "request", 1, "encode"),
    *(output_processor(count) for count in COUNTS),
    *(message_queue(*wiring) for wiring in ((1, "one"), (2, "one"), (2, "all"))),
    *(host_cost(step_us, asynchronous) for asynchronous in (False, True) for step_us in (0, STEP_US)),
)


def run_peer(directory: Path, command: tuple[str, ...]) -> Rows:
    """Return the JSON lines that a peer's script prints."""
    python = directory / "venv" / "bin" / "python"
    output = _run([str(python), str(directory / command[0]), *command[1:]], directory)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run_ours(command: tuple[str, ...]) -> Rows:
    """Return the rows of one of our benchmarks."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.json"
        _run([sys.executable, str(HERE / command[0]), *command[1:], "--json", str(path)], HERE.parent)
        rows: Rows = json.loads(path.read_text())["rows"]
        return rows


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def model_us() -> float:
    """Return the time that a model of `STEP_US` takes: it sleeps, and sleeping takes somewhat longer than
    asked."""
    times = []
    for _ in range(100):
        start = time.perf_counter()
        time.sleep(STEP_US / 1e6)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def compare(case: Case, peer: Path | None, rounds: int) -> list[dict[str, Any]]:
    """Measure the rows of one case; the first round warms the files up and is not counted."""
    figures = {metric.name: Figures() for metric in case.metrics}
    for number in range(rounds + 1):
        one = Round(run_peer(peer, case.peer) if peer else [], run_ours(case.ours), model_us())
        for metric in case.metrics if number else ():
            figures[metric.name].ours.append(metric.ours(one))
            if peer:
                figures[metric.name].peer.append(metric.peer(one))
    return [_row(metric, figures[metric.name]) for metric in case.metrics]


def _row(metric: Metric, figures: Figures) -> dict[str, Any]:
    ours = statistics.median(figures.ours)
    row: dict[str, Any] = {"what": metric.name, "nbengine µs": round(ours, 2)}
    if figures.peer:
        peer = statistics.median(figures.peer)
        row["peer µs"] = round(peer, 2)
        if peer < metric.floor:
            row |= {"ratio": "hidden", "limit": f"{metric.floor:g} µs", "kept": ours < metric.floor}
        else:
            ratio = median_ratio(figures.ours, figures.peer)
            row |= {"ratio": round(ratio, 3), "limit": metric.limit, "kept": ratio <= metric.limit}
    return row


def main() -> int:
    """Compare case after case."""
    options = parser(__doc__)
    options.add_argument("--peer", type=Path, metavar="DIR", help="the peer's scripts, with their venv")
    names = [case.name for case in CASES]
    options.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"names of cases, or their beginnings: {', '.join(names)}"
    )
    arguments = options.parse_args()
    chosen = [c for c in CASES if not arguments.only or c.name.startswith(tuple(arguments.only))]
    if not chosen:
        options.error(f"no case begins with {' or '.join(arguments.only)}; there are {', '.join(names)}")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    rows: list[dict[str, Any]] = []
    for case in chosen:
        print(case.name, file=sys.stderr)
        rows += compare(case, arguments.peer, arguments.rounds)
    report("beside the peer", rows, arguments.json)
    return 0 if all(row.get("kept", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
