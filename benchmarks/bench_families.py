"""Measure engines of several families, with random weights in the sizes of real layers, beside another checkout.

    python benchmarks/bench_families.py [--families NAME ...] [--before DIR] [--kind int4] [--tokens 100]
        [--rounds 5] [--json PATH]

Each figure is of fresh engines, those of DIR and of this checkout in turn: milliseconds a step of one stream and of
eight behind prompts of 64 tokens, and tokens a second of a prompt of 512. The floor is what the weights that a token
reads take at the rate at which all cores together read memory. A model has fewer layers than the one that it stands
for, and most have a small vocabulary: figures of two families say nothing of each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import median_ratio, parser, report
from families.checkpoints import bytes_of_a_token, make
from families.shapes import BITS, SHAPES
from peers.floors import read_rate

HERE = Path(__file__).parent
Figures = list[dict[str, float]]
FIGURES = {"one": "one stream, ms a step", "several": "8 streams, ms a step", "prompt": "prompt, tokens/s"}


def ask(checkout: Path, model: Path, kind: str, tokens: int) -> dict[str, float]:
    """Have an engine of a checkout answer in a process of its own.

    Raises:
        subprocess.CalledProcessError: it cannot run the model; `stderr` says why.
    """
    command = [sys.executable, str(HERE / "families" / "engine.py"), str(model), kind, str(tokens)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: Path, kind: str, tokens: int, rounds: int, other: Path | None) -> tuple[Figures, Figures]:
    """Ask engines of this checkout and of the `other` one in turn; return the figures of each, none of one that cannot
    run the model."""
    ours: Figures = []
    before: Figures = []
    for _ in range(rounds):
        if other is not None:
            try:
                before.append(ask(other, model, kind, tokens))
            except subprocess.CalledProcessError as error:
                print(f"{other} does not run {model.name}: {error.stderr.strip().splitlines()[-1]}")
                other = None
        try:
            ours.append(ask(HERE.parent, model, kind, tokens))
        except subprocess.CalledProcessError as error:
            sys.exit(f"{model.name}: {error.stderr}")
    return ours, before


def row_of(name: str, ours: Figures, before: Figures, floor: float) -> dict[str, Any]:
    """Return the line of a family: medians, ratios to those before, and the part of the time that is the floor's."""
    row: dict[str, Any] = {"family": name}
    for key, title in FIGURES.items():
        own = [each[key] for each in ours]
        row[title] = statistics.median(own)
        if before:
            other = [each[key] for each in before]
            row[f"{title.partition(',')[0]}, before"] = statistics.median(other)
            row[f"{title.partition(',')[0]}, ratio"] = median_ratio(own, other)
        if key == "one":
            row["floor, ms"] = floor
            row["floor's part"] = floor / row[title]
    return row


def main() -> None:
    """Measure the families that were asked for, one after the other."""
    arguments = parser(__doc__)
    arguments.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--before", type=Path, help="another checkout")
    arguments.add_argument("--kind", choices=BITS, default="int4", help="how weights are kept")
    arguments.add_argument("--tokens", type=int, default=100, help="of an answer of one stream")
    options = arguments.parse_args()
    rate, rows = read_rate(), []
    for name in options.families:
        with tempfile.TemporaryDirectory() as folder:
            model = make(SHAPES[name], Path(folder) / name)
            floor = bytes_of_a_token(model, options.kind) / rate * 1e3
            figures = measure(model, options.kind, options.tokens, options.rounds, options.before)
        rows.append(row_of(name, *figures, floor))
        print(json.dumps(rows[-1]), flush=True)
    report("families", rows, options.json, kind=options.kind, read_bytes_per_second=rate)


if __name__ == "__main__":
    main()
