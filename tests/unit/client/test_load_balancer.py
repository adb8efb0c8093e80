"""The balancer against a linear scan over counts that are kept one request at a time."""

from __future__ import annotations

import random
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.client.load_balancer import CROWDING_ALLOWANCE, CROWDING_FACTOR, MAX_SHARE, LoadBalancer
from nbengine.metrics.stats import EngineStats, SchedulerStats


def report(counts: dict[int, tuple[int, int]], step: int, wave: int = 0) -> EngineStats:
    engines = [
        SchedulerStats(
            engine_index=rank,
            num_waiting_reqs=waiting,
            num_running_reqs=running,
            step_counter=step,
            current_wave=wave,
        )
        for rank, (waiting, running) in counts.items()
    ]
    return EngineStats(engines=engines)


def balancer_of(*ranks: int, start: int = 0) -> LoadBalancer:
    balancer = LoadBalancer(start)
    balancer.set_ranks(ranks)
    return balancer


def send(balancer: LoadBalancer, count: int, now: float = 0.0) -> list[int]:
    chosen = []
    for _ in range(count):
        chosen.append(balancer.pick())
        balancer.add(chosen[-1], now)
    return chosen


def scan(scores: dict[int, int], start: int) -> int:
    """The rule in its plainest form: the first of the least, from `start` on and round."""
    ranks = sorted(scores)
    order = [*ranks[start:], *ranks[:start]]
    return min(order, key=scores.__getitem__)


