"""The choice of an engine core for a request, from statistics that are a fraction of a second old.

It does no I/O.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from nbengine.metrics.stats import EngineStats

WAITING_WEIGHT = 4
"""The weight of a waiting request, a running one having 1: a queue is worse than a full batch."""
HELD = 1 << 40
"""A number added to the score of a rank that is paused or sleeps,
so that it gets requests only if all ranks are."""
FEWEST_LOOKED_AT = 2
"""Ranks that a client looks at in any case, however many clients the engine has."""
CROWDING_FACTOR = 1.5
CROWDING_ALLOWANCE = 4 * WAITING_WEIGHT
"""A rank is preferred for the content of its cache while its score is at most `CROWDING_FACTOR` times the
least score plus `CROWDING_ALLOWANCE`."""


class _Load:
    """The load of one engine core: this client's requests as they are,
    the other clients' as they were reported."""

    __slots__ = ("held", "others_running", "others_waiting", "own_running", "own_waiting")

    def __init__(self) -> None:
        self.own_waiting = 0
        """Requests without output: they are under way, queued or in their first step."""
        self.own_running = 0
        self.others_waiting = 0
        self.others_running = 0
        self.held = False
        """The core is paused or sleeps: requests to it wait until somebody resumes it."""

    @property
    def score(self) -> int:
        waiting, running = self.own_waiting + self.others_waiting, self.own_running + self.others_running
        return WAITING_WEIGHT * waiting + running + (HELD if self.held else 0)

    def forget_others(self) -> None:
        """Forget the other clients' requests: the rank is gone."""
        self.others_waiting = self.others_running = 0
        self.held = False

    def report(self, waiting: int, running: int) -> None:
        others = max(0, waiting + running - self.own_waiting - self.own_running)
        self.others_waiting = min(others, max(0, waiting - self.own_waiting))
        self.others_running = others - self.others_waiting


class LoadBalancer:
    """A search for the rank with the least `4 * waiting + running`, which begins behind the last rank found.

    The coordinator's statistics count all clients' requests, as they were at the end of a step of each rank,
    up to `PUBLISH_INTERVAL` ago. This client knows its own requests better: it counts them itself, as waiting
    when they are sent and as running from their first output to their end. Only the part of a report that
    exceeds its own requests counts, as those of others. So no request of its own is counted twice because a
    report has it already, nor forgotten because a report was made before it arrived: a burst spreads at once,
    and so does the next one. Requests that were sent while a report was made are taken for part of it, and
    may hide the same number of others' requests until the next one.

    Several clients that see the same statistics would all send to the same idle ranks. Therefore each looks
    only at some of them, a row that begins at random for each request. It looks at one rank in N, where N is
    the number of clients like it, estimated as all requests divided by its own. It looks at two at least, as
    in M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001. A client that is alone
    looks at all of them.

    A rank that is paused or sleeps while others do not (it has been started again, or could not be woken up)
    gets nothing.

    It is for one thread. The scores are in one list, so that the least of 64 is found in C.
    """

    def __init__(self, start: int = 0) -> None:
        """Balance between no ranks yet.

        `start` is the rank at which the first look begins, and the random seed.

        Clients take different values, so that they do not all choose the same ranks.
        """
        self._next = start
        self._draw = random.Random(start)
        self._ranks: list[int] = []
        self._loads: dict[int, _Load] = {}
        """The loads by rank, also of ranks that are gone, since requests of theirs may still end."""
        self._scores: list[int] = []
        self._index_of: dict[int, int] = {}
        self._num_in_flight = 0
        self._num_looked_at = 0

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks that requests may go to, in ascending order."""
        return self._ranks

    def score(self, rank: int) -> int:
        """Return how busy a rank seems; 0 is idle."""
        return self._scores[self._index_of[rank]]

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Balance between these ranks from now on; keep what is known of those that stay."""
        before, self._ranks = self._ranks, sorted(ranks)
        for rank in set(before).difference(self._ranks):
            self._loads[rank].forget_others()
        self._index_of = {rank: index for index, rank in enumerate(self._ranks)}
        self._scores = [self._loads.setdefault(rank, _Load()).score for rank in self._ranks]
        self._next %= max(1, len(self._ranks))
        self._num_looked_at = len(self._ranks)

    def observe(self, stats: EngineStats) -> None:
        """Take in the coordinator's newest statistics."""
        total = 0
        for engine in stats.engines:
            waiting, running = engine.num_waiting_reqs, engine.num_running_reqs
            total += waiting + running
            index = self._index_of.get(engine.engine_index)
            if index is not None:
                load = self._loads[engine.engine_index]
                load.held = engine.is_paused or engine.is_sleeping
                load.report(waiting, running)
                self._scores[index] = load.score
        own = self._num_in_flight
        clients = max(1, round(total / own)) if own else 1
        size = len(self._ranks)
        self._num_looked_at = min(size, max(FEWEST_LOOKED_AT, size // clients))

    def pick(self, preferred: int | None = None) -> int:
        """Choose the rank for the next request: `preferred` unless it is gone or crowded,
        else the least busy one.

        At least one rank must exist. The request counts from `add` on.
        """
        scores = self._scores
        if preferred is not None:
            index = self._index_of.get(preferred)
            if index is not None and scores[index] <= CROWDING_FACTOR * min(scores) + CROWDING_ALLOWANCE:
                return preferred
        size, count = len(scores), self._num_looked_at
        start = self._next if count >= size else int(self._draw.random() * size)
        looked_at = scores[start : start + count]
        if len(looked_at) < count:
            looked_at += scores[: start + count - size]
        index = (start + looked_at.index(min(looked_at))) % size
        self._next = (index + 1) % size
        return self._ranks[index]

    def add(self, rank: int) -> None:
        """Count a request that is sent to `rank`."""
        self._num_in_flight += 1
        self._change(rank, 1, 0)

    def begin(self, rank: int) -> None:
        """Count a request that has its first output as running."""
        self._change(rank, -1, 1)

    def end(self, rank: int, *, begun: bool) -> None:
        """Stop counting a request that is finished, aborted or lost; `begun`: it has had an output."""
        self._num_in_flight -= 1
        self._change(rank, -(not begun), -begun)

    def _change(self, rank: int, waiting: int, running: int) -> None:
        load = self._loads[rank]
        load.own_waiting += waiting
        load.own_running += running
        index = self._index_of.get(rank)
        if index is not None:
            self._scores[index] += WAITING_WEIGHT * waiting + running
