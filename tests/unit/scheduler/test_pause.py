"""A paused scheduler plans nothing that the pause holds back, and tells clients of ends."""

from __future__ import annotations

import pytest

from nbengine.scheduler.pause import PauseState
from tests.unit.scheduler.short_histories import ABORTED, add, answer, make_scheduler, step


def test_a_full_pause_plans_nothing_and_keeps_what_runs_where_it_is() -> None:
    scheduler = make_scheduler()
    add(scheduler, "runs", 4)
    step(scheduler)
    add(scheduler, "waits", 4)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.has_requests()
    assert scheduler.has_unfinished_requests()
    assert step(scheduler) == ({}, {})
    assert scheduler.make_stats().num_free_blocks == 63
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.has_requests()
    assert step(scheduler)[0] == {"runs": 1, "waits": 4}


def test_a_pause_of_new_requests_lets_those_go_on_that_have_begun_preempted_ones_too() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, scheduling_policy="priority")
    add(scheduler, "first", 7, priority=1, max_tokens=3)
    add(scheduler, "preempted", 7, priority=2, max_tokens=3)
    step(scheduler)
    step(scheduler)
    assert step(scheduler)[1].keys() == {"first"}
    assert scheduler.num_preemptions == 1
    add(scheduler, "new", 2, priority=0, max_tokens=2)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.has_requests()
    assert list(step(scheduler)[0]) == ["preempted"]
    while scheduler.has_requests():
        assert "new" not in step(scheduler)[0]
    assert list(scheduler.requests) == ["new"]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler)[0] == {"new": 2}


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_step_is_due_in_a_pause_when_workers_must_be_told_of_an_end(state: PauseState) -> None:
    scheduler = make_scheduler()
    add(scheduler, "r", 4, client=1)
    add(scheduler, "waits", 4, client=2)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step(scheduler)
    scheduler.set_pause_state(state)
    scheduler.finish_requests(["r", "waits"], ABORTED)
    assert scheduler.has_requests()
    plan = scheduler.schedule()
    assert plan.finished_req_ids == {"r", "waits"}
    outputs = answer(scheduler, plan)
    assert {client: batch.finished_requests for client, batch in outputs.items()} == {1: ["r"], 2: ["waits"]}
    assert not scheduler.has_requests()


def test_clients_are_told_once_of_ends_that_they_did_not_ask_for() -> None:
    scheduler = make_scheduler()
    for name, client in (("a", 1), ("b", 1), ("c", 2)):
        add(scheduler, name, 4, client=client)
    step(scheduler)
    scheduler.finish_requests("a", ABORTED)
    scheduler.abort_client(2)
    outputs = answer(scheduler, scheduler.schedule())
    assert {client: batch.finished_requests for client, batch in outputs.items()} == {1: ["a"]}
    assert [o.request_id for o in outputs[1].outputs] == ["b"]
    assert answer(scheduler, scheduler.schedule())[1].finished_requests is None
