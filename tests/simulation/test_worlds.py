"""Many worlds, each with its own users, delays and faults: in none of them happens what never may.

`NBENGINE_SIMULATION_SEEDS` says how many there are, `NBENGINE_SIMULATION_FIRST` with which seed they begin.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.batch import violations
from tests.simulation.faults import KINDS

SEEDS = int(os.environ.get("NBENGINE_SIMULATION_SEEDS", "10000"))
FIRST = int(os.environ.get("NBENGINE_SIMULATION_FIRST", "0"))
SEEDS_A_TEST = 250


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, SEEDS_A_TEST))
def test_nothing_happens_that_never_may(first: int) -> None:
    found = violations((first, min(first + SEEDS_A_TEST, FIRST + SEEDS), KINDS))
    assert not found, "\n".join(found)
