"""`python -m tests.simulation SEED`: replay a seed and print what happens; `--seeds N [FIRST]`: run many."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
import traceback

from tests.simulation.batch import violations
from tests.simulation.faults import KINDS
from tests.simulation.hub import Violation
from tests.simulation.world import Recorder, describe, draw_plan, run_seed, simulation

SEEDS_A_TASK = 50
"""So few that the processes end at about the same time."""
MOST_LINES = 50
"""Failures that are printed; the others are counted."""


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="which seed to replay, or the first one")
    parser.add_argument(
        "--seeds", type=int, default=0, help="how many seeds to run; those that fail are printed"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, with commas; empty: none")
    parser.add_argument("--jobs", type=int, default=1, help="with --seeds: how many processes run them")
    parser.add_argument(
        "--digest", action="store_true", help="with --seeds: print a digest of all that happens"
    )
    arguments = parser.parse_args()
    kinds = tuple(filter(None, arguments.kinds.split(",")))
    if arguments.seeds and not arguments.digest:
        return _run_many(arguments.seed, arguments.seeds, kinds, arguments.jobs)
    with simulation():
        if arguments.digest:
            return _digest(arguments.seed, arguments.seeds, kinds)
        return _replay(arguments.seed, kinds)


def _replay(seed: int, kinds: tuple[str, ...]) -> int:
    for name, value in describe(draw_plan(seed, kinds)).items():
        print(f"{name}: {value}")
    try:
        run_seed(seed, trace=print, kinds=kinds)
    except Violation as violation:
        print(f"seed {seed}: {violation}")
        if violation.__cause__ is not None:
            traceback.print_exception(violation.__cause__)
        return 1
    return 0


def _digest(first: int, number: int, kinds: tuple[str, ...]) -> int:
    recorder = Recorder()
    for seed in range(first, first + number):
        with contextlib.suppress(Violation):
            run_seed(seed, kinds=kinds, trace=recorder)
    print(f"digest {recorder.digest}")
    return 0


def _run_many(first: int, number: int, kinds: tuple[str, ...], jobs: int) -> int:
    start = time.monotonic()
    num_failed = 0
    tasks = [
        (part, min(part + SEEDS_A_TASK, first + number), kinds)
        for part in range(first, first + number, SEEDS_A_TASK)
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap(violations, tasks):
            for line in found[: max(0, MOST_LINES - num_failed)]:
                print(line, flush=True)
            num_failed += len(found)
    seconds = time.monotonic() - start
    print(f"{number} seeds in {seconds:.1f} s ({number / seconds:.0f} a second), {num_failed} fail")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
