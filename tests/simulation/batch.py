"""Many seeds, one after another."""

from __future__ import annotations

from tests.simulation.hub import Violation
from tests.simulation.world import run_seed, simulation

Batch = tuple[int, int, tuple[str, ...]]
"""The first seed, the one after the last, and the kinds of faults."""


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
