"""Random histories of the scheduler, checked after each event against a brute-force reference, and through a
paged memory whose contents would betray any wrong sharing, reuse or recomputation.

`HYPOTHESIS_PROFILE=thorough` runs more than ten times as many.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.pause import PauseState
from tests.support.thorough import amount
from tests.unit.scheduler.paged_model import EOS, VOCAB_SIZE
from tests.unit.scheduler.reference import Limits
from tests.unit.scheduler.simulation import Simulation

pytestmark = pytest.mark.timeout(amount(600, thorough=3600))
BASES = [[(7 * base + 3 * i + i * i) % VOCAB_SIZE for i in range(40)] for base in range(2)]
"""Prompts start with parts of these, so that they share prefixes."""

limits_strategy = st.builds(
    lambda block_size, num_blocks, spare, **rest: Limits(
        block_size, num_blocks, max(block_size * num_blocks - spare, 3), **rest
    ),
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(3, 20),
    spare=st.integers(-4, 12),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
    chunked=st.sampled_from([True, True, False]),
    threshold=st.sampled_from([0, 0, 1, 3, 7]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.sampled_from([True, True, False]),
    lookahead=st.sampled_from([0, 0, 1, 3]),
    depth=st.integers(1, 4),
    ahead=st.sampled_from([True, True, False]),
    stages=st.sampled_from([1, 1, 2, 3, 4]),
)
prompt_strategy = st.builds(
    lambda base, shared, own: BASES[base][:shared] + own,
    st.integers(0, len(BASES) - 1),
    st.integers(0, 24),
    st.lists(st.integers(0, 2), max_size=4),
)
params_strategy = st.builds(
    lambda min_tokens, more, **rest: SamplingParams(
        min_tokens=min_tokens, max_tokens=None if more is None else min_tokens + more, **rest
    ),
    min_tokens=st.sampled_from([0, 0, 0, 3]),
    more=st.one_of(st.none(), st.integers(1, 12)),
    ignore_eos=st.booleans(),
    eos_token_id=st.sampled_from([EOS, None]),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
# Few ids, so that they are used again while an earlier request of the same id is still in flight.
ids_strategy = st.integers(0, 19).map(lambda number: f"r{number}")


class SchedulerHistories(RuleBasedStateMachine):
    @initialize(limits=limits_strategy)
    def start(self, limits: Limits) -> None:
        self.sim = Simulation(limits)

    @rule(
        req_id=ids_strategy,
        prompt=prompt_strategy,
        params=params_strategy,
        priority=st.integers(0, 2),
        arrival=st.sampled_from([0.0, 1.0, 2.0]),
        client=st.integers(0, 1),
        salt=st.sampled_from([None, None, None, "", "salt"]),
        length=st.sampled_from([None, None, 1, 4, 30]),
        cut=st.sampled_from([True, True, True, False]),
    )
    def add(self, req_id, prompt, params, priority, arrival, client, salt, length, cut) -> None:
        if cut:
            prompt = self.sim.cut_to_fit(prompt)
        self.sim.add(
            req_id,
            prompt,
            params,
            priority=priority,
            arrival=arrival,
            client=client,
            salt=salt,
            grammar_length=length,
        )

    @rule(prompt=prompt_strategy, params=params_strategy, first=st.integers(0, 16), count=st.integers(2, 4))
    def add_the_same_prompt_several_times(self, prompt, params, first, count) -> None:
        prompt = self.sim.cut_to_fit(prompt)
        for number in range(first, first + count):
            self.sim.add(f"r{number}", prompt, params)

    @rule(req_id=ids_strategy)
    def abort(self, req_id: str) -> None:
        self.sim.abort(req_id)
        self.sim.abort(req_id)

    @precondition(lambda self: self.sim.live)
    @rule(number=st.integers(0, 19), prompt=prompt_strategy, params=params_strategy)
    def abort_and_use_the_id_again(self, number, prompt, params) -> None:
        req_id = list(self.sim.live)[number % len(self.sim.live)]
        self.sim.abort(req_id)
        self.sim.add(req_id, self.sim.cut_to_fit(prompt), params)

    @rule(kind=st.sampled_from(["first client", "second client", "cache", "cache", "cache and running"]))
    def disturb(self, kind: str) -> None:
        if "client" in kind:
            self.sim.abort_client(0 if kind == "first client" else 1)
        else:
            self.sim.reset_prefix_cache(reset_running_requests="running" in kind)

    @rule(number=st.integers(0, 19))
    def abort_by_others(self, number: int) -> None:
        self.sim.abort(f"r{number}", by_client=False)

    @rule(state=st.sampled_from([PauseState.UNPAUSED, *PauseState]))
    def pause(self, state: PauseState) -> None:
        self.sim.pause(state)

    @precondition(lambda self: self.sim.may_schedule)
    @rule()
    def schedule(self) -> None:
        self.sim.schedule()

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def update(self) -> None:
        self.sim.update()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.finish_everything()


TestSchedulerHistories = SchedulerHistories.TestCase
TestSchedulerHistories.settings = settings(
    max_examples=amount(50, thorough=4000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def _random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 4, 12, 24]),
        ignore_eos=rng.random() < 0.3,
        eos_token_id=EOS,
        stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.randrange(2)),
    )


def _random_event(sim: Simulation, rng: random.Random, number: int) -> None:
    kind = rng.random()
    if kind < 0.2 and len(sim.live) < MOST_LIVE:
        prompt = rng.choice(BASES)[: rng.randrange(1, 32)] + [
            rng.randrange(3) for _ in range(rng.randrange(5))
        ]
        salt = rng.choice([None, None, "salt"])
        sim.add(
            f"r{number}",
            prompt,
            _random_params(rng),
            priority=rng.randrange(3),
            client=rng.randrange(3),
            salt=salt,
            grammar_length=rng.choice([None, None, None, 3, 20]),
        )
    elif kind < 0.25:
        sim.abort(rng.choice([*sim.live, "unknown"]), by_client=rng.random() < 0.7)
    elif kind < 0.26:
        sim.reset_prefix_cache(reset_running_requests=rng.random() < 0.2)
    elif kind < 0.27:
        sim.pause(rng.choice(list(PauseState)))
    elif kind < 0.3 and sim.scheduler.pause_state is not PauseState.UNPAUSED:
        sim.pause(PauseState.UNPAUSED)
    elif sim.may_schedule and (not sim.in_flight or rng.random() < 0.6):
        sim.schedule()
    else:
        sim.update()


MOST_LIVE = 40
"""Requests at a time in the long histories: a queue that grows for ever would make each event slower."""
MODES = {
    "sync": {"depth": 1},
    "async": {"depth": 2, "ahead": True},
    "async-3": {"depth": 3, "ahead": True},
    "pipeline": {"depth": 3},
    "stages": {"depth": 3, "stages": 3},
    "stages-answered-at-once": {"depth": 1, "stages": 2},
    "drafts": {"depth": 1, "lookahead": 3},
    "drafts-in-flight": {"depth": 2, "lookahead": 2, "ahead": True},
}
BUDGETS = [(3, True), (11, True), (200, True), (50, False)]
BLOCKS = [(1, 60), (2, 30), (4, 15), (16, 4)]
LONG_HISTORIES = amount(
    # Each mode meets each budget and each size of block, and each budget each size of block.
    [
        (mode, budget, (number + (0, 1, 3, 2)[budget]) % len(BLOCKS))
        for number, mode in enumerate(MODES)
        for budget in range(len(BUDGETS))
    ],
    thorough=[
        (mode, budget, blocks)
        for mode in MODES
        for budget in range(len(BUDGETS))
        for blocks in range(len(BLOCKS))
    ],
)


@pytest.mark.parametrize(("mode", "budget_number", "blocks_number"), LONG_HISTORIES)
def test_every_request_gets_the_tokens_of_a_sequential_run_over_a_long_history(
    mode: str, budget_number: int, blocks_number: int
) -> None:
    budget, chunked = BUDGETS[budget_number]
    block_size, num_blocks = BLOCKS[blocks_number]
    # Each policy meets each budget, mode and number of blocks, with and without caching.
    policy = "fcfs" if (budget_number + blocks_number) % 2 else "priority"
    caching = (budget_number // 2 + blocks_number) % 2 == 0
    limits = Limits(
        block_size, num_blocks, 56, 5, budget, chunked, policy=policy, caching=caching, **MODES[mode]
    )
    sim = Simulation(limits)
    rng = random.Random(f"{mode}, {budget_number}, {blocks_number}")
    for number in range(amount(240, thorough=10_000)):
        _random_event(sim, rng, number)
    sim.finish_everything()
    finished = [answer for answer in sim.answers if answer.finish_reason is not None]
    assert len(finished) > 20
    assert sim.scheduler.num_preemptions > 0
    assert (sim.scheduler.make_stats().prefix_cache_hits > 0) == caching
