"""The balancer against a linear scan over counts that are kept one request at a time."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.client.routing.load_balancer import CROWDING_ALLOWANCE, CROWDING_FACTOR, LoadBalancer
from nbengine.metrics.stats import EngineStats, SchedulerStats
from tests.support.thorough import amount


def report(counts: dict[int, tuple[int, int]]) -> EngineStats:
    """Statistics with (waiting, running) of each rank."""
    engines = [
        SchedulerStats(engine_index=rank, num_waiting_reqs=waiting, num_running_reqs=running)
        for rank, (waiting, running) in counts.items()
    ]
    return EngineStats(engines=engines)


def balancer_of(*ranks: int, start: int = 0) -> LoadBalancer:
    balancer = LoadBalancer(start)
    balancer.set_ranks(ranks)
    return balancer


def send(balancer: LoadBalancer, count: int) -> list[int]:
    chosen = []
    for _ in range(count):
        chosen.append(balancer.pick())
        balancer.add(chosen[-1])
    return chosen


def scan(scores: dict[int, int], start: int) -> int:
    """The rule in its plainest form: the first of the least, from `start` on and round."""
    ranks = sorted(scores)
    order = [*ranks[start:], *ranks[:start]]
    return min(order, key=scores.__getitem__)


@given(st.dictionaries(st.integers(0, 63), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_least_four_waiting_plus_running_is_chosen(counts: dict[int, tuple[int, int]]) -> None:
    balancer = balancer_of(*counts)
    balancer.observe(report(counts))
    scores = {rank: 4 * waiting + running for rank, (waiting, running) in counts.items()}
    assert {rank: balancer.score(rank) for rank in counts} == scores
    assert balancer.pick() == scan(scores, 0)


@given(st.integers(1, 64), st.integers(0, 1 << 32), st.integers(1, 300))
def test_a_burst_spreads_evenly_before_anybody_has_reported(size: int, start: int, count: int) -> None:
    chosen = send(balancer_of(*range(size), start=start), count)
    per_rank = [chosen.count(rank) for rank in range(size)]
    assert max(per_rank) - min(per_rank) <= 1
    assert chosen[0] == start % size


def test_idle_ranks_take_turns() -> None:
    balancer = balancer_of(*range(3))
    chosen = []
    for _ in range(6):
        chosen += send(balancer, 1)
        balancer.end(chosen[-1], begun=False)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_clients_that_start_elsewhere_choose_different_idle_ranks() -> None:
    assert {send(balancer_of(*range(8), start=start), 1)[0] for start in range(8)} == set(range(8))


@pytest.mark.parametrize("reported", [0, 1, 2])
def test_own_requests_count_once_whether_a_report_has_them_or_not(reported: int) -> None:
    balancer = balancer_of(0, 1)
    for _ in range(8):
        balancer.add(1)
        balancer.begin(1)
    assert send(balancer, 2) == [0, 0]
    balancer.observe(report({0: (reported, 0), 1: (0, 8)}))
    assert (balancer.score(0), balancer.score(1)) == (8, 8)
    # In its first step a request is reported as running before its output is here.
    balancer.observe(report({0: (0, 2), 1: (0, 8)}))
    assert balancer.score(0) == 8
    balancer.begin(0)
    balancer.begin(0)
    assert balancer.score(0) == 2


def test_requests_of_others_are_what_a_report_has_beyond_ones_own() -> None:
    balancer = balancer_of(0)
    balancer.add(0)
    balancer.begin(0)
    balancer.add(0)
    balancer.observe(report({0: (3, 4)}))
    # Of seven two are its own, one of which waits.
    assert balancer.score(0) == 4 * 3 + 4
    balancer.end(0, begun=True)
    balancer.end(0, begun=False)
    assert balancer.score(0) == 4 * 2 + 3
    balancer.observe(report({0: (0, 0)}))
    assert balancer.score(0) == 0


def test_a_client_among_many_looks_at_some_ranks_and_all_of_them_together_at_all() -> None:
    counts = {rank: (0, 0 if rank == 17 else 20) for rank in range(32)}
    chosen = []
    for client in range(200):
        balancer = balancer_of(*range(32), start=client)
        balancer.add(client % 32)
        balancer.begin(client % 32)
        # For one request of its own there are some 620 of others: it looks at two ranks.
        balancer.observe(report(counts))
        chosen += send(balancer, 1)
    assert 2 <= chosen.count(17) <= 40
    assert len(set(chosen)) > 25
    alone = balancer_of(*range(32))
    for rank, (_, running) in counts.items():
        for _ in range(running):
            alone.add(rank)
            alone.begin(rank)
    alone.observe(report(counts))
    assert set(send(alone, 5)) == {17}


def test_a_preferred_rank_is_taken_until_it_is_crowded() -> None:
    balancer = balancer_of(0, 1)
    chosen = []
    for _ in range(40):
        chosen.append(balancer.pick(preferred=0))
        balancer.add(chosen[-1])
        scores = [balancer.score(rank) for rank in (0, 1)]
        # It was not crowded before this request, which counts 4.
        assert scores[0] <= CROWDING_FACTOR * scores[1] + CROWDING_ALLOWANCE + 4
    assert chosen[:4] == [0] * 4
    assert 1 in chosen
    assert chosen.count(0) > chosen.count(1)
    assert balancer.pick(preferred=7) in (0, 1)


def test_a_rank_that_sleeps_or_is_paused_gets_nothing_while_others_are_awake() -> None:
    balancer = balancer_of(0, 1, 2)
    stats = report({0: (0, 0), 1: (0, 9), 2: (0, 0)})
    stats.engines[0].sleep_level, stats.engines[2].is_paused = 1, True
    balancer.observe(stats)
    assert set(send(balancer, 5)) == {1}
    stats.engines[1].is_paused = True
    balancer.observe(stats)
    assert set(send(balancer, 2)) == {0, 2}


def test_ranks_that_stay_keep_their_counts_when_others_come_and_go() -> None:
    balancer = balancer_of(0, 1, 2)
    for rank in (1, 2, 2, 2):
        balancer.add(rank)
    balancer.set_ranks([2, 0])
    assert list(balancer.ranks) == [0, 2]
    assert (balancer.score(0), balancer.score(2)) == (0, 12)
    balancer.end(1, begun=False)
    balancer.set_ranks([0, 1, 2])
    assert balancer.score(1) == 0


class Balancing(RuleBasedStateMachine):
    """Some clients, true counts, and reports that are made before or after the latest requests have arrived."""

    @initialize(size=st.integers(1, 5), clients=st.integers(1, 3))
    def begin(self, size: int, clients: int) -> None:
        self.size = size
        self.clients = [balancer_of(*range(size), start=number) for number in range(clients)]
        self.requests: list[Sent] = []

    @rule(number=st.integers(0, 2), rank=st.none() | st.integers(0, 4))
    def send(self, number: int, rank: int | None) -> None:
        client = number % len(self.clients)
        chosen = self.clients[client].pick() if rank is None else rank % self.size
        self.clients[client].add(chosen)
        self.requests.append(Sent(client, chosen))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def output(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.begun:
            request.begun = request.arrived = True
            self.clients[request.client].begin(request.rank)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.clients[request.client].end(request.rank, begun=request.begun)

    @rule()
    def arrive(self) -> None:
        for request in self.requests:
            request.arrived = True

    @rule()
    def report(self) -> None:
        here = {rank: [r for r in self.requests if r.rank == rank and r.arrived] for rank in range(self.size)}
        counts = {
            rank: (sum(not r.begun for r in found), sum(r.begun for r in found))
            for rank, found in here.items()
        }
        for number, client in enumerate(self.clients):
            client.observe(report(counts))
            for rank in range(self.size):
                on_the_way = [r for r in self.requests if r.rank == rank and not r.arrived]
                if all(r.client != number for r in on_the_way):
                    # Nothing of its own is uncertain: it sees what the report says.
                    assert client.score(rank) == 4 * counts[rank][0] + counts[rank][1]

    @invariant()
    def own_requests_are_never_forgotten(self) -> None:
        for number, client in enumerate(getattr(self, "clients", ())):
            for rank in range(self.size):
                own = [r for r in self.requests if (r.client, r.rank) == (number, rank)]
                assert client.score(rank) >= sum(1 if r.begun else 4 for r in own)

    @invariant()
    def a_client_alone_knows_the_truth(self) -> None:
        if len(getattr(self, "clients", ())) == 1:
            for rank in range(self.size):
                truth = sum(1 if r.begun else 4 for r in self.requests if r.rank == rank)
                assert self.clients[0].score(rank) == truth


@dataclass
class Sent:
    client: int
    rank: int
    begun: bool = False
    arrived: bool = False


TestBalancing = Balancing.TestCase
TestBalancing.settings = settings(
    max_examples=amount(20, thorough=2000), stateful_step_count=30, deadline=None
)


@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("pace", [1.0, 0.3], ids=["in step", "each at its own pace"])
def test_the_busiest_of_four_ranks_has_at_most_a_quarter_more_work_than_the_mean(
    pace: float, seed: int
) -> None:
    """A simulation: 4 ranks of 16 places, 128 requests at any time, one in five is 5 times as long as the others.
    A rank takes its step with probability `pace`; reports come every 50 steps. Work is tokens still to come."""
    generator = random.Random(seed)
    balancer = balancer_of(*range(4))
    work: list[list[list[int]]] = [[] for _ in range(4)]
    ratios = []
    for step in range(2000):
        for _ in range(128 - sum(map(len, work))):
            rank = balancer.pick()
            balancer.add(rank)
            work[rank].append([100 if generator.random() < 0.2 else 20, 0])
        for rank, requests in enumerate(work):
            if generator.random() > pace:
                continue
            for request in requests[:16]:
                if not request[1]:
                    request[1] = 1
                    balancer.begin(rank)
                request[0] -= 1
                if not request[0]:
                    balancer.end(rank, begun=True)
            requests[:] = [request for request in requests if request[0]]
        if step % 50 == 0:
            balancer.observe(report({r: (max(0, len(q) - 16), min(16, len(q))) for r, q in enumerate(work)}))
        left = [sum(request[0] for request in requests) for requests in work]
        ratios.append(4 * max(left) / sum(left))
    assert statistics.median(ratios[500:]) < 1.25
