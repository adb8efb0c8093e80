"""Many seeds, one after another.

`NBENGINE_SIMULATION_SEEDS` says how many worlds the tests run (500, and 100,000 in `make thorough`),
`NBENGINE_SIMULATION_FIRST` with which seed they begin. The faults that were mended once (`planted.py`) are each found among
150 of the first 400 seeds.
"""

from __future__ import annotations

import os

from tests.simulation.faults import KINDS
from tests.simulation.hub import Violation
from tests.simulation.world import run_seed, simulation

Batch = tuple[int, int, tuple[str, ...]]
"""The first seed, the one after the last, and the kinds of faults."""

QUICK = 500
SEEDS = int(os.environ.get("NBENGINE_SIMULATION_SEEDS", QUICK))
FIRST = int(os.environ.get("NBENGINE_SIMULATION_FIRST", "0"))
SEEDS_A_TEST = 250


def batches() -> list[Batch]:
    """The worlds, divided among tests, which several processes run."""
    end = FIRST + SEEDS
    return [(first, min(first + SEEDS_A_TEST, end), KINDS) for first in range(FIRST, end, SEEDS_A_TEST)]


def violations(batch: Batch) -> list[str]:
    """Run seeds; a line for each that fails, with the command that replays it."""
    first, end, kinds = batch
    found = []
    with simulation():
        for seed in range(first, end):
            try:
                run_seed(seed, kinds=kinds)
            except Violation as violation:
                command = f"python -m tests.simulation {seed} --kinds {','.join(kinds)}"
                found.append(f"seed {seed}: {violation}   # {command}")
    return found
