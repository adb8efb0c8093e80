"""The parts that all benchmarks share: arguments, alternation, the table and the JSON beside it."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

from tests.tools import scratch


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make an argument parser with the options that every benchmark has.

    From here on, all that the benchmark writes lies in a scratch folder, which goes with it.
    """
    keep_in_scratch()
    result = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    result.add_argument("--json", type=Path, help="also write the figures here")
    result.add_argument("--rounds", type=int, default=5, help="counted rounds of each side")
    return result


def keep_in_scratch() -> None:
    """Have this process and those that it starts use a scratch folder until it ends (`tests/tools/scratch.py`)."""
    folder = scratch.enter()
    if folder is not None:
        atexit.register(folder.leave)


def machine() -> dict[str, Any]:
    """Describe the machine to which the figures belong."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
            elif line.startswith("flags"):
                flags = set(line.split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    return {
        "cpu": cpu,
        "features": [flag for flag in wanted if flag in flags],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def alternate(rounds: int, *sides: Callable[[], float], warmup: int = 1) -> list[list[float]]:
    """Run the sides in turn (A B A B …) and return each side's figures, the warm-up rounds left out."""
    figures: list[list[float]] = [[] for _ in sides]
    for index in range(warmup + rounds):
        for side, run in enumerate(sides):
            value = run()
            if index >= warmup:
                figures[side].append(value)
    return figures


def median_ratio(ours: Sequence[float], peers: Sequence[float]) -> float:
    """Return the median of the ratios of neighbouring rounds, so that a drifting machine cancels out."""
    return statistics.median(a / b for a, b in zip(ours, peers, strict=True))


def report(name: str, rows: Sequence[dict[str, Any]], json_path: Path | None, **extra: Any) -> None:
    """Print `rows` as a Markdown table and write them, with the machine, to `json_path` if there is one."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n{name}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, "machine": machine(), "rows": list(rows), **extra}
        json_path.write_text(json.dumps(content, indent=1) + "\n")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
