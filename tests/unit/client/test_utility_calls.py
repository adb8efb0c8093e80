"""Calls to one engine core or to all of them, and the one answer."""

from __future__ import annotations

import pytest

from nbengine.client.utility_calls import UtilityCalls
from nbengine.errors import EngineDeadError, UtilityError
from nbengine.ipc.messages import UtilityOutput
from nbengine.ipc.utilities import ProfileReport
from nbengine.metrics.stats import SchedulerStats


@pytest.fixture
def calls() -> UtilityCalls:
    return UtilityCalls()


def test_a_call_for_all_waits_for_the_last_and_merges(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("reset_prefix_cache", (True,))
    sent = calls.address(call_id, [0, 2, 5], 7)
    assert [rank for rank, _ in sent] == [0, 2, 5]
    assert all((r.client_index, r.method, r.args) == (7, "reset_prefix_cache", [True]) for _, r in sent)
    for rank, answer in ((5, True), (0, True)):
        calls.answer(rank, UtilityOutput(call_id, result=answer))
    assert not future.done()
    calls.answer(2, UtilityOutput(call_id, result=False))
    assert future.result(0) is False


def test_any_other_call_goes_to_the_first_rank_alone(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("ping", ())
    assert [rank for rank, _ in calls.address(call_id, [3, 4], 1)] == [3]
    calls.answer(4, UtilityOutput(call_id, result="who asked?"))
    calls.answer(3, UtilityOutput(call_id, result="pong"))
    assert future.result(0) == "pong"


def test_statistics_and_profiles_of_all_ranks_come_together(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("stats", ())
    calls.address(call_id, [0, 1], 1)
    # As they are on the wire, the second rank first.
    calls.answer(1, UtilityOutput(call_id, result=[1, 3, 0, 64, 60]))
    calls.answer(0, UtilityOutput(call_id, result=[0, 0, 0, 64, 64]))
    stats = future.result(0)
    assert [engine.engine_index for engine in stats.engines] == [0, 1]
    assert stats.engines[1] == SchedulerStats(1, 3, 0, 64, 60)
    assert stats.engines_running
    call_id, future = calls.begin("stop_profile", ())
    calls.address(call_id, [0, 1], 1)
    for rank in (0, 1):
        answer = {"paths": [f"trace {rank}"], "num_steps": 3, "summary": f"of {rank}"}
        calls.answer(rank, UtilityOutput(call_id, result=answer))
    assert future.result(0) == ProfileReport(["trace 0", "trace 1"], 6, "of 0")


def test_a_failure_is_the_answer_names_the_rank_and_undoes_the_rest(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("sleep", (1, None))
    calls.address(call_id, [0, 1, 2], 7)
    assert calls.answer(2, UtilityOutput(call_id)) == []
    assert calls.answer(1, UtilityOutput(call_id, failure_message="unfinished requests")) == []
    undo = calls.answer(0, UtilityOutput(call_id))
    # Those that sleep are woken up: all sleep or none.
    assert [(rank, call.method, call.client_index) for rank, call in undo] == [
        (0, "wake_up", 7),
        (2, "wake_up", 7),
    ]
    with pytest.raises(UtilityError, match="engine core 1: unfinished requests"):
        future.result(0)
    call_id, future = calls.begin("sleep", (1, None))
    calls.address(call_id, [0], 1)
    calls.answer(0, UtilityOutput(call_id, failure_message="unfinished requests"))
    with pytest.raises(UtilityError, match=r"^unfinished requests"):
        future.result(0)


def test_a_lost_rank_fails_what_it_has_not_answered(calls: UtilityCalls) -> None:
    waiting, first = calls.begin("stats", ())
    answered, second = calls.begin("is_paused", ())
    elsewhere, third = calls.begin("ping", ())
    for call_id in (waiting, answered, elsewhere):
        calls.address(call_id, [0, 1], 1)
    calls.answer(1, UtilityOutput(answered, result=True))
    calls.lose(1, "killed")
    with pytest.raises(UtilityError, match="stats: engine core 1 has ended: killed"):
        first.result(0)
    calls.answer(0, UtilityOutput(answered, result=True))
    assert second.result(0) is True
    calls.answer(0, UtilityOutput(elsewhere, result="pong"))
    assert third.result(0) == "pong"


def test_without_ranks_and_after_the_end_calls_fail_at_once(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("stats", ())
    assert calls.address(call_id, [], 1) == []
    with pytest.raises(UtilityError, match="no engine core takes calls"):
        future.result(0)
    call_id, future = calls.begin("stats", ())
    calls.fail(EngineDeadError("gone"))
    assert calls.address(call_id, [0], 1) == []
    with pytest.raises(EngineDeadError, match="gone"):
        future.result(0)


def test_a_cancelled_call_and_a_malformed_answer_harm_nobody(calls: UtilityCalls) -> None:
    call_id, future = calls.begin("stats", ())
    calls.address(call_id, [0], 1)
    future.cancel()
    calls.answer(0, UtilityOutput(call_id, result=[0]))
    call_id, future = calls.begin("stats", ())
    calls.address(call_id, [0], 1)
    calls.answer(0, UtilityOutput(call_id, result="nonsense"))
    with pytest.raises(UtilityError, match="malformed"):
        future.result(0)


def test_a_call_that_is_given_up_has_the_answers_that_there_are_and_says_whose_are_missing(
    calls: UtilityCalls,
) -> None:
    call_id, future = calls.begin("stats", ())
    calls.address(call_id, [0, 1, 2], 1)
    calls.answer(2, UtilityOutput(call_id, result="b"))
    calls.answer(0, UtilityOutput(call_id, result="a"))
    assert calls.unanswered(future) == [1]
    assert calls.give_up(call_id) == (["a", "b"], [1])
    assert calls.give_up(call_id) == ([], [])
    assert calls.answer(1, UtilityOutput(call_id, result="late")) == []
    assert not future.done()
