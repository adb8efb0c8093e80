"""A mirror that follows the trace knows the scheduler and its blocks exactly, whatever happens and whenever it comes.

`HYPOTHESIS_PROFILE=thorough` runs more than ten times as many histories.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from nbengine.scheduler.pause import PauseState
from tests.support.thorough import amount
from tests.unit.scheduler.mixtures import MIXTURES, with_rules
from tests.unit.scheduler.reference import Limits
from tests.unit.scheduler.test_histories import (
    MODES,
    SchedulerHistories,
    _random_event,
    limits_strategy,
)
from tests.unit.scheduler.traced import TracedSimulation

pytestmark = pytest.mark.timeout(amount(600, thorough=3600))


class TraceHistories(SchedulerHistories):
    """A scheduler lives on; followers come at any time, and one of them may miss batches."""

    sim: TracedSimulation

    @initialize(limits=limits_strategy)
    def start(self, limits: Limits) -> None:
        self.sim = TracedSimulation(limits)

    @precondition(lambda self: len(self.sim.mirrors) < 3)
    @rule()
    def someone_subscribes(self) -> None:
        self.sim.subscribe()

    @rule()
    def everyone_leaves(self) -> None:
        self.sim.unsubscribe_all()

    @rule(lost_to=st.sampled_from([None, None, None, 0]))
    def publish(self, lost_to: int | None) -> None:
        self.sim.publish(lost_to)

    @rule()
    def hand_back(self) -> None:
        self.sim.take_unbegun()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "sim"):
            self.sim.publish()


TestTraceHistories = TraceHistories.TestCase
TestTraceHistories.settings = settings(
    max_examples=amount(60, thorough=4000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def random_limits(rng: random.Random, mode: dict) -> Limits:
    block_size, num_blocks = rng.choice([1, 2, 4]), rng.randrange(4, 30)
    return Limits(
        block_size,
        num_blocks,
        max(block_size * num_blocks - rng.randrange(4), 3),
        rng.randrange(1, 6),
        rng.choice([1, 3, 8, 40]),
        rng.random() < 0.7,
        threshold=rng.choice([0, 0, 3]),
        policy=rng.choice(["fcfs", "priority"]),
        caching=rng.random() < 0.8,
        **mode,
    )


@pytest.mark.parametrize("mode", MODES)
def test_mirrors_agree_over_long_histories(mode: str) -> None:
    rng = random.Random(mode)
    for _ in range(amount(1, thorough=40)):
        follow_a_long_history(random_limits(rng, MODES[mode]), rng)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mirrors_agree_over_long_histories_of_models_with_several_kinds_of_layers(mixture: str) -> None:
    rng = random.Random(mixture)
    for mode in rng.sample(list(MODES.values()), amount(1, thorough=len(MODES))):
        limits = random_limits(rng, mode)
        follow_a_long_history(
            with_rules(limits, MIXTURES[mixture], rng.randrange(6), 2, rng.randrange(1, 9)), rng
        )


def follow_a_long_history(limits: Limits, rng: random.Random) -> None:
    sim = TracedSimulation(limits)
    first, begin = sim.subscribe(), sim.scheduler.step_counter
    for number in range(300):
        if number in (100, 250):
            sim.subscribe()
        _random_event(sim, rng, number)
        if rng.random() < 0.2:
            sim.publish()
    sim.pause(PauseState.UNPAUSED)
    sim.finish_everything()
    sim.publish()
    sim.compare_steps(first.steps)
    assert not first.requests
    assert first.blocks.num_free_blocks == sim.limits.num_blocks
    assert first.num_snapshots == 1
    assert [step.step for step in first.steps] == sorted(
        step for step, truth in sim.truths.items() if step >= begin and truth.is_visible
    )
