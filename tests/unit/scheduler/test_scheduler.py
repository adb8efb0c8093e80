"""The scheduler plans by rules: budget, refusals, preemption and order; each has a short history."""

from __future__ import annotations

import pytest

from nbengine.errors import RequestError
from nbengine.ipc.messages import FinishReason
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler, step

# The budget.


def test_a_long_prompt_is_computed_in_chunks_and_answered_after_the_last_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 23)
    assert step(scheduler) == ({"a": 10}, {})
    assert step(scheduler) == ({"a": 10}, {})
    counts, outputs = step(scheduler)
    assert counts == {"a": 3}
    assert outputs["a"].new_token_ids == [7]
    assert step(scheduler)[0] == {"a": 1}


def test_running_requests_come_before_waiting_ones_and_share_one_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 9)
    step(scheduler)
    add(scheduler, "b", 8)
    add(scheduler, "c", 8)
    assert step(scheduler)[0] == {"a": 1, "b": 8, "c": 1}
    assert step(scheduler)[0] == {"a": 1, "b": 1, "c": 7}


def test_one_prompt_takes_at_most_the_long_prefill_threshold_of_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    add(scheduler, "a", 14)
    add(scheduler, "b", 5)
    assert step(scheduler)[0] == {"a": 6, "b": 5}
    assert step(scheduler)[0] == {"a": 6, "b": 1}
    assert step(scheduler)[0] == {"a": 2, "b": 1}


def test_no_more_than_max_num_seqs_requests_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=2)
    assert step(scheduler)[0] == {"a": 4, "b": 4}
    assert step(scheduler)[0] == {"a": 1, "b": 1}
    assert step(scheduler)[0] == {"c": 4}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=10, enable_chunked_prefill=False, long_prefill_token_threshold=2
    )
    add(scheduler, "a", 7, max_tokens=2)
    add(scheduler, "b", 10)
    assert step(scheduler)[0] == {"a": 7}
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"b": 10}


def test_without_chunked_prefill_a_preempted_request_that_outgrew_the_budget_resumes_in_chunks() -> None:
    scheduler = make_scheduler(
        num_blocks=7, max_model_len=28, caching=False, max_num_batched_tokens=10, enable_chunked_prefill=False
    )
    add(scheduler, "a", 9, max_tokens=8)
    add(scheduler, "b", 9, max_tokens=12)
    while not scheduler.num_preemptions:
        counts, _ = step(scheduler)
    grown = scheduler.requests["b"].num_tokens
    assert grown > 10
    while "b" not in counts:
        counts, _ = step(scheduler)
    assert counts == {"b": 10}
    assert step(scheduler)[0] == {"b": grown - 10}


# What is refused.


def test_a_request_that_could_never_finish_is_refused_and_others_go_on() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=30)
    add(scheduler, "good", 4, max_tokens=4)
    with pytest.raises(RequestError, match="request r: the prompt has no tokens"):
        add(scheduler, "r", 0)
    with pytest.raises(RequestError, match=r"prompt has 30 tokens.*max_model_len=30 at most 29"):
        add(scheduler, "r", 30)
    with pytest.raises(RequestError, match="needs 5 KV blocks, and there are 4; lower max_tokens"):
        add(scheduler, "r", 10, max_tokens=8)
    with pytest.raises(RequestError, match="unfinished request of this id"):
        add(scheduler, "good", 3, max_tokens=1)
    assert list(scheduler.requests) == ["good"]
    assert step(scheduler)[0] == {"good": 4}


def test_a_request_that_just_fits_in_the_pool_runs_to_its_end() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=30)
    add(scheduler, "r", 10, max_tokens=7)
    for _ in range(6):
        assert not step(scheduler)[1]["r"].finished
    assert step(scheduler)[1]["r"].finish_reason is FinishReason.LENGTH


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_refused() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_chunked_prefill=False)
    with pytest.raises(RequestError, match=r"prompt has 11 tokens.*max_num_batched_tokens=10"):
        add(scheduler, "r", 11)


# Preemption.


