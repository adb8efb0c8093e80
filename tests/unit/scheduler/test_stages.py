"""Plans for a pipeline of stages: how requests are shared out among the steps in flight, and what stages are told."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest

from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.scheduler import Scheduler
from tests.support.thorough import some
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler


class Pipeline:
    """A scheduler whose plans stay in flight until as many are as there are stages; `sizes` are those of the plans."""

    def __init__(self, scheduler: Scheduler, num_stages: int) -> None:
        self.scheduler = scheduler
        self.num_stages = num_stages
        self.in_flight: deque[SchedulerOutput] = deque()
        self.sizes: list[int] = []

    def step(self) -> SchedulerOutput:
        if len(self.in_flight) == self.num_stages:
            answer(self.scheduler, self.in_flight.popleft())
        plan = self.scheduler.schedule()
        self.in_flight.append(plan)
        self.sizes.append(len(plan.num_scheduled_tokens))
        return plan


def pipeline(num_stages: int, budget: int = 256, **limits: Any) -> Pipeline:
    limits = {"num_blocks": 800, "max_model_len": 200, "max_num_seqs": 64, "caching": False, **limits}
    scheduler = make_scheduler(stages=num_stages, max_num_batched_tokens=budget, **limits)
    return Pipeline(scheduler, num_stages)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 7, 8, 9, 33])
def test_requests_are_shared_out_evenly_among_the_steps_in_flight(num_stages: int, num_requests: int) -> None:
    line = pipeline(num_stages)
    for number in range(num_requests):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    for _ in range(6 * num_stages):
        line.step()
    for start in range(num_stages, len(line.sizes) - num_stages):
        lap = line.sizes[start : start + num_stages]
        assert sum(lap) == num_requests, "each request is in one of the steps in flight"
        assert max(lap) <= -(-num_requests // num_stages)
        assert num_requests < num_stages or min(lap) > 0, "no stage is idle"


def test_one_step_at_a_time_takes_all_requests_and_tells_the_stages_their_tokens() -> None:
    line = Pipeline(make_scheduler(stages=3, max_concurrent_steps=1, max_num_batched_tokens=64), 1)
    for number in range(7):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    line.step()
    for _ in range(4):
        told = line.step().scheduled_cached_reqs.new_token_ids
        assert [len(tokens) for tokens in told.values()] == [1] * 7
    assert line.sizes == [7] * 5


def test_a_request_alone_is_in_every_step_that_it_can_be_in() -> None:
    line = pipeline(4)
    add(line.scheduler, "r", 4, max_tokens=50)
    for _ in range(20):
        while not line.step().num_scheduled_tokens:
            answer(line.scheduler, line.in_flight.popleft())
    assert sum(line.sizes) == 20


def test_the_shares_even_out_when_one_step_loses_its_requests() -> None:
    line = pipeline(2)
    for number in range(8):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    first, second = line.step(), line.step()
    line.scheduler.finish_requests(list(first.num_scheduled_tokens), ABORTED)
    assert len(second.num_scheduled_tokens) == 4
    for _ in range(6):
        line.step()
    assert line.sizes[-4:] == [2, 2, 2, 2]


def test_requests_that_come_join_the_smaller_step() -> None:
    line = pipeline(2)
    for number in range(5):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    for _ in range(4):
        line.step()
    assert line.sizes == [3, 2, 3, 2]
    line.step()
    add(line.scheduler, "new", 4, max_tokens=100)
    assert "new" in line.step().num_scheduled_tokens
    assert line.sizes[-2:] == [3, 3]


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    line = pipeline(3, budget=32)
    add(line.scheduler, "long", 100, max_tokens=3)
    plans = [line.step() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"long": 32}] * 3


def test_a_long_prompt_is_computed_in_every_step_beside_the_others_shares() -> None:
    line = pipeline(2, budget=32)
    for number in range(6):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    line.step(), line.step()
    add(line.scheduler, "long", 150, max_tokens=3)
    plans = [line.step() for _ in range(4)]
    assert [plan.num_scheduled_tokens["long"] for plan in plans] == [29, 29, 29, 29]
    assert line.sizes[-4:] == [4, 4, 4, 4]


def test_requests_take_turns_even_if_every_step_is_answered_before_the_next_is_planned() -> None:
    line = pipeline(3)
    for number in range(7):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
    plans = []
    for _ in range(30):
        plans.append(set(line.step().num_scheduled_tokens))
        answer(line.scheduler, line.in_flight.popleft())
    assert line.sizes[6:] == [3] * 24
    for start in range(6, 27):
        assert len(set.union(*plans[start : start + 3])) == 7, "in three steps each has its turn"


def test_running_requests_do_not_keep_out_one_that_waits() -> None:
    """Not even where each step is answered before the next, so that they could always fill it."""
    line = pipeline(2)
    for number in range(20):
        add(line.scheduler, f"r{number}", 4, max_tokens=100)
        assert f"r{number}" in line.step().num_scheduled_tokens
        answer(line.scheduler, line.in_flight.popleft())


def test_requests_for_which_there_is_no_room_do_not_make_the_shares_larger() -> None:
    line = pipeline(2, num_blocks=4 * 8, max_model_len=32)
    for number in range(20):
        add(line.scheduler, f"r{number}", 31, max_tokens=1)
    for _ in range(4):
        plan = line.step()
        assert len(plan.num_scheduled_tokens) == 2
    assert line.sizes == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", some(range(20), ordinary=10))
def test_no_step_takes_more_than_a_share_and_every_request_has_its_turn(seed: int) -> None:
    """Requests come and go at random; what is asserted is written down here without the rules of the scheduler."""
    rng = random.Random(seed)
    num_stages = rng.randint(2, 4)
    line = pipeline(
        num_stages, budget=rng.choice([20, 1000]), scheduling_policy=rng.choice(["fcfs", "priority"])
    )
    scheduler = line.scheduler
    passed_over: Counter[str] = Counter()
    for step in range(300):
        if rng.random() < 0.3 and len(scheduler.requests) < 15:
            length = rng.choice([2, 5, 90])
            add(scheduler, f"r{step}", length, max_tokens=rng.randint(1, 30), priority=rng.randrange(3))
        if rng.random() < 0.05 and scheduler.requests:
            scheduler.finish_requests(rng.choice(list(scheduler.requests)), ABORTED)
        most = -(-len(scheduler.requests) // num_stages)
        plan = line.step()
        due = plan.num_scheduled_tokens.keys() - plan.incomplete_req_ids
        assert len(due) <= most + bool(plan.scheduled_new_reqs), "one is admitted even beside a full share"
        for request in scheduler.requests.values():
            if request.request_id in plan.num_scheduled_tokens:
                passed_over[request.request_id] = 0
            elif request.num_computed_tokens < request.num_tokens:
                passed_over[request.request_id] += plan.total_num_scheduled_tokens < 20
        assert max(passed_over.values(), default=0) < 2 * num_stages, "a request waits too long"


def test_stages_are_told_what_was_sampled_since_a_request_was_planned_last() -> None:
    scheduler = make_scheduler(stages=2)
    add(scheduler, "r", 4)
    first = scheduler.schedule()
    assert not first.scheduled_cached_reqs.new_token_ids, "the prompt is told with the request"
    answer(scheduler, first, 11)
    second = scheduler.schedule()
    assert second.scheduled_cached_reqs.new_token_ids == {"r": [11]}
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.schedule().num_scheduled_tokens == {}, "the token in flight is not known yet"
    answer(scheduler, second, 12)
    resumed = scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"r": 6}
    assert resumed.scheduled_cached_reqs.new_token_ids == {"r": [12]}, "the stages have kept the others"


def test_a_pipeline_waits_for_tokens_in_flight_whatever_is_asked_for() -> None:
    scheduler = make_scheduler(stages=2, ahead=True)
    add(scheduler, "r", 4)
    scheduler.schedule()
    assert not scheduler.schedule().num_scheduled_tokens


def test_a_single_stage_is_told_nothing_and_takes_all_requests() -> None:
    scheduler = make_scheduler(num_blocks=400)
    for number in range(4):
        add(scheduler, f"r{number}", 4)
    answer(scheduler, scheduler.schedule(), 5)
    plan = scheduler.schedule()
    assert len(plan.num_scheduled_tokens) == 4
    assert not plan.scheduled_cached_reqs.new_token_ids