@given(st.dictionaries(st.integers(0, 63), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_least_four_waiting_plus_running_is_chosen(counts: dict[int, tuple[int, int]]) -> None:
    balancer = balancer_of(*counts)
    balancer.observe(report(counts, step=1), 1.0)
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
        balancer.end(chosen[-1], len(chosen), begun=False)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_clients_that_start_elsewhere_choose_different_idle_ranks() -> None:
    assert {send(balancer_of(*range(8), start=start), 1)[0] for start in range(8)} == set(range(8))


def test_what_was_sent_while_a_report_was_made_is_not_forgotten_with_it() -> None:
    balancer = balancer_of(0, 1)
    for _ in range(8):
        balancer.begin(1, balancer.add(1, 0.0))
    # Ten steps a tenth of a second.
    for step in (1, 11):
        balancer.observe(report({0: (0, 0), 1: (0, 8)}, step), now=step / 100)
    assert send(balancer, 2, now=0.2) == [0, 0]
    # This report was made before the two arrived: the next burst must not go to rank 0 as if it were idle.
    balancer.observe(report({0: (0, 0), 1: (0, 8)}, step=21), now=0.21)
    assert balancer.score(0) == 8
    # The next one has them, and they count once.
    balancer.observe(report({0: (1, 1), 1: (0, 8)}, step=31), now=0.31)
    assert balancer.score(0) == 5


def test_what_was_sent_well_before_a_report_counts_once() -> None:
    balancer = balancer_of(0)
    balancer.observe(report({0: (0, 0)}, step=1), now=0.0)
    send(balancer, 3, now=0.01)
    balancer.observe(report({0: (3, 0)}, step=11), now=0.1)
    assert balancer.score(0) == 12


def test_while_a_step_takes_long_a_repeated_report_says_nothing_new() -> None:
    balancer = balancer_of(0)
    balancer.observe(report({0: (0, 0)}, step=5), now=0.0)
    balancer.add(0, 1.0)
    for now in (2.0, 3.0):
        balancer.observe(report({0: (0, 0)}, step=5), now)
    assert balancer.score(0) == 4


def test_outputs_and_ends_move_the_counts_between_reports() -> None:
    balancer = balancer_of(0)
    first, second = balancer.add(0, 0.0), balancer.add(0, 0.0)
    assert balancer.score(0) == 8
    balancer.begin(0, first)
    assert balancer.score(0) == 5
    balancer.end(0, first, begun=True)
    balancer.end(0, second, begun=False)
    assert balancer.score(0) == 0
    old = balancer.add(0, 0.0)
    balancer.observe(report({0: (1, 0)}, step=1), now=9.0)
    assert balancer.score(0) == 4
    balancer.begin(0, old)
    assert balancer.score(0) == 1
    balancer.end(0, old, begun=True)
    assert balancer.score(0) == 0


def test_a_request_of_a_client_among_many_stands_for_theirs() -> None:
    balancer = balancer_of(0, 1)
    balancer.begin(0, balancer.add(0, 0.0))
    balancer.observe(report({0: (0, 20), 1: (0, 20)}, step=1), now=1.0)
    balancer.add(1, 1.0)
    assert balancer.score(1) == 20 + 4 * 40
    balancer.observe(report({0: (0, 1 << 20), 1: (0, 20)}, step=2), now=1.001)
    assert balancer.score(1) == 20 + 4 * MAX_SHARE


def test_a_preferred_rank_is_taken_until_it_is_crowded() -> None:
    balancer = balancer_of(0, 1)
    chosen = []
    for _ in range(40):
        chosen.append(balancer.pick(preferred=0))
        balancer.add(chosen[-1], 0.0)
        scores = [balancer.score(rank) for rank in (0, 1)]
        # It was not crowded before this request, which counts 4.
        assert scores[0] <= CROWDING_FACTOR * scores[1] + CROWDING_ALLOWANCE + 4
    assert chosen[:4] == [0] * 4
    assert 1 in chosen
    assert chosen.count(0) > chosen.count(1)
    assert balancer.pick(preferred=7) in (0, 1)


def test_a_rank_that_sleeps_or_is_paused_gets_nothing_while_others_are_awake() -> None:
    balancer = balancer_of(0, 1, 2)
    stats = report({0: (0, 0), 1: (0, 9), 2: (0, 0)}, step=1)
    stats.engines[0].sleep_level, stats.engines[2].is_paused = 1, True
    balancer.observe(stats, 0.0)
    assert set(send(balancer, 5)) == {1}
    stats.engines[1].is_paused = True
    balancer.observe(stats, 0.0)
    assert set(send(balancer, 2)) == {0, 2}


def test_ranks_that_stay_keep_their_counts_when_others_come_and_go() -> None:
    balancer = balancer_of(0, 1, 2)
    lost = balancer.add(1, 0.0)
    for _ in range(3):
        balancer.add(2, 0.0)
    balancer.set_ranks([2, 0])
    assert list(balancer.ranks) == [0, 2]
    assert (balancer.score(0), balancer.score(2)) == (0, 12)
    balancer.end(1, lost, begun=False)
    balancer.set_ranks([0, 1, 2])
    assert balancer.score(1) == 0


class Balancing(RuleBasedStateMachine):
    """One client's requests, and reports that are made before or after the latest of them have arrived."""

    @initialize(size=st.integers(1, 6), start=st.integers(0, 100))
    def begin(self, size: int, start: int) -> None:
        self.size = size
        self.balancer = balancer_of(*range(size), start=start)
        self.interval = 1
        for interval in (0, 1):
            idle = dict.fromkeys(range(size), (0, 0))
            self.balancer.observe(report(idle, 10 * interval), float(interval))
        self.requests: list[list[int]] = []
        """[rank, ticket, begun, interval]"""

    @rule(rank=st.integers(0, 5) | st.none())
    def send(self, rank: int | None) -> None:
        if rank is None:
            rank = self.balancer.pick()
            least = min(self.balancer.score(other) for other in range(self.size))
            assert self.balancer.score(rank) == least
        rank %= self.size
        self.requests.append([rank, self.balancer.add(rank, self.now), 0, self.interval])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def output(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request[2]:
            request[2] = 1
            self.balancer.begin(request[0], request[1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.balancer.end(request[0], request[1], begun=bool(request[2]))

    @property
    def now(self) -> float:
        return self.interval + 0.95

    @rule(late=st.booleans())
    def report(self, late: bool) -> None:
        """At the end of an interval of ten steps: the true counts, with (`late`) or without what was sent shortly before."""
        counts = {}
        for rank in range(self.size):
            known = [r for r in self.requests if r[0] == rank and (late or r[2] or r[3] < self.interval)]
            begun = sum(request[2] for request in known)
            counts[rank] = (len(known) - begun, begun)
        self.interval += 1
        self.balancer.observe(report(counts, 10 * self.interval), float(self.interval))
        for rank in range(self.size):
            new = sum(r[0] == rank and not r[2] and r[3] == self.interval - 1 for r in self.requests)
            expected = 4 * (counts[rank][0] + new) + counts[rank][1]
            assert self.balancer.score(rank) == expected

    @invariant()
    def no_request_is_forgotten(self) -> None:
        if not hasattr(self, "requests"):
            return
        for rank in range(self.size):
            waiting = sum(own == rank and not begun for own, _, begun, _ in self.requests)
            assert self.balancer.score(rank) >= 4 * waiting


TestBalancing = Balancing.TestCase
TestBalancing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_skewed_lengths_are_balanced_by_what_is_outstanding() -> None:
    """A simulation: 4 ranks of 16 places, 128 requests at any time, one in five is 5 times as long as the others;
    steps take 2 ms, reports come every 50. Work is tokens still to come."""
    generator = random.Random(3)
    balancer = balancer_of(*range(4))
    work: list[list[list[int]]] = [[] for _ in range(4)]
    ratios = []
    for step in range(2000):
        for _ in range(128 - sum(map(len, work))):
            rank = balancer.pick()
            length = 100 if generator.random() < 0.2 else 20
            work[rank].append([length, balancer.add(rank, step * 0.002), 0])
        for rank, requests in enumerate(work):
            for request in requests[:16]:
                if not request[2]:
                    request[2] = 1
                    balancer.begin(rank, request[1])
                request[0] -= 1
                if not request[0]:
                    balancer.end(rank, request[1], begun=True)
            requests[:] = [request for request in requests if request[0]]
        if step % 50 == 0:
            counts = {r: (max(0, len(q) - 16), min(16, len(q))) for r, q in enumerate(work)}
            balancer.observe(report(counts, step + 1), step * 0.002)
        left = [sum(request[0] for request in requests) for requests in work]
        ratios.append(4 * max(left) / sum(left))
    assert statistics.median(ratios[500:]) < 1.3
