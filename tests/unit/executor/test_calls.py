"""Calls whose answers come later: their order, waiting, polling, time limits, failures."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.errors import EngineDeadError, EngineStartError, NBEngineError
from nbengine.executor.calls import FAILURE, SUCCESS, FutureWrapper, PendingCalls
from nbengine.executor.failures import WorkerReport


def report(error: Exception) -> WorkerReport:
    return WorkerReport.of("method", error)


class Answers:
    """Queues of answers by rank; nothing ever waits, the time is simply up."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.queues: list[deque] = [deque() for _ in range(num_ranks)]
        self.waits: list[tuple[int, float | None]] = []
        self.broken: Exception | None = None
        self.given_up: list[int] = []
        self.calls = PendingCalls(self.receive, self.give_up, patience=0.02)

    def receive(self, rank: int, timeout: float | None):
        if timeout != 0:
            self.waits.append((rank, timeout))
        if self.queues[rank]:
            return self.queues[rank].popleft()
        if self.broken is not None:
            raise self.broken
        assert timeout is not None, "would wait for ever"
        raise TimeoutError

    def give_up(self, rank: int, report: WorkerReport) -> Exception:
        self.given_up.append(rank)
        self.broken = EngineDeadError(f"rank {rank}: {report.description}")
        return self.broken

    def come(self, rank: int, *values) -> None:
        for value in values:
            status = FAILURE if isinstance(value, WorkerReport) else SUCCESS
            self.queues[rank].append((status, value))


@pytest.fixture
def answers() -> Answers:
    return Answers()


def test_all_ranks_answers_come_by_rank_and_a_unique_one_alone(answers: Answers) -> None:
    everyone = answers.calls.add(range(2))
    second = answers.calls.add((1,), unique=True)
    answers.come(0, "a0")
    answers.come(1, "a1", "b1")
    assert second.result() == "b1"
    assert everyone.result() == ["a0", "a1"]


def test_waiting_for_a_call_takes_in_those_before_it_and_none_after(answers: Answers) -> None:
    futures = [answers.calls.add((0,), unique=True) for _ in range(3)]
    answers.come(0, "first", "second", "third")
    assert futures[1].result() == "second"
    assert len(answers.calls) == 1
    assert futures[0].result() == "first"
    assert len(answers.queues[0]) == 1


def test_polling_never_waits(answers: Answers) -> None:
    future = answers.calls.add(range(2))
    answers.come(0, "a0")
    assert not future.done()
    answers.come(1, "a1")
    assert future.done()
    assert answers.waits == []


def test_polling_a_later_call_takes_in_the_earlier_ones(answers: Answers) -> None:
    first, second = answers.calls.add((0,)), answers.calls.add((1,))
    answers.come(1, "early")
    assert not second.done()
    answers.come(0, "late")
    assert second.done()
    assert first.result() == ["late"]


def test_a_call_that_was_not_answered_in_time_still_gets_its_answer_and_no_other(answers: Answers) -> None:
    slow = answers.calls.add((0,), unique=True)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        slow.result(0.01)
    next_one = answers.calls.add((0,), unique=True)
    answers.come(0, "slow", "next")
    assert next_one.result() == "next"
    assert slow.result() == "slow"


def test_a_time_limit_holds_for_all_ranks_together(answers: Answers) -> None:
    future = answers.calls.add(range(2))
    answers.come(0, "a0")
    with pytest.raises(TimeoutError):
        future.exception(0.05)
    answers.come(1, "a1")
    assert future.result() == ["a0", "a1"]


def test_a_call_that_was_sent_cannot_be_cancelled(answers: Answers) -> None:
    future = answers.calls.add((0,))
    assert not future.cancel()
    answers.come(0, 1)
    assert future.result() == [1]


def test_a_failure_is_raised_as_it_was_and_leaves_the_next_calls_alone(answers: Answers) -> None:
    failing, following = answers.calls.add(range(2)), answers.calls.add(range(2))
    answers.come(0, report(EngineStartError("too little memory")), "x")
    answers.come(1, "fine", "y")
    with pytest.raises(EngineStartError, match="too little memory"):
        failing.result()
    assert isinstance(failing.exception(), EngineStartError)
    assert following.result() == ["x", "y"]


