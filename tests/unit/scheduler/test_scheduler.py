"""The scheduler's rules, one by one, on histories short enough to follow."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import InvalidArgumentError, NBEngineError, RequestError
from nbengine.ipc.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler

ABORTED = RequestStatus.FINISHED_ABORTED


def make_scheduler(
    num_blocks: int = 64, max_model_len: int = 128, caching: bool = True, lookahead: int = 0, **config: Any
) -> Scheduler:
    ticks = iter(range(10**6))
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}),
        CacheConfig(block_size=4, enable_prefix_caching=caching),
        num_blocks,
        max_model_len,
        engine_index=3,
        num_lookahead_tokens=lookahead,
        clock=lambda: float(next(ticks)),
    )


def add(
    scheduler: Scheduler,
    name: str,
    length: int,
    *,
    start: int = 0,
    priority: int = 0,
    arrival: float = 0.0,
    client: int = 0,
    **params: Any,
) -> Request:
    """Add a request whose prompt is `start, start + 1, ...`; without `start`, no two names share a prompt."""
    first = start or 1000 * (1 + sum(name.encode()))
    request = Request(
        name,
        list(range(first, first + length)),
        SamplingParams(**{"max_tokens": 20, **params}),
        priority=priority,
        arrival_time=arrival,
        client_index=client,
    )
    scheduler.add_request(request)
    return request


def answer(scheduler: Scheduler, plan: SchedulerOutput, token: int = 7) -> dict[int, EngineCoreOutputs]:
    """Report `token` for every request whose known tokens are all computed by the plan."""
    sampled = []
    for name in plan.num_scheduled_tokens:
        request = scheduler.requests.get(name)
        due = request is None or request.num_computed_tokens >= request.num_tokens
        sampled.append([token] if due else [])
    return scheduler.update_from_output(plan, ModelRunnerOutput(list(plan.num_scheduled_tokens), sampled))


def step(scheduler: Scheduler, token: int = 7) -> tuple[dict[str, int], dict[str, EngineCoreOutput]]:
    plan = scheduler.schedule()
    outputs = answer(scheduler, plan, token)
    return plan.num_scheduled_tokens, {o.request_id: o for c in outputs.values() for o in c.outputs}


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
    scheduler = make_scheduler(policy="priority")
    add(scheduler, "low", 4, priority=5)
    add(scheduler, "late", 4, priority=0, arrival=2.0)
    add(scheduler, "early", 4, priority=0, arrival=1.0)
    add(scheduler, "tie", 4, priority=0, arrival=2.0)
    assert list(step(scheduler)[0]) == ["early", "late", "tie", "low"]


def test_priority_preempts_the_least_important_then_the_latest_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, policy="priority")
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


# Ends.


def test_stop_conditions_end_a_request_with_their_reason() -> None:
    scheduler = make_scheduler()
    add(scheduler, "eos", 4, eos_token_id=7)
    add(scheduler, "id", 4, stop_token_ids=[7])
    add(scheduler, "length", 4, max_tokens=1)
    add(scheduler, "not yet", 4, eos_token_id=7, min_tokens=2)
    _, outputs = step(scheduler, token=7)
    ends = {name: (o.finish_reason, o.stop_reason) for name, o in outputs.items()}
    assert ends == {
        "eos": (FinishReason.STOP, None),
        "id": (FinishReason.STOP, 7),
        "length": (FinishReason.LENGTH, None),
        "not yet": (None, None),
    }
    plan = scheduler.schedule()
    assert plan.finished_req_ids == {"eos", "id", "length"}
    assert plan.num_scheduled_tokens == {"not yet": 1}


@pytest.mark.parametrize("moment", ["waiting", "running", "preempted", "in flight"])
def test_an_abort_at_any_moment_frees_the_blocks_and_gives_no_output(moment: str) -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    add(scheduler, "old", 4, max_tokens=8)
    add(scheduler, "r", 4, max_tokens=4)
    if moment != "waiting":
        step(scheduler)
    if moment == "preempted":
        step(scheduler)
        assert scheduler.requests["r"].status is RequestStatus.PREEMPTED
    plan = scheduler.schedule() if moment == "in flight" else None
    scheduler.finish_requests(["r", "unknown"], ABORTED)
    scheduler.finish_requests("r", ABORTED)
    outputs = answer(scheduler, plan) if plan else {}
    assert all(o.request_id != "r" for c in outputs.values() for o in c.outputs)
    assert list(scheduler.requests) == ["old"]
    scheduler.check_integrity()
    assert scheduler.schedule().finished_req_ids == {"r"}
    assert scheduler.schedule().finished_req_ids == set()


def test_an_id_that_is_used_again_does_not_get_the_tokens_in_flight_for_its_predecessor() -> None:
    scheduler = make_scheduler()
    add(scheduler, "r", 4)
    plan = scheduler.schedule()
    scheduler.finish_requests("r", ABORTED)
    successor = add(scheduler, "r", 6, start=500)
    assert scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[7]])) == {}
    assert successor.num_output_tokens == 0
    plan = scheduler.schedule()
    assert plan.finished_req_ids == {"r"}
    assert [new.req_id for new in plan.scheduled_new_reqs] == ["r"]
    assert plan.num_scheduled_tokens == {"r": 6}


def test_a_clients_requests_end_with_it_and_others_go_on() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4, client=1)
    add(scheduler, "b", 4, client=2)
    step(scheduler)
    add(scheduler, "c", 4, client=1)
    assert sorted(scheduler.abort_client(1)) == ["a", "c"]
    assert scheduler.abort_client(1) == []
    assert step(scheduler)[0] == {"b": 1}


def test_a_step_is_due_until_the_workers_know_that_a_request_has_ended() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_requests()
    add(scheduler, "r", 4, max_tokens=1)
    assert scheduler.has_requests()
    assert scheduler.get_num_unfinished_requests() == 1
    step(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduler.has_requests()
    plan = scheduler.schedule()
    assert (plan.finished_req_ids, plan.total_num_scheduled_tokens) == ({"r"}, 0)
    assert answer(scheduler, plan) == {}
    assert not scheduler.has_requests()


def test_requests_can_only_be_finished_with_a_finished_status() -> None:
    scheduler = make_scheduler()
    add(scheduler, "r", 4)
    with pytest.raises(InvalidArgumentError, match="status"):
        scheduler.finish_requests("r", RequestStatus.RUNNING)
    scheduler.finish_requests(scheduler.requests, RequestStatus.FINISHED_ERROR)
    assert not scheduler.has_unfinished_requests()


# Outputs.


def test_each_client_gets_its_own_outputs() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4, client=1)
    add(scheduler, "b", 4, client=2)
    add(scheduler, "c", 4, client=1)
    outputs = answer(scheduler, scheduler.schedule())
    assert {client: [o.request_id for o in c.outputs] for client, c in outputs.items()} == {
        1: ["a", "c"],
        2: ["b"],
    }
    assert all(c.engine_index == 3 and c.timestamp > 0 for c in outputs.values())


def test_events_come_once_with_the_first_output_after_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "r", 6)
    assert step(scheduler)[1] == {}
    events = step(scheduler)[1]["r"].events
    assert events is not None
    assert [(e.type, e.timestamp) for e in events] == [
        (EngineCoreEventType.QUEUED, 0.0),
        (EngineCoreEventType.SCHEDULED, 1.0),
    ]
    assert step(scheduler)[1]["r"].events is None


def test_several_tokens_of_one_step_are_kept_up_to_the_one_that_ends_the_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, "r", 4, max_tokens=9, stop_token_ids=[5])
    outputs = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["r"], [[1, 2]]))
    assert outputs[0].outputs[0].new_token_ids == [1, 2]
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"r": 2}
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[3, 5, 6]]))
    assert outputs[0].outputs[0].new_token_ids == [3, 5]
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP


def test_an_incomplete_answer_of_the_model_runner_is_an_error() -> None:
    scheduler = make_scheduler()
    add(scheduler, "r", 4)
    plan = scheduler.schedule()
    with pytest.raises(NBEngineError, match="answered for 0 requests of 1"):
        scheduler.update_from_output(plan, ModelRunnerOutput([], []))
    with pytest.raises(NBEngineError, match="sampled no token for request r"):
        scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[]]))


# The prefix cache.


def test_requests_of_one_step_with_the_same_prompt_compute_its_full_blocks_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for name in "abc":
        add(scheduler, name, 14, start=1)
    counts, outputs = step(scheduler)
    assert counts == {"a": 14, "b": 2, "c": 2}
    assert {name: o.num_cached_tokens for name, o in outputs.items()} == {"a": 0, "b": 12, "c": 12}


def test_a_rerun_of_an_edited_prompt_computes_the_changed_suffix_only() -> None:
    scheduler = make_scheduler()
    add(scheduler, "first", 17, start=1, max_tokens=1)
    step(scheduler)
    request = Request("edited", [*range(1, 13), 99, 98, 97], SamplingParams())
    scheduler.add_request(request)
    counts, outputs = step(scheduler)
    assert counts == {"edited": 3}
    assert outputs["edited"].num_cached_tokens == 12


def test_lookups_count_once_a_request_whatever_it_waits_for_and_however_often_it_resumes() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    add(scheduler, "a", 9, start=1, max_tokens=4)
    step(scheduler)
    add(scheduler, "b", 14, start=1, max_tokens=2)
    step(scheduler)
    assert "b" not in step(scheduler)[0]
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9, 0)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9 + 14, 8)


def test_the_prefix_cache_is_reset_only_while_nothing_runs() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 9, start=1, max_tokens=2)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.make_stats().num_cached_blocks == 2
    assert scheduler.reset_prefix_cache()
    assert scheduler.make_stats().num_cached_blocks == 0
    add(scheduler, "b", 9, start=1)
    assert step(scheduler)[0] == {"b": 9}


def test_stats_describe_the_state_after_the_step() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=40, max_num_seqs=1)
    add(scheduler, "a", 9)
    add(scheduler, "b", 9)
    step(scheduler)
    stats = scheduler.make_stats()
    assert stats.engine_index == 3
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (10, 7, 2)
    assert stats.kv_cache_usage == pytest.approx(0.3)
    assert stats.step_counter == 1


def test_the_audit_finds_a_waiting_request_that_holds_blocks() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "r", 4)
    scheduler.check_integrity()
    request.block_ids = [0]
    with pytest.raises(NBEngineError, match="a waiting request holds KV blocks"):
        scheduler.check_integrity()
