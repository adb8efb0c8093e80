"""The simulation is honest: nothing is lost or made up, the same again by seed, and what is known exactly comes out."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from scaling.costs import Costs
from scaling.independent import Outcome, Setting, Simulation
from scaling.lock_step import LockStep
from scaling.rules import CENTRAL, RULES

COSTS = Costs(
    step=0.010,
    step_request=0.0,
    take_in=2e-6,
    wake=20e-6,
    publish=1e-4,
    publish_rank=1e-7,
    publish_client=5e-6,
    publish_rank_client=0.0,
    deliver=2e-5,
    observe=1e-6,
    observe_rank=4e-7,
    choose=4e-7,
    choose_rank=1e-8,
    agree=4e-6,
    jitter=(1.0,),
)
SMALL = Setting(num_ranks=6, num_clients=3, load=0.5, max_num_seqs=4, seconds=6.0, warm_up=2.0)


def simulate(**changes: object) -> Outcome:
    return Simulation(dataclasses.replace(SMALL, **changes), COSTS).run()


@pytest.mark.parametrize("rule", [*RULES, CENTRAL])
@pytest.mark.parametrize("lengths", ["equal", "random", "skewed"])
def test_every_request_is_finished_or_still_there(rule: str, lengths: str) -> None:
    outcome = simulate(rule=rule, lengths=lengths)
    assert outcome.num_arrived > 40
    # Those on their way to a rank are a few microseconds of arrivals: none or one.
    assert 0 <= outcome.num_arrived - outcome.num_finished - outcome.num_unfinished <= 1


@pytest.mark.parametrize("kind", [Simulation, LockStep])
def test_the_same_seed_gives_the_same_again(kind: type[Simulation]) -> None:
    first, again, other = (kind(dataclasses.replace(SMALL, seed=seed), COSTS).run() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_rank_alone_computes_what_it_can() -> None:
    """4 requests at a time of 200 tokens in steps of 10 ms: 2 a second, whatever is asked."""
    outcome = simulate(num_ranks=1, num_clients=1, load=3.0, lengths="equal", seconds=38.0)
    assert outcome.num_finished == pytest.approx(2 * 40, abs=4)


def test_without_load_nobody_waits() -> None:
    outcome = simulate(load=0.01, lengths="equal", seconds=60.0)
    assert outcome.waits
    assert max(outcome.waits) <= COSTS.deliver + COSTS.step


def test_one_queue_for_all_waits_least() -> None:
    waits = {
        rule: statistics.fmean(simulate(rule=rule, load=0.95, lengths="random", seconds=40.0).waits)
        for rule in (CENTRAL, "ours", "random")
    }
    assert waits[CENTRAL] <= waits["ours"] < waits["random"]


def test_one_client_looks_at_all_ranks_and_several_that_do_crowd() -> None:
    assert simulate(rule="all ranks", num_clients=1) == simulate(rule="ours", num_clients=1)
    crowd = {
        rule: statistics.fmean(
            simulate(rule=rule, num_ranks=64, num_clients=32, load=0.8, max_num_seqs=16, seconds=3.0).crowding
        )
        for rule in ("snapshot alone", "all ranks", "ours", "two choices")
    }
    assert min(crowd["snapshot alone"], crowd["all ranks"]) > 2 * max(crowd["ours"], crowd["two choices"])


def test_a_coordinator_with_more_to_read_than_it_can_publishes_nothing() -> None:
    slow = dataclasses.replace(COSTS, take_in=0.003, wake=0.0)
    outcome = Simulation(SMALL, slow).run()
    assert outcome.coordinator_busy > outcome.duration
    assert outcome.num_publications == 0


def test_ranks_in_lock_step_lose_no_request_and_wait_for_the_slowest() -> None:
    setting = dataclasses.replace(SMALL, lengths="random", seconds=20.0, load=0.3)
    even = LockStep(setting, COSTS).run()
    assert 0 <= even.num_arrived - even.num_finished - even.num_unfinished <= 1
    assert even.busy_steps
    assert even.dummy_steps
    assert even.stepping == pytest.approx(even.stepping_alone)
    uneven = LockStep(setting, dataclasses.replace(COSTS, jitter=(0.5, 1.0, 1.5))).run()
    assert uneven.stepping > 1.2 * uneven.stepping_alone


def test_a_wave_starts_when_the_coordinator_has_told_all_ranks() -> None:
    setting = dataclasses.replace(SMALL, lengths="equal", load=0.002, seconds=400.0, warm_up=0.0)
    outcome = LockStep(setting, COSTS).run()
    assert len(outcome.starts) > 3
    at_least = 2 * COSTS.deliver + COSTS.take_in
    assert all(at_least <= start < 2e-3 for start in outcome.starts)