def test_fcfs_preempts_the_latest_arrival_and_resumes_it_before_newer_ones() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    add(scheduler, "old", 4, max_tokens=8)
    add(scheduler, "new", 4, max_tokens=3)
    assert step(scheduler)[0] == {"old": 4, "new": 4}
    add(scheduler, "newest", 1, max_tokens=1)
    plan = scheduler.schedule()
    assert plan.preempted_req_ids == {"new"}
    assert plan.num_scheduled_tokens == {"old": 1}, "nobody is admitted in a step that preempts"
    answer(scheduler, plan)
    assert [r.request_id for r in scheduler.waiting] == ["new", "newest"]
    assert scheduler.requests["new"].block_ids == []


def test_a_resumed_request_is_told_apart_and_gets_a_whole_block_table() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    add(scheduler, "old", 4, max_tokens=3)
    resumed = add(scheduler, "new", 4, max_tokens=3)
    step(scheduler)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule()
    cached = plan.scheduled_cached_reqs
    assert plan.scheduled_new_reqs == []
    assert cached.req_ids == ["new"]
    assert cached.resumed_req_ids == {"new"}
    assert cached.new_block_ids == [resumed.block_ids]
    assert cached.num_computed_tokens == [4], "its prompt is still in the prefix cache"
    assert plan.num_scheduled_tokens == {"new": 1}
    assert scheduler.make_stats().num_preemptions == 1


def test_priority_runs_lower_values_first_then_earlier_arrivals() -> None:
    scheduler = make_scheduler(scheduling_policy="priority")
    add(scheduler, "low", 4, priority=5)
    add(scheduler, "late", 4, priority=0, arrival=2.0)
    add(scheduler, "early", 4, priority=0, arrival=1.0)
    add(scheduler, "tie", 4, priority=0, arrival=2.0)
    assert list(step(scheduler)[0]) == ["early", "late", "tie", "low"]


def test_priority_preempts_the_least_important_then_the_latest_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, scheduling_policy="priority")
    add(scheduler, "late", 4, priority=1, arrival=9.0, max_tokens=4)
    add(scheduler, "early", 4, priority=1, arrival=1.0, max_tokens=4)
    step(scheduler)
    add(scheduler, "vip", 4, priority=0, arrival=99.0, max_tokens=4)
    plan = scheduler.schedule()
    answer(scheduler, plan)
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({"early": 1, "late": 1}, set())
    scheduler.finish_requests("late", ABORTED)
    add(scheduler, "later", 3, priority=1, arrival=9.5, max_tokens=2)
    plan = scheduler.schedule()
    answer(scheduler, plan)
    assert list(plan.num_scheduled_tokens) == ["early", "vip", "later"]
    plan = scheduler.schedule()
    assert plan.preempted_req_ids == {"later"}
    assert list(plan.num_scheduled_tokens) == ["vip", "early"]


def test_fcfs_takes_no_notice_of_priorities() -> None:
    scheduler = make_scheduler()
    add(scheduler, "first", 4, priority=9, arrival=9.0)
    add(scheduler, "second", 4, priority=0, arrival=0.0)
    assert list(step(scheduler)[0]) == ["first", "second"]


def test_a_waiting_prompt_is_admitted_only_when_all_of_it_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32, max_num_batched_tokens=8)
    add(scheduler, "a", 7, max_tokens=2)
    step(scheduler)
    add(scheduler, "b", 28, max_tokens=2)
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"b": 8}


def test_lookahead_keeps_room_for_drafts_after_every_step_up_to_the_model_length() -> None:
    scheduler = make_scheduler(max_model_len=14, lookahead=3)
    request = add(scheduler, "r", 4, max_tokens=None)
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        assert len(request.block_ids) == -(-min(request.num_computed_tokens + 3, 14) // 4)
        answer(scheduler, plan)


def test_room_for_drafts_counts_when_a_request_is_checked_against_the_pool() -> None:
    add(make_scheduler(num_blocks=2, max_model_len=30), "r", 4, max_tokens=5)
    with pytest.raises(RequestError, match="needs 3 KV blocks, and there are 2"):
        add(make_scheduler(num_blocks=2, max_model_len=30, lookahead=1), "r", 4, max_tokens=5)
