"""Which engine core a request goes to: decisions from statistics that are a fraction of a second old. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from nbengine.metrics.stats import EngineStats

WAITING_WEIGHT = 4
"""What a waiting request counts, a running one counting 1: a queue is worse than a full batch."""
HELD = 1 << 40
"""Added to the score of a rank that is paused or sleeps, so that it gets requests only if all do."""
FEWEST_LOOKED_AT = 2
"""Ranks that a client looks at, however many clients there are."""
CROWDING_FACTOR = 1.5
CROWDING_ALLOWANCE = 4 * WAITING_WEIGHT
"""A rank is taken for what it has in its cache while its score is at most `CROWDING_FACTOR` times the least score plus
this much."""


class _Load:
    """What is known of one engine core: this client's requests as they are, the others' as they were reported."""

    __slots__ = ("held", "others_running", "others_waiting", "own_running", "own_waiting")

    def __init__(self) -> None:
        self.own_waiting = 0
        """Requests without output, be they under way, queued or in their first step."""
        self.own_running = 0
        self.others_waiting = 0
        self.others_running = 0
        self.held = False
        """It is paused or sleeps: what is sent there waits for somebody."""

    @property
    def score(self) -> int:
        waiting, running = self.own_waiting + self.others_waiting, self.own_running + self.others_running
        return WAITING_WEIGHT * waiting + running + (HELD if self.held else 0)

    def forget_others(self) -> None:
        """The rank is gone."""
        self.others_waiting = self.others_running = 0
        self.held = False

    def report(self, waiting: int, running: int) -> None:
        others = max(0, waiting + running - self.own_waiting - self.own_running)
        self.others_waiting = min(others, max(0, waiting - self.own_waiting))
        self.others_running = others - self.others_waiting


class LoadBalancer:
    """Finds the rank with the least `4 * waiting + running`, looking round from behind where it found the last one.

    The coordinator's statistics count all clients' requests, as they were at the end of a step of each rank, up to
    `PUBLISH_INTERVAL` ago. This client's own are known better: it counts them itself, as waiting from when they are
    sent and as running from their first output, to their end. Of a report only what exceeds its own requests is taken,
    for the others'. So no request of its own is counted twice because a report has it already, nor forgotten because a
    report was made before it arrived: a burst spreads at once, and so does the next one. What was sent while a report
    was made is taken for part of it, and may hide as many requests of others until the next one.

    Several clients that see the same statistics would all send to the same idle ranks. Therefore each looks only at
    some of them, a row that begins at random for each request: one in as many as there are clients like it, which is
    how many requests there are in all for one of its own. Two at the least, as in M. Mitzenmacher, "The Power of Two
    Choices in Randomized Load Balancing", 2001. A client that is alone looks at all of them.

    A rank that is paused or sleeps while others do not (it has been started again, or could not be woken up) gets
    nothing.

    For one thread. The scores are in one list, so that the least of 64 is found in C.
    """

    def __init__(self, start: int = 0) -> None:
        """`start` is where the first look round begins, and what numbers are drawn; clients take different ones."""
        self._next = start
        self._draw = random.Random(start)
        self._ranks: list[int] = []
        self._loads: dict[int, _Load] = {}
        """By rank; of those that are gone, too, as long as they may still end requests."""
        self._scores: list[int] = []
        self._index_of: dict[int, int] = {}
        self._num_in_flight = 0
        self._num_looked_at = 0

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that requests may go to, in ascending order."""
        return self._ranks

    def score(self, rank: int) -> int:
        """How busy a rank seems; 0 is idle."""
        return self._scores[self._index_of[rank]]

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Balance between these ranks from now on; what is known of those that stay is kept."""
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
        """The rank for the next request: `preferred` unless it is gone or crowded, else the least busy one.

        There must be ranks. The request counts from `add` on.
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
        """A request has its first output: it runs."""
        self._change(rank, -1, 1)

    def end(self, rank: int, *, begun: bool) -> None:
        """A request is finished, aborted or lost; `begun`: it has had an output."""
        self._num_in_flight -= 1
        self._change(rank, -(not begun), -begun)

    def _change(self, rank: int, waiting: int, running: int) -> None:
        load = self._loads[rank]
        load.own_waiting += waiting
        load.own_running += running
        index = self._index_of.get(rank)
        if index is not None:
            self._scores[index] += WAITING_WEIGHT * waiting + running
