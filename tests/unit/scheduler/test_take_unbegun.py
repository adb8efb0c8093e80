"""Requests that are taken back before they have brought their clients anything."""

from __future__ import annotations

from tests.unit.scheduler.short_histories import add, answer, make_scheduler, step


def test_what_waits_is_taken_back_by_client_and_what_runs_stays() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "runs", 4, client=1)
    for name, client in (("a", 1), ("b", 2), ("c", 1)):
        add(scheduler, name, 4, client=client)
    step(scheduler)
    assert scheduler.take_unbegun() == {1: ["a", "c"], 2: ["b"]}
    assert list(scheduler.requests) == ["runs"]
    assert scheduler.take_unbegun() == {}
    _, outputs = step(scheduler)
    assert outputs.keys() == {"runs"}
    scheduler.check_integrity()


def test_nobody_is_told_that_it_has_ended() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "runs", 4, client=1)
    add(scheduler, "waits", 4, client=1)
    step(scheduler)
    scheduler.take_unbegun()
    assert answer(scheduler, scheduler.schedule())[1].finished_requests is None


def test_a_preempted_request_that_has_brought_tokens_stays() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    for name in ("first", "preempted"):
        add(scheduler, name, 7, max_tokens=3)
    while not scheduler.num_preemptions:
        step(scheduler)
    add(scheduler, "new", 2)
    assert scheduler.take_unbegun() == {0: ["new"]}
    assert list(scheduler.requests) == ["preempted"]


def test_what_is_in_flight_for_it_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, ahead=True)
    add(scheduler, "old", 7, max_tokens=8)
    add(scheduler, "new", 7, max_tokens=8)
    plans = [scheduler.schedule() for _ in range(3)]
    assert plans[2].preempted_req_ids == {"new"}
    assert scheduler.take_unbegun() == {0: ["new"]}
    for plan in plans:
        (batch,) = answer(scheduler, plan).values()
        assert [output.request_id for output in batch.outputs] == ["old"]
    assert scheduler.schedule().finished_req_ids == {"new"}
    scheduler.check_integrity()
