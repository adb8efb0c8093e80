"""A scheduler measures its requests when they get their first tokens and when they end."""

from __future__ import annotations

import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.metrics.requests import RequestStats
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import Fault, ModelRunnerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import add, answer, step
from tests.unit.scheduler.test_drafts import begin, report
from tests.unit.scheduler.test_pooling import add_pooling
from tests.unit.scheduler.test_pooling import step as pooling_step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(clock: Clock, lookahead: int = 0, **config: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}),
        CacheConfig(block_size=4),
        num_blocks=64,
        max_model_len=128,
        options=SchedulerOptions(num_lookahead_tokens=lookahead),
        clock=clock,
    )


def sums(stats: RequestStats) -> dict[str, tuple[int, float]]:
    """Return count and sum of each histogram that has values."""
    return {
        name: (part.count, pytest.approx(part.total))
        for name, part in stats.histograms().items()
        if part.count
    }


def test_times_of_a_request_lie_between_its_arrival_admission_first_token_and_end() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock)
    add(scheduler, "r", 5, max_tokens=4)
    clock.now += 2
    plan = scheduler.schedule()
    clock.now += 3
    answer(scheduler, plan)
    meter = scheduler.meter
    assert sums(meter.stats) == {
        "time_to_first_token": (1, 5),
        "queue_time": (1, 2),
        "prefill_time": (1, 3),
    }
    for _ in range(3):
        clock.now += 1
        step(scheduler)
    assert meter.stats.finished == [0, 1, 0, 0]
    assert sums(meter.stats) == {
        "time_to_first_token": (1, 5),
        "inter_token_latency": (3, 3),
        "e2e_latency": (1, 8),
        "queue_time": (1, 2),
        "prefill_time": (1, 3),
        "decode_time": (1, 3),
        "prompt_tokens": (1, 5),
        "generation_tokens": (1, 4),
    }
    stats = scheduler.make_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (5, 4)


def test_a_request_waits_from_when_it_was_read_not_from_when_the_scheduler_takes_it() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock)
    request = add(scheduler, "late", 3)
    read = Request("read", [1, 2], request.sampling_params, received_at=90.0)
    scheduler.add_request(read)
    assert (request.received_at, read.received_at, read.queued_at) == (100.0, 90.0, 100.0)
    step(scheduler)
    assert scheduler.meter.stats.queue_time.total == 10.0


def test_a_request_that_ends_with_its_first_token_counts_as_both() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock)
    add(scheduler, "r", 3, max_tokens=1)
    step(scheduler)
    stats = scheduler.meter.stats
    assert stats.finished == [0, 1, 0, 0]
    assert (stats.time_to_first_token.count, stats.decode_time.count) == (1, 1)
    assert stats.inter_token_latency.count == 0


def test_a_prompt_in_several_steps_has_one_first_token() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock, max_num_batched_tokens=4)
    add(scheduler, "r", 10)
    for _ in range(5):
        clock.now += 1
        step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (10, 3)
    assert sums(scheduler.meter.stats)["time_to_first_token"] == (1, 3)


def test_a_preempted_request_keeps_its_first_token_and_its_admission() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock)
    add(scheduler, "r", 6, max_tokens=3)
    step(scheduler)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    clock.now += 7
    step(scheduler)
    step(scheduler)
    stats = scheduler.meter.stats
    assert (stats.time_to_first_token.count, stats.queue_time.total, stats.decode_time.total) == (1, 0, 7)
    assert scheduler.make_stats().num_prompt_tokens == 6


@pytest.mark.parametrize(("status", "index"), [("ABORTED", 2), ("STOPPED", 0), ("ERROR", 3)])
def test_an_end_from_outside_counts_with_its_reason(status: str, index: int) -> None:
    scheduler = make_scheduler(Clock())
    add(scheduler, "waits", 3)
    scheduler.finish_requests("waits", RequestStatus[f"FINISHED_{status}"])
    stats = scheduler.meter.stats
    assert stats.finished[index] == stats.num_finished == 1
    assert sums(stats).keys() == {"e2e_latency", "prompt_tokens", "generation_tokens"}
    assert scheduler.make_stats().num_prompt_tokens == 0, "nothing of it was computed to its end"


def test_a_request_that_goes_to_another_engine_core_has_not_ended() -> None:
    scheduler = make_scheduler(Clock())
    add(scheduler, "moves", 3)
    assert scheduler.take_unbegun() == {0: ["moves"]}
    assert scheduler.meter.stats == RequestStats()


def test_what_is_sampled_for_a_request_that_has_ended_does_not_count() -> None:
    scheduler = make_scheduler(Clock())
    for name in ("stays", "ends"):
        add(scheduler, name, 3)
    plan = scheduler.schedule()
    scheduler.finish_requests("ends", RequestStatus.FINISHED_ABORTED)
    answer(scheduler, plan)
    assert scheduler.make_stats().num_generation_tokens == 1


def test_a_fault_is_an_end_without_a_token() -> None:
    scheduler = make_scheduler(Clock())
    add(scheduler, "bad", 3)
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(["bad"], [[]], faults={"bad": Fault.NOT_FINITE}))
    assert scheduler.meter.stats.finished == [0, 0, 0, 1]
    assert scheduler.make_stats().num_generation_tokens == 0
    assert scheduler.meter.stats.time_to_first_token.count == 0


def test_accepted_drafts_count_and_rejected_ones_do_not() -> None:
    scheduler = make_scheduler(Clock(), lookahead=3)
    begin(scheduler, [1, 2, 3], max_tokens=3)
    report(scheduler, scheduler.schedule(), [1, 2, 3])
    assert scheduler.make_stats().num_generation_tokens == 3, "the request ends before the last one"


def test_a_pooling_request_has_a_prompt_and_no_tokens() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock, max_num_batched_tokens=4)
    add_pooling(scheduler, "p", list(range(6)))
    for _ in range(2):
        clock.now += 1
        pooling_step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (6, 0)
    assert sums(scheduler.meter.stats) == {
        "e2e_latency": (1, 2),
        "queue_time": (1, 1),
        "prefill_time": (1, 1),
        "prompt_tokens": (1, 6),
    }
    assert scheduler.meter.stats.finished == [1, 0, 0, 0]


def test_news_are_taken_once_and_only_a_first_token_or_an_end_makes_some() -> None:
    scheduler = make_scheduler(Clock())
    meter = scheduler.meter
    add(scheduler, "r", 3, max_tokens=3)
    assert not meter.has_news
    seen = []
    for _ in range(3):
        step(scheduler)
        seen.append(meter.has_news)
        taken = meter.take()
        assert taken == meter.stats
        assert taken.finished is not meter.stats.finished
    assert seen == [True, False, True]


def test_a_scheduler_s_attributes_are_few_enough_for_cpython_to_share_their_keys() -> None:
    # With one more, every step of every engine took 4 % longer.
    assert len(vars(make_scheduler(Clock()))) <= 30
