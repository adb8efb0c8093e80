"""The outcome of a plan makes ends, outputs, cached prefixes and statistics; each rule has a short
history."""

from __future__ import annotations

import pytest

from nbengine.errors import InvalidArgumentError, NBEngineError
from nbengine.ipc.messages import EngineCoreEventType, FinishReason
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import ModelRunnerOutput
from nbengine.scheduler.request import Request, RequestStatus
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler, step

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
    scheduler.finish_requests("r", ABORTED, tell_client=False)
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
