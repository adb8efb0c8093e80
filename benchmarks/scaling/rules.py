"""The rules with which a client chooses an engine core for a request, all behind one interface.

Each client has its own rule and sees what a real client sees: the coordinator's snapshots, and the outputs of
its
own requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from nbengine.client.routing.load_balancer import LoadBalancer
from nbengine.metrics.stats import EngineStats


class Rule(Protocol):
    """The rule of one client."""

    def observe(self, stats: EngineStats) -> None:
        """Take in a snapshot."""

    def send(self) -> int:
        """Choose a rank for the next request and count it there."""

    def adopt(self, rank: int) -> None:
        """Count a request that runs at a rank already, as if it had been sent there."""

    def begin(self, rank: int) -> None:
        """Note that a request has had its first output."""

    def end(self, rank: int) -> None:
        """Note that a request has ended."""


class Ours:
    """The rule of `LoadBalancer`, as `DPLBAsyncMPClient` uses it."""

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        self.balancer = LoadBalancer(start=client * num_ranks // num_clients)
        self.balancer.set_ranks(range(num_ranks))

    def observe(self, stats: EngineStats) -> None:
        self.balancer.observe(stats)

    def send(self) -> int:
        rank = self.choose()
        self.balancer.add(rank)
        return rank

    def choose(self) -> int:
        return self.balancer.pick()

    def adopt(self, rank: int) -> None:
        self.balancer.add(rank)
        self.balancer.begin(rank)

    def begin(self, rank: int) -> None:
        self.balancer.begin(rank)

    def end(self, rank: int) -> None:
        self.balancer.end(rank, begun=True)


class TwoChoices(Ours):
    """The rule that takes the less busy one of two ranks drawn at random (Mitzenmacher, "The Power of Two
    Choices in Randomized Load Balancing", 2001), by the scores of `LoadBalancer`."""

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        super().__init__(num_ranks, num_clients, client, rng)
        self._rng = rng
        self._num_ranks = num_ranks

    def choose(self) -> int:
        first = self._rng.randrange(self._num_ranks)
        second = self._rng.randrange(self._num_ranks)
        return min(first, second, key=self.balancer.score)


class AllRanks(Ours):
    """The rule that takes the least busy one of all ranks, by the scores of `LoadBalancer`: each of several
    clients does what `LoadBalancer` does with one client."""

    def __init__(self, num_ranks: int, num_clients: int, client: int, rng: random.Random) -> None:
        super().__init__(num_ranks, num_clients, client, rng)
        self._num_ranks = num_ranks
        self._next = client * num_ranks // num_clients

    def choose(self) -> int:
        order = [*range(self._next, self._num_ranks), *range(self._next)]
        chosen = min(order, key=self.balancer.score)
        self._next = (chosen + 1) % self._num_ranks
        return chosen


class LeastScore:
    """The rule that takes the least `4 * waiting + running`, looked for from the same place each time; a
    request adds `increment` to what is waiting there until the next snapshot."""

    def __init__(self, increment: int, num_ranks: int, start: int) -> None:
        self._increment = increment
        self._start = start
        self._scores = [0] * num_ranks

    def observe(self, stats: EngineStats) -> None:
        for engine in stats.engines:
            self._scores[engine.engine_index] = 4 * engine.num_waiting_reqs + engine.num_running_reqs

    def send(self) -> int:
        least = min(self._scores)
        try:
            rank = self._scores.index(least, self._start)
        except ValueError:
            rank = self._scores.index(least)
        self._scores[rank] += 4 * self._increment
        return rank

    def adopt(self, rank: int) -> None:
        """Do nothing: the rule knows nothing of single requests."""

    def begin(self, rank: int) -> None:
        """Do nothing: the rule knows nothing of single requests."""

    def end(self, rank: int) -> None:
        """Do nothing: the rule knows nothing of single requests."""


class Blind:
    """The rule that looks at nothing: it chooses at random, or one rank after another."""

    def __init__(self, num_ranks: int, rng: random.Random | None, start: int = 0) -> None:
        self._num_ranks = num_ranks
        self._rng = rng
        self._next = start

    def observe(self, stats: EngineStats) -> None:
        """Do nothing: the rule does not look at it."""

    def send(self) -> int:
        if self._rng is not None:
            return self._rng.randrange(self._num_ranks)
        self._next = (self._next + 1) % self._num_ranks
        return self._next

    def adopt(self, rank: int) -> None:
        """Do nothing: the rule knows nothing of single requests."""

    def begin(self, rank: int) -> None:
        """Do nothing: the rule does not look at it."""

    def end(self, rank: int) -> None:
        """Do nothing: the rule does not look at it."""


MakeRule = Callable[[int, int, int, random.Random], Rule]
"""A function that makes a rule from the number of ranks, of clients, the client's own number, and random
numbers."""

CENTRAL = "one queue for all"
RULES: dict[str, MakeRule] = {
    "ours": Ours,
    "all ranks": AllRanks,
    "two choices": TwoChoices,
    "snapshot alone": lambda ranks, clients, client, rng: LeastScore(0, ranks, client * ranks // clients),
    "snapshot + own": lambda ranks, clients, client, rng: LeastScore(1, ranks, client * ranks // clients),
    "snapshot + own × clients": lambda ranks, clients, client, rng: LeastScore(
        clients, ranks, client * ranks // clients
    ),
    "round robin": lambda ranks, clients, client, rng: Blind(ranks, None, client * ranks // clients),
    "random": lambda ranks, clients, client, rng: Blind(ranks, rng),
}
"""The rules by the names that tables and plots have; `CENTRAL` is none of them: no client can do that."""