def test_of_several_failures_the_one_that_is_no_consequence_is_raised(answers: Answers) -> None:
    future = answers.calls.add(range(2))
    answers.come(0, report(RuntimeError("Connection reset by peer")))
    answers.come(1, report(ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        future.result()


def test_a_failed_rank_that_others_wait_for_ends_everything(answers: Answers) -> None:
    stuck, later = answers.calls.add(range(2)), answers.calls.add((1,))
    answers.come(1, report(RuntimeError("out of memory")))
    with pytest.raises(EngineDeadError, match="rank 1: RuntimeError: out of memory"):
        stuck.result()
    with pytest.raises(EngineDeadError):
        later.result()
    assert answers.given_up == [1]


def test_a_rank_that_is_merely_slow_is_waited_for(answers: Answers) -> None:
    future = answers.calls.add(range(2))
    answers.come(1, "quick")
    receive, tries = answers.receive, 0

    def slowly(rank: int, timeout: float | None):
        nonlocal tries
        tries += rank == 0 and timeout != 0
        if tries == 4:
            answers.come(0, "slow")
            tries += 1
        return receive(rank, timeout)

    answers.calls._receive = slowly
    assert future.result() == ["slow", "quick"]
    assert not answers.given_up


def test_one_answer_is_waited_for_in_one_wait(answers: Answers) -> None:
    future = answers.calls.add((1,), unique=True)
    answers.come(1, "here")
    future.result()
    assert answers.waits == [(1, None)]


@pytest.mark.parametrize("ask", [FutureWrapper.result, FutureWrapper.exception, FutureWrapper.done])
def test_when_the_workers_are_gone_every_call_says_so_after_the_answers_that_came(
    answers: Answers, ask
) -> None:
    answered, lost, lost_too = (answers.calls.add((0,), unique=True) for _ in range(3))
    answers.come(0, "in time")
    answers.broken = EngineDeadError("worker 0 was killed")
    if ask is FutureWrapper.result:
        with pytest.raises(EngineDeadError):
            ask(lost)
    else:
        assert ask(lost)
    assert answered.result() == "in time"
    assert isinstance(lost_too.exception(), EngineDeadError)


class CallsOfWorkers(RuleBasedStateMachine):
    """Whatever is asked when, every call gets its own answers, from the ranks that it asked."""

    @initialize(num_ranks=st.integers(1, 3))
    def begin(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.answers = Answers(num_ranks)
        self.sent: list[tuple[FutureWrapper, list]] = []
        self.unanswered: list[deque] = [deque() for _ in range(num_ranks)]

    @rule(data=st.data())
    def call(self, data) -> None:
        rank = data.draw(st.none() | st.integers(0, self.num_ranks - 1))
        ranks = range(self.num_ranks) if rank is None else (rank,)
        number = len(self.sent)
        for each in ranks:
            self.unanswered[each].append((number, each))
        future = self.answers.calls.add(ranks, unique=rank is not None)
        self.sent.append((future, (number, rank) if rank is not None else [(number, r) for r in ranks]))

    @precondition(lambda self: any(self.unanswered))
    @rule(data=st.data())
    def answer(self, data) -> None:
        rank = data.draw(st.sampled_from([r for r, queue in enumerate(self.unanswered) if queue]))
        self.answers.come(rank, self.unanswered[rank].popleft())

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def ask(self, data) -> None:
        future, expected = data.draw(st.sampled_from(self.sent))
        asked = [expected] if isinstance(expected, tuple) else expected
        has_come = all(item not in self.unanswered[item[1]] for item in asked)
        earlier = self.sent[: [f for f, _ in self.sent].index(future)]
        has_come &= all(
            item not in self.unanswered[item[1]]
            for _, e in earlier
            for item in ([e] if isinstance(e, tuple) else e)
        )
        assert future.done() == has_come
        if has_come:
            assert future.result() == expected
        else:
            with pytest.raises(TimeoutError):
                future.result(0.0)

    @invariant()
    def results_are_their_own(self) -> None:
        for future, expected in getattr(self, "sent", []):
            if future not in self.answers.calls._pending:
                assert future.result() == expected


TestCallsOfWorkers = CallsOfWorkers.TestCase


def test_an_error_while_polling_is_for_the_futures_not_for_the_poller(answers: Answers) -> None:
    future = answers.calls.add((0,))
    answers.broken = NBEngineError("broken")
    answers.calls.poll()
    assert len(answers.calls) == 0
    with pytest.raises(NBEngineError, match="broken"):
        future.result()
