"""Drafts: tokens that are computed before anyone knows whether they are right."""

from __future__ import annotations

from nbengine.ipc.messages import FinishReason
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import add, make_scheduler


def begin(scheduler: Scheduler, drafts: list[int], length: int = 4, **params) -> None:
    """Add a request, compute its prompt, and propose drafts to follow its first token, 100."""
    add(scheduler, "r", length, **params)
    report(scheduler, scheduler.schedule(), [100], drafts)


def report(
    scheduler: Scheduler, plan: SchedulerOutput, sampled: list[int], drafts: list[int] | None = None
) -> list[int]:
    output = ModelRunnerOutput(["r"], [sampled], draft_token_ids=None if drafts is None else {"r": drafts})
    (batch,) = scheduler.update_from_output(plan, output).values()
    return batch.outputs[0].new_token_ids


def test_drafts_are_computed_after_the_last_token_and_the_accepted_ones_stay() -> None:
    scheduler = make_scheduler(lookahead=3)
    begin(scheduler, [1, 2, 3, 4])
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"r": [1, 2, 3]}, "no more than there are slots for"
    assert plan.num_scheduled_tokens == {"r": 4}
    assert report(scheduler, plan, [1, 2, 9]) == [1, 2, 9]
    request = scheduler.requests["r"]
    assert request.output_token_ids == [100, 1, 2, 9]
    assert request.num_computed_tokens == 4 + 3
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {}
    assert plan.scheduled_cached_reqs.num_computed_tokens == [7]
    assert plan.num_scheduled_tokens == {"r": 1}


def test_no_draft_and_all_drafts_may_be_accepted() -> None:
    scheduler = make_scheduler(lookahead=2)
    begin(scheduler, [1, 2])
    assert report(scheduler, scheduler.schedule(), [9], [5, 6]) == [9]
    assert scheduler.requests["r"].num_computed_tokens == 5
    assert report(scheduler, scheduler.schedule(), [5, 6, 7]) == [5, 6, 7]
    assert scheduler.requests["r"].num_computed_tokens == 8


def test_drafts_keep_to_the_budget_and_to_max_tokens() -> None:
    scheduler = make_scheduler(lookahead=3, max_num_batched_tokens=3)
    begin(scheduler, [1, 2, 3], length=3)
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"r": [1, 2]}
    scheduler = make_scheduler(lookahead=3)
    begin(scheduler, [1, 2, 3], max_tokens=3)
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"r": [1]}
    add(scheduler, "other", 4)
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(["r"], [[1, 2]]))
    assert outputs[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_the_accepted_ones_ends_the_request_there() -> None:
    scheduler = make_scheduler(lookahead=3)
    begin(scheduler, [1, 2, 3], stop_token_ids=[2])
    outputs = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["r"], [[1, 2, 3, 4]]))
    assert outputs[0].outputs[0].new_token_ids == [1, 2]
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP
    scheduler.check_integrity()


def test_blocks_of_rejected_drafts_cannot_be_found() -> None:
    scheduler = make_scheduler(lookahead=4)
    begin(scheduler, [1, 2, 3, 4])
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"r": 5}
    report(scheduler, plan, [1, 9])
    assert scheduler.make_stats().num_cached_blocks == 1
    plan = scheduler.schedule()
    report(scheduler, plan, [10])
    assert scheduler.schedule().num_scheduled_tokens == {"r": 1}
    assert scheduler.make_stats().num_cached_blocks == 2


def test_where_drafts_are_taken_nothing_is_planned_ahead_of_them() -> None:
    scheduler = make_scheduler(lookahead=2, ahead=True)
    begin(scheduler, [1, 2])
    plan = scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {}
    report(scheduler, plan, [1, 5])
    assert scheduler.schedule().num_scheduled_tokens == {"r": 1}
