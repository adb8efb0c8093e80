"""Random histories of the scheduler for models with several kinds of layers, checked as those of `test_histories` are:
after each event against a brute-force reference, and through a paged memory that betrays any wrong sharing or reuse.

`HYPOTHESIS_PROFILE=thorough` runs more than ten times as many.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nbengine.kv_cache.specs import FULL
from nbengine.sampling_params import SamplingParams
from tests.support.thorough import THOROUGH, amount
from tests.unit.scheduler.mixtures import MIXTURES, with_rules
from tests.unit.scheduler.reference import Limits, ReferenceScheduler
from tests.unit.scheduler.simulation import Simulation
from tests.unit.scheduler.test_histories import (
    BASES,
    MODES,
    SchedulerHistories,
    _random_event,
    limits_strategy,
)

pytestmark = pytest.mark.timeout(amount(600, thorough=3600))


class GroupHistories(SchedulerHistories):
    @initialize(
        limits=limits_strategy,
        rules=st.sampled_from(list(MIXTURES.values())),
        spare_slots=st.integers(0, 12),
        spacing=st.integers(1, 5),
        window_size=st.sampled_from([1, 2, 3, 4, 5, 8, 13]),
    )
    def start(self, limits, rules, spare_slots, spacing, window_size) -> None:
        self.sim = Simulation(with_rules(limits, rules, spare_slots, spacing, window_size))


TestGroupHistories = GroupHistories.TestCase
TestGroupHistories.settings = settings(
    max_examples=amount(50, thorough=6000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


NAMES, MODE_NAMES = list(MIXTURES), list(MODES)
PAIRS = [
    (mixture, mode)
    for i, mixture in enumerate(NAMES)
    for j, mode in enumerate(MODE_NAMES)
    # Every mixture meets two modes, and every mode two mixtures or more.
    if THOROUGH or (i - j) % len(MODES) in (0, 3)
]


@pytest.mark.parametrize(("mixture", "mode"), PAIRS)
def test_every_request_gets_the_tokens_of_a_sequential_run_over_a_long_history(
    mixture: str, mode: str
) -> None:
    rng = random.Random(f"{mode} {mixture}")
    block_size = rng.choice([1, 2, 4])
    limits = Limits(block_size, 1, 56, 5, rng.choice([3, 11, 200]), **MODES[mode])
    limits = with_rules(
        limits, MIXTURES[mixture], rng.randrange(6, 14), rng.randrange(1, 4), rng.randrange(2, 9)
    )
    # A request of the greatest length just fits.
    needed = ReferenceScheduler(limits).most_blocks(56)
    sim = Simulation(replace(limits, num_blocks=needed))
    for number in range(amount(260, thorough=10_000)):
        _random_event(sim, rng, number)
    for number in range(8):
        prompt = BASES[number % 2][: 20 + number]
        sim.add(f"long{number}", prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    sim.finish_everything()
    assert len([answer for answer in sim.answers if answer.finish_reason is not None]) > 15
    assert sim.scheduler.make_stats().prefix_cache_hits > 0
    if FULL in limits.rules:
        assert sim.scheduler.num_preemptions > 0
