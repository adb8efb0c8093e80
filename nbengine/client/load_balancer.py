"""Which engine core a request goes to: decisions from statistics that are a fraction of a second old. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbengine.metrics.stats import EngineStats

WAITING_WEIGHT = 4
"""What a waiting request counts, a running one counting 1: a queue is worse than a full batch."""
MAX_SHARE = 64
"""The most requests of all clients that one of this client stands for."""
LATENCY = 0.01
"""Seconds that a request and a report may be under way."""
LONGEST_STEP = 0.5
"""Seconds; longer ones are not told from pauses."""
HELD = 1 << 40
"""Added to the score of a rank that is paused or sleeps, so that it gets requests only if all do."""
CROWDING_FACTOR = 1.5
CROWDING_ALLOWANCE = 4 * WAITING_WEIGHT
"""A rank is taken for what it has in its cache while its score is at most `CROWDING_FACTOR` times the least score plus
this much."""


class _Load:
    """What is known of one engine core."""

    __slots__ = ("held", "reported_at", "running", "seen", "step_seconds", "unreported", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.held = False
        """It is paused or sleeps: what is sent there waits for somebody."""
        self.unreported: dict[int, float] = {}
        """When requests were sent that have no output and that the newest report may have been made without."""
        self.seen: tuple[int, int, int, int] | None = None
        """(wave, step, waiting, running) of the newest report."""
        self.reported_at = 0.0
        self.step_seconds = 0.0

    def score(self, share: int) -> int:
        score = WAITING_WEIGHT * (self.waiting + share * len(self.unreported)) + self.running
        return score + HELD if self.held else score

    def report(self, seen: tuple[int, int, int, int], now: float) -> None:
        if self.seen is not None and seen[1] > self.seen[1]:
            self.step_seconds = min((now - self.reported_at) / (seen[1] - self.seen[1]), LONGEST_STEP)
        self.seen, self.reported_at = seen, now
        _, _, self.waiting, self.running = seen
        # Made at the end of a step, which began with what had arrived by then.
        certain = now - LATENCY - 2 * self.step_seconds
        reported = []
        for ticket, sent_at in self.unreported.items():
            if sent_at >= certain:
                break
            reported.append(ticket)
        for ticket in reported:
            del self.unreported[ticket]

    def begin(self, ticket: int) -> None:
        if self.unreported.pop(ticket, None) is None:
            self.waiting = max(0, self.waiting - 1)
        self.running += 1

    def end(self, ticket: int, begun: bool) -> None:
        if begun:
            self.running = max(0, self.running - 1)
        elif self.unreported.pop(ticket, None) is None:
            self.waiting = max(0, self.waiting - 1)


class LoadBalancer:
    """Finds the rank with the least `4 * waiting + running`, looking round from behind where it found the last one.

    The coordinator's statistics count all clients' requests. What this client has sent since they were made is added
    as waiting, so that a burst spreads before anybody has reported. A report does not say which requests had reached
    the engine core when it was made. Those sent within the last two steps (their length is measured) may be in it or
    not; they are counted apart until a later report, or until their first output, with which they run. One of them may
    so be counted twice for an interval, and its rank look busier than it is; were it forgotten, the next burst would go
    to the same rank. What begins and ends between two reports moves the counts at once.

    Of several clients, each sees the same statistics and sends to the same idle rank. Therefore a request that is on
    its way counts as many times as there are requests of all clients to one of this client (`MAX_SHARE` at most).

    A rank that is paused or sleeps while others are not (it has been started again, or could not be woken up) gets
    nothing.

    Times are seconds of any monotonic clock. For one thread. The scores are in one list, so that the least of 64 is
    found by one pass in C.
    """

    def __init__(self, start: int = 0) -> None:
        """`start` is where the first look round begins; clients take different ones."""
        self._next = start
        self._ranks: list[int] = []
        self._loads: list[_Load] = []
        self._scores: list[int] = []
        self._index_of: dict[int, int] = {}
        self._num_in_flight = 0
        self._num_tickets = 0
        self._share = 1

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that requests may go to, in ascending order."""
        return self._ranks

    def score(self, rank: int) -> int:
        """How busy a rank seems; 0 is idle."""
        return self._scores[self._index_of[rank]]

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Balance between these ranks from now on; what is known of those that stay is kept."""
        known = dict(zip(self._ranks, self._loads, strict=True))
        self._ranks = sorted(ranks)
        self._index_of = {rank: index for index, rank in enumerate(self._ranks)}
        self._loads = [known.get(rank) or _Load() for rank in self._ranks]
        self._next %= max(1, len(self._ranks))
        self._score_all()

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take in the coordinator's newest statistics, which have come at `now`."""
        total = 0
        for engine in stats.engines:
            waiting, running = engine.num_waiting_reqs, engine.num_running_reqs
            total += waiting + running
            index = self._index_of.get(engine.engine_index)
            if index is None:
                continue
            load = self._loads[index]
            load.held = engine.is_paused or engine.is_sleeping
            seen = (engine.current_wave, engine.step_counter, waiting, running)
            if seen != load.seen:
                load.report(seen, now)
        share = round(total / self._num_in_flight) if self._num_in_flight else 1
        self._share = min(max(share, 1), MAX_SHARE)
        self._score_all()

    def pick(self, preferred: int | None = None) -> int:
        """The rank for the next request: `preferred` unless it is gone or crowded, else the least busy one.

        There must be ranks. The request counts from `add` on.
        """
        scores = self._scores
        least = min(scores)
        if preferred is not None:
            index = self._index_of.get(preferred)
            if index is not None and scores[index] <= CROWDING_FACTOR * least + CROWDING_ALLOWANCE:
                return preferred
        try:
            index = scores.index(least, self._next)
        except ValueError:
            index = scores.index(least)
        self._next = index + 1
        return self._ranks[index]

    def add(self, rank: int, now: float) -> int:
        """Count a request that is sent to `rank`; returns the ticket that `begin` and `end` want."""
        self._num_in_flight += 1
        self._num_tickets += 1
        index = self._index_of.get(rank)
        if index is not None:
            self._loads[index].unreported[self._num_tickets] = now
            self._scores[index] = self._loads[index].score(self._share)
        return self._num_tickets

    def begin(self, rank: int, ticket: int) -> None:
        """A request has its first output: it runs."""
        index = self._index_of.get(rank)
        if index is not None:
            self._loads[index].begin(ticket)
            self._scores[index] = self._loads[index].score(self._share)

    def end(self, rank: int, ticket: int, *, begun: bool) -> None:
        """A request is finished, aborted or lost; `begun`: it has had an output."""
        self._num_in_flight -= 1
        index = self._index_of.get(rank)
        if index is not None:
            self._loads[index].end(ticket, begun)
            self._scores[index] = self._loads[index].score(self._share)

    def _score_all(self) -> None:
        self._scores = [load.score(self._share) for load in self._loads]
