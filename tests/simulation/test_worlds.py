"""Many worlds, each with its own users, delays and faults: in none of them happens what never may.

`NBENGINE_SIMULATION_SEEDS` says how many there are (2,000, and 100,000 in `make thorough`),
`NBENGINE_SIMULATION_FIRST` with which seed they begin.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.batch import violations
from tests.simulation.faults import KINDS
from tests.simulation.world import draw_plan

QUICK = 2000
SEEDS = int(os.environ.get("NBENGINE_SIMULATION_SEEDS", QUICK))
FIRST = int(os.environ.get("NBENGINE_SIMULATION_FIRST", "0"))
SEEDS_A_TEST = 250


def test_as_many_worlds_have_faults_of_every_kind_in_every_process() -> None:
    plans = [draw_plan(seed) for seed in range(FIRST, FIRST + QUICK)]
    faults = {(fault.kind, fault.target) for plan in plans for fault in plan.faults}
    assert {kind for kind, _ in faults} == set(KINDS)
    for kind in set(KINDS) - {"clock"}:
        assert {"host", "core0", "core1", "client0", "client1", "client2"} <= {
            target for of, target in faults if of == kind
        }


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, SEEDS_A_TEST))
def test_nothing_happens_that_never_may(first: int) -> None:
    found = violations((first, min(first + SEEDS_A_TEST, FIRST + SEEDS), KINDS))
    assert not found, "\n".join(found)
