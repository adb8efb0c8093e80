"""A process that keeps runs: `run_keeper.py PATH NAME COUNT [SIZE]`; it reports each on stdout once it and its score are kept.

Without an end (COUNT 0) it goes on until it is killed. A line "trouble: …" tells what keeps runs from being written.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from runs_made import made_run

from nbengine.frontend.runs.run import FoundScores, Limits
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import RunWriter


def main(path: str, name: str, number: str, size: str = "100") -> None:
    writer = RunWriter(RunStore(Path(path)))
    numbers = range(int(number)) if int(number) else itertools.count()
    for index in numbers:
        prompt = f"{name}-{index}"
        kept = writer.keep(made_run(prompt=prompt, text="x" * int(size)), Limits(max_days=None))
        writer.score(kept, FoundScores({"number": index}, {}))
        writer.flush()
        trouble = writer.take_trouble()
        print(f"trouble: {trouble}" if trouble else prompt, flush=True)


main(*sys.argv[1:])
