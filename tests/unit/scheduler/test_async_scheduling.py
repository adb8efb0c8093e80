"""Planning while other steps are in flight, each rule on a short history."""

from __future__ import annotations

import pytest

from nbengine.errors import NBEngineError
from nbengine.ipc.messages import FinishReason
from nbengine.scheduler.output import ModelRunnerOutput
from nbengine.scheduler.request import RequestStatus
from tests.unit.scheduler.fake_grammar import FakeGrammar, FakeMasks
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler


def tokens_of(outputs) -> dict[str, list[int]]:
    return {o.request_id: o.new_token_ids for batch in outputs.values() for o in batch.outputs}


def test_a_request_is_planned_for_its_next_token_while_the_one_before_is_in_flight() -> None:
    scheduler = make_scheduler(ahead=True)
    request = add(scheduler, "r", 4)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"r": 4}, {"r": 1}, {"r": 1}]
    assert plans[2].scheduled_cached_reqs.num_computed_tokens == [5]
    assert (request.num_tokens, request.num_output_placeholders) == (4, 3)
    for token, plan in enumerate(plans):
        assert tokens_of(answer(scheduler, plan, token)) == {"r": [token]}
    assert (request.output_token_ids, request.num_output_placeholders) == ([0, 1, 2], 0)


def test_without_async_scheduling_it_waits_and_others_use_the_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    first = scheduler.schedule()
    add(scheduler, "b", 40)
    second, third = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"b": 32}
    assert third.num_scheduled_tokens == {"b": 8}, "chunks of one prompt need no token of each other"
    answer(scheduler, first)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_nothing_is_planned_beyond_max_tokens_or_the_models_length() -> None:
    for limit in ({"max_tokens": 3}, {"max_tokens": None}):
        scheduler = make_scheduler(ahead=True, max_model_len=7)
        add(scheduler, "r", 4, **limit)
        plans = [scheduler.schedule() for _ in range(4)]
        assert [p.total_num_scheduled_tokens for p in plans] == [4, 1, 1, 0]
        for plan in plans[:2]:
            answer(scheduler, plan)
        (batch,) = answer(scheduler, plans[2]).values()
        assert batch.outputs[0].finish_reason is FinishReason.LENGTH


def test_what_was_planned_beyond_a_stop_is_dropped_and_its_blocks_are_free_at_once() -> None:
    scheduler = make_scheduler(ahead=True)
    add(scheduler, "r", 4, stop_token_ids=[7])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert tokens_of(answer(scheduler, first, 7)) == {"r": [7]}
    assert scheduler.make_stats().num_free_blocks == 64
    assert scheduler.schedule().finished_req_ids == {"r"}
    assert answer(scheduler, second, 8) == {}


def test_a_block_is_findable_only_when_its_tokens_are_known() -> None:
    scheduler = make_scheduler(ahead=True)
    add(scheduler, "first", 7, start=1)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"first": 1}, "which fills the second block"
    assert scheduler.make_stats().num_cached_blocks == 1
    answer(scheduler, first, 8)
    assert scheduler.make_stats().num_cached_blocks == 2
    add(scheduler, "same", 9, start=1)
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 8


def test_the_tokens_in_flight_of_a_preempted_request_count_and_it_resumes_when_they_are_known() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, ahead=True)
    add(scheduler, "old", 7, max_tokens=4)
    request = add(scheduler, "new", 7, max_tokens=4)
    first, second, third = scheduler.schedule(), scheduler.schedule(), scheduler.schedule()
    assert third.preempted_req_ids == {"new"}
    assert third.num_scheduled_tokens == {"old": 1}
    scheduler.finish_requests("old", ABORTED)
    assert scheduler.schedule().num_scheduled_tokens == {}, "two of its tokens are in flight"
    assert tokens_of(answer(scheduler, first, 50)) == {"new": [50]}
    assert scheduler.schedule().num_scheduled_tokens == {}, "one is"
    assert tokens_of(answer(scheduler, second, 51)) == {"new": [51]}
    assert request.status is RequestStatus.PREEMPTED
    assert request.output_token_ids == [50, 51]
    plan = scheduler.schedule()
    assert plan.scheduled_cached_reqs.resumed_req_ids == {"new"}
    assert plan.num_scheduled_tokens == {"new": 9 - 4}


def test_a_preempted_request_may_end_by_a_token_that_was_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, ahead=True)
    add(scheduler, "old", 7, max_tokens=8)
    add(scheduler, "new", 7, max_tokens=8, stop_token_ids=[9])
    plans = [scheduler.schedule() for _ in range(3)]
    assert plans[2].preempted_req_ids == {"new"}
    (batch,) = answer(scheduler, plans[0], 9).values()
    assert {o.request_id: o.finish_reason for o in batch.outputs} == {"old": None, "new": FinishReason.STOP}
    assert tokens_of(answer(scheduler, plans[1], 5)) == {"old": [5]}
    scheduler.check_integrity()


def test_an_id_used_again_does_not_get_what_is_in_flight_for_its_predecessor() -> None:
    scheduler = make_scheduler(ahead=True)
    add(scheduler, "r", 4)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.finish_requests("r", ABORTED, tell_client=False)
    successor = add(scheduler, "r", 6, start=500)
    third = scheduler.schedule()
    assert third.finished_req_ids == {"r"}
    assert third.num_scheduled_tokens == {"r": 6}
    assert answer(scheduler, first, 1) == answer(scheduler, second, 2) == {}
    assert tokens_of(answer(scheduler, third, 3)) == {"r": [3]}
    assert successor.output_token_ids == [3]


def test_a_token_left_out_is_an_error_also_for_a_step_planned_ahead() -> None:
    scheduler = make_scheduler(ahead=True)
    add(scheduler, "r", 4)
    scheduler.schedule()
    plan = scheduler.schedule()
    with pytest.raises(NBEngineError, match="sampled no token for request r"):
        scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[]]))


def test_the_cache_can_be_reset_under_running_requests_which_start_again() -> None:
    scheduler = make_scheduler(ahead=True)
    request = add(scheduler, "r", 9, start=1)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.make_stats().num_cached_blocks == 0
    plan = scheduler.schedule()
    assert (plan.preempted_req_ids, plan.num_scheduled_tokens) == ({"r"}, {})
    answer(scheduler, first, 1)
    answer(scheduler, second, 2)
    answer(scheduler, plan)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"r": 11}
    assert request.output_token_ids == [1, 2]


def test_a_step_planned_before_gets_no_mask_for_a_request_that_took_over_an_id() -> None:
    scheduler = make_scheduler(ahead=True, grammar_masks=FakeMasks())
    add(scheduler, "r", 4)
    first = scheduler.schedule()
    scheduler.finish_requests("r", ABORTED)
    add(scheduler, "r", 6, start=500, grammar=FakeGrammar(3))
    assert scheduler.get_grammar_bitmask(first) is None
    second = scheduler.schedule()
    assert (first.has_structured_output_requests, second.has_structured_output_requests) == (False, True)
    masks = scheduler.get_grammar_bitmask(second)
    assert masks is not None
    assert masks.req_ids == ["r"]
