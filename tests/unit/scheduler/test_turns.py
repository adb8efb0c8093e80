"""Turns between clients: the waiting queue against a direct simulation, and what follows for a scheduler's clients."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import NBEngineError
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.queue import RequestQueue
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.waiting import WaitingQueue
from tests.support.thorough import amount
from tests.unit.scheduler.short_histories import ABORTED, add, make_scheduler, step

HISTORIES = amount(600, thorough=20_000)
PARAMS = SamplingParams()


@dataclass
class Rig:
    """Waiting and running requests; what has been admitted while each of those that wait has waited."""

    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: RequestQueue = field(default_factory=RequestQueue)
    numbers: count[int] = field(default_factory=count)
    overtaken: dict[Request, Counter[int]] = field(default_factory=dict)
    """By those that have not begun: admissions of their priority, by client."""

    def add(self, client: int, priority: int = 0, arrival: float = 0.0) -> Request:
        number = next(self.numbers)
        request = Request(f"r{number}", [1], PARAMS, client_index=client, priority=priority)
        request.order = (priority, 0, arrival, number)
        self.waiting.add(request)
        self.overtaken[request] = Counter()
        return request

    def admit(self) -> Request | None:
        request = self.waiting.first()
        if request is None:
            return None
        if request.status is RequestStatus.WAITING:
            del self.overtaken[request]
            for other, counter in self.overtaken.items():
                if other.order[0] == request.order[0]:
                    counter[request.client_index] += 1
        self.waiting.admit(request)
        request.status = RequestStatus.RUNNING
        self.running.add(request)
        return request

    def preempt(self) -> None:
        request = self.running.pop_last()
        request.status = RequestStatus.PREEMPTED
        self.waiting.add(request)

    def abort(self, index: int) -> None:
        requests = list(self.waiting)
        request = requests[index % len(requests)]
        self.waiting.remove(request)
        self.overtaken.pop(request, None)

    def perform(self, events: list[tuple[object, ...]]) -> None:
        for kind, *args in events:
            if kind == "add":
                self.add(*args)  # type: ignore[arg-type]
            elif kind == "admit":
                self.admit()
            elif kind == "preempt" and len(self.running):
                self.preempt()
            elif kind == "abort" and len(self.waiting):
                self.abort(args[0])  # type: ignore[arg-type]
            self.check()

    def check(self) -> None:
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting) == len(set(waiting))
        assert self.waiting.first() is (waiting[0] if waiting else None)
        begun = [r for r in waiting if r.status is RequestStatus.PREEMPTED]
        assert self.waiting.num_begun == len(begun)
        assert self.waiting.first(only_begun=True) is (begun[0] if begun else None)


def events(clients: int, priorities: int, arrivals: int) -> st.SearchStrategy[list[tuple[object, ...]]]:
    """Histories by the number of a seed: to draw each event by itself would take longer than to check it."""

    def history(seed: int) -> list[tuple[object, ...]]:
        rng = random.Random(seed)

        def one() -> tuple[object, ...]:
            kind = rng.choice(["add", "add", "admit", "preempt", "abort"])
            if kind == "add":
                return kind, rng.randrange(clients), rng.randrange(priorities), float(rng.randrange(arrivals))
            return (kind, rng.randrange(31)) if kind == "abort" else (kind,)

        return [one() for _ in range(rng.randint(15, 40))]

    return st.integers(0, 2**32 - 1).map(history)


@settings(max_examples=HISTORIES)
@given(events=events(clients=4, priorities=2, arrivals=3))
def test_no_first_request_of_a_client_is_overtaken_by_two_of_another(
    events: list[tuple[object, ...]],
) -> None:
    rig = Rig()
    for event in events:
        rig.perform([event])
        for request, admitted in rig.overtaken.items():
            own = admitted[request.client_index]
            assert all(number <= own + 1 for number in admitted.values())


@settings(max_examples=HISTORIES)
@given(events=events(clients=1, priorities=3, arrivals=3))
def test_a_client_alone_is_served_by_priority_arrival_and_number(events: list[tuple[object, ...]]) -> None:
    rig = Rig()
    for event in events:
        rig.perform([event])
        for requests in (list(rig.waiting), list(rig.running)):
            assert requests == sorted(requests, key=lambda r: (r.order[0], *r.order[2:]))


@settings(max_examples=HISTORIES)
@given(events=events(clients=3, priorities=2, arrivals=1))
def test_nobody_who_has_been_admitted_falls_behind_who_comes_later(events: list[tuple[object, ...]]) -> None:
    rig = Rig()
    admitted: list[Request] = []
    for event in events:
        before = set(rig.running)
        rig.perform([event])
        admitted += [r for r in rig.running if r not in before and r not in admitted]
        places = {request: place for place, request in enumerate(admitted)}
        for requests in (list(rig.running), [r for r in rig.waiting if r in places]):
            assert requests == sorted(requests, key=lambda r: (r.order[0], places[r]))
        waiting = list(rig.waiting)
        for place, request in enumerate(waiting):
            if request.status is RequestStatus.PREEMPTED:
                assert all(other.order[0] < request.order[0] or other in places for other in waiting[:place])


def test_the_queue_says_when_a_request_is_not_there() -> None:
    rig = Rig()
    request = rig.add(1)
    rig.waiting.remove(request)
    with pytest.raises(NBEngineError, match="is not in the queue"):
        rig.waiting.remove(request)
    assert len(rig.waiting) == 0
    assert rig.waiting.first() is None


def test_aborted_requests_leave_nothing_behind_in_a_long_queue() -> None:
    rig = Rig()
    requests = [rig.add(client) for client in (1, 2) for _ in range(1000)]
    for request in requests[1:1999]:
        rig.waiting.remove(request)
    assert [request.number for request in rig.waiting] == [-1, -1]
    assert sum(len(line._in_order) for line in rig.waiting._lines[0].values()) < 10


# A scheduler's clients.


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_client_with_a_thousand_requests_gives_another_the_next_free_place(policy: str) -> None:
    scheduler = make_scheduler(scheduling_policy=policy, max_num_seqs=4)
    for number in range(1000):
        add(scheduler, f"many{number}", 1, client=1, max_tokens=3, arrival=1.0)
    step(scheduler)
    add(scheduler, "one", 1, client=2, max_tokens=3, arrival=2.0)
    for _ in range(2):
        assert "one" not in step(scheduler)[0], "nobody is stopped to make room"
    assert "one" in step(scheduler)[0]


def test_who_was_admitted_in_turn_is_not_the_victim_of_those_who_came_after() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, max_num_seqs=3)
    for number in range(6):
        add(scheduler, f"many{number}", 4, client=1, max_tokens=2 if number < 2 else 20)
    add(scheduler, "one", 4, client=2, max_tokens=12)
    ended: list[str] = []
    preempted: set[str] = set()
    while "one" not in ended:
        plan, outputs = step(scheduler)
        assert plan
        ended += [name for name, output in outputs.items() if output.finished]
        preempted |= {r.request_id for r in scheduler.waiting if r.status is RequestStatus.PREEMPTED}
    assert preempted, "there was not room for all"
    assert "one" not in preempted


def test_a_request_that_is_aborted_costs_its_client_no_turn() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "runs", 1, client=1, max_tokens=1)
    step(scheduler)
    for name in ("a0", "a1", "a2"):
        add(scheduler, name, 1, client=1, max_tokens=1)
    scheduler.finish_requests(["a0", "a1"], ABORTED)
    for name in ("b0", "b1"):
        add(scheduler, name, 1, client=2, max_tokens=1)
    assert [next(iter(step(scheduler)[0])) for _ in range(3)] == ["a2", "b0", "b1"]


def test_as_many_are_admitted_before_a_request_as_its_place_says() -> None:
    """The oracle is what the scheduler then does, one request a step."""
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    names = [
        ("a0", 1, 1),
        ("a1", 1, 1),
        ("a2", 1, 1),
        ("b0", 2, 1),
        ("first", 2, 0),
        ("b1", 2, 1),
        ("last", 3, 2),
    ]
    for name, client, priority in names:
        add(scheduler, name, 1, client=client, priority=priority, max_tokens=1)
    places = {name: scheduler.num_ahead_of([name]) for name, *_ in names}
    assert scheduler.num_ahead_of(["last", "nobody", "b1"]) == places["b1"]
    admitted = [next(iter(step(scheduler)[0])) for _ in names]
    assert {name: at for at, name in enumerate(admitted)} == places
    assert scheduler.num_ahead_of(["a0"]) is None
    add(scheduler, "long", 1, max_tokens=5)
    step(scheduler)
    assert scheduler.num_ahead_of(["long"]) is None, "a request that runs waits for nobody"
