"""Many worlds, each with its own users, delays and faults: in none of them happens what never may."""

from __future__ import annotations

import pytest

from tests.simulation.batch import FIRST, QUICK, SEEDS, Batch, batches, violations
from tests.simulation.faults import KINDS
from tests.simulation.world import draw_plan


def test_as_many_worlds_have_faults_of_every_kind_in_every_process() -> None:
    plans = [draw_plan(seed) for seed in range(FIRST, FIRST + QUICK)]
    faults = {(fault.kind, fault.target) for plan in plans for fault in plan.faults}
    assert {kind for kind, _ in faults} == set(KINDS)
    for kind in set(KINDS) - {"clock"}:
        assert {"host", "core0", "core1", "client0", "client1", "client2"} <= {
            target for of, target in faults if of == kind
        }


def test_the_tests_have_every_world_once() -> None:
    seeds = [seed for first, end, _ in batches() for seed in range(first, end)]
    assert seeds == list(range(FIRST, FIRST + SEEDS))


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: str(batch[0]))
def test_nothing_happens_that_never_may(batch: Batch) -> None:
    found = violations(batch)
    assert not found, "\n".join(found)
