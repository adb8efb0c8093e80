"""Rules by which a client chooses an engine core for a request, all behind one interface.

Each client has a rule of its own and sees what a real client sees: the coordinator's snapshots, and the outputs of its
own requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from nbengine.client.load_balancer import LoadBalancer
from nbengine.metrics.stats import EngineStats


class Rule(Protocol):
    """One client's choice."""

    def observe(self, stats: EngineStats, now: float) -> None:
        """A snapshot has come."""

    def send(self, now: float) -> tuple[int, int]:
        """Choose a rank for the next request and count it there; the second number is for `begin` and `end`."""

    def adopt(self, rank: int, now: float) -> int:
        """A request runs at a rank already, as if it had been sent there; returns what `end` wants to know."""

    def begin(self, rank: int, ticket: int) -> None:
        """A request has had its first output."""

    def end(self, rank: int, ticket: int) -> None:
        """A request has ended."""


class Ours:
    """`LoadBalancer`, as `DPLBAsyncMPClient` uses it."""

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        self.balancer = LoadBalancer(start=client * num_ranks // num_clients)
        self.balancer.set_ranks(range(num_ranks))

    def observe(self, stats: EngineStats, now: float) -> None:
        self.balancer.observe(stats, now)

    def send(self, now: float) -> tuple[int, int]:
        rank = self.choose()
        return rank, self.balancer.add(rank, now)

    def choose(self) -> int:
        return self.balancer.pick()

    def adopt(self, rank: int, now: float) -> int:
        ticket = self.balancer.add(rank, now)
        self.balancer.begin(rank, ticket)
        return ticket

    def begin(self, rank: int, ticket: int) -> None:
        self.balancer.begin(rank, ticket)

    def end(self, rank: int, ticket: int) -> None:
        self.balancer.end(rank, ticket, begun=True)


class TwoChoices(Ours):
    """The less busy one of two ranks drawn at random (Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", 2001), by the scores of `LoadBalancer`."""

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        super().__init__(num_ranks, num_clients, client, rng)
        self._rng = rng
        self._num_ranks = num_ranks

    def choose(self) -> int:
        first = self._rng.randrange(self._num_ranks)
        second = self._rng.randrange(self._num_ranks)
        return min(first, second, key=self.balancer.score)


class Sample(Ours):
    """The least busy one of some ranks drawn at random, as many as there are for each client, two at least: all of them
    for one client. So no two clients look at the same ranks, and together they look at all.

    How many clients there are is estimated from the requests of all to one's own.
    """

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        super().__init__(num_ranks, num_clients, client, rng)
        self._rng = rng
        self._size = self._num_ranks = num_ranks
        self._num_in_flight = 0

    def observe(self, stats: EngineStats, now: float) -> None:
        super().observe(stats, now)
        total = sum(engine.num_waiting_reqs + engine.num_running_reqs for engine in stats.engines)
        clients = max(1.0, total / max(1, self._num_in_flight))
        self._size = max(2, round(self._num_ranks / clients))

    def choose(self) -> int:
        if self._size >= self._num_ranks:
            return self.balancer.pick()
        return min(self._rng.sample(range(self._num_ranks), self._size), key=self.balancer.score)

    def send(self, now: float) -> tuple[int, int]:
        self._num_in_flight += 1
        return super().send(now)

    def adopt(self, rank: int, now: float) -> int:
        self._num_in_flight += 1
        return super().adopt(rank, now)

    def end(self, rank: int, ticket: int) -> None:
        self._num_in_flight -= 1
        super().end(rank, ticket)


class LeastScore:
    """The least `4 * waiting + running`, looked for from the same place each time; a request adds `increment` to what
    is waiting there until the next snapshot."""

    def __init__(self, increment: int, num_ranks: int, start: int) -> None:
        self._increment = increment
        self._start = start
        self._scores = [0] * num_ranks

    def observe(self, stats: EngineStats, now: float) -> None:
        for engine in stats.engines:
            self._scores[engine.engine_index] = 4 * engine.num_waiting_reqs + engine.num_running_reqs

    def send(self, now: float) -> tuple[int, int]:
        least = min(self._scores)
        try:
            rank = self._scores.index(least, self._start)
        except ValueError:
            rank = self._scores.index(least)
        self._scores[rank] += 4 * self._increment
        return rank, 0

    def adopt(self, rank: int, now: float) -> int:
        return 0

    def begin(self, rank: int, ticket: int) -> None:
        """Nothing is known of single requests."""

    def end(self, rank: int, ticket: int) -> None:
        """Nothing is known of single requests."""


class Blind:
    """Looks at nothing: at random, or one after another."""

    def __init__(self, num_ranks: int, rng: random.Random | None, start: int = 0) -> None:
        self._num_ranks = num_ranks
        self._rng = rng
        self._next = start

    def observe(self, stats: EngineStats, now: float) -> None:
        """Not looked at."""

    def send(self, now: float) -> tuple[int, int]:
        if self._rng is not None:
            return self._rng.randrange(self._num_ranks), 0
        self._next = (self._next + 1) % self._num_ranks
        return self._next, 0

    def adopt(self, rank: int, now: float) -> int:
        return 0

    def begin(self, rank: int, ticket: int) -> None:
        """Not looked at."""

    def end(self, rank: int, ticket: int) -> None:
        """Not looked at."""


MakeRule = Callable[[int, int, int, random.Random], Rule]
"""From the number of ranks, of clients, the client's own number, and random numbers."""

CENTRAL = "one queue for all"
RULES: dict[str, MakeRule] = {
    "ours": Ours,
    "sample": Sample,
    "two choices": TwoChoices,
    "snapshot alone": lambda ranks, clients, client, rng: LeastScore(0, ranks, client * ranks // clients),
    "snapshot + own": lambda ranks, clients, client, rng: LeastScore(1, ranks, client * ranks // clients),
    "snapshot + own × clients": lambda ranks, clients, client, rng: LeastScore(
        clients, ranks, client * ranks // clients
    ),
    "round robin": lambda ranks, clients, client, rng: Blind(ranks, None, client * ranks // clients),
    "random": lambda ranks, clients, client, rng: Blind(ranks, rng),
}
"""By the names that tables and plots have; `CENTRAL` is none of them: no client can do that."""
