"""Which engine core a request goes to: decisions from statistics that are a fraction of a second old. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbengine.metrics.stats import EngineStats

WAITING_WEIGHT = 4
"""What a waiting request counts, a running one counting 1: a queue is worse than a full batch."""
MAX_SHARE = 64
"""The most requests of all clients that one of this client stands for."""
CROWDING_FACTOR = 1.5
CROWDING_ALLOWANCE = 4 * WAITING_WEIGHT
"""A rank is taken for what it has in its cache while its score is at most `CROWDING_FACTOR` times the least score plus
this much."""


class _Load:
    """What is known of one engine core."""

    __slots__ = ("epoch", "new", "old", "running", "seen", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.new = 0
        """Requests sent since the newest report, without output."""
        self.old = 0
        """Requests sent in the interval before, without output: the newest report may have been made without them."""
        self.epoch = 0
        """Number of reports."""
        self.seen: tuple[int, int, int, int] | None = None
        """(wave, step, waiting, running) of the newest report."""

    def score(self, share: int) -> int:
        return WAITING_WEIGHT * (self.waiting + share * (self.new + self.old)) + self.running

    def report(self, waiting: int, running: int) -> None:
        self.waiting, self.running = waiting, running
        self.old, self.new = self.new, 0
        self.epoch += 1

    def begin(self, epoch: int) -> None:
        """A request that was sent in `epoch` has its first output."""
        if not self._take_unreported(epoch):
            self.waiting = max(0, self.waiting - 1)
        self.running += 1

    def end(self, epoch: int, begun: bool) -> None:
        if begun:
            self.running = max(0, self.running - 1)
        elif not self._take_unreported(epoch):
            self.waiting = max(0, self.waiting - 1)

    def _take_unreported(self, epoch: int) -> bool:
        """Take off a request that is counted apart from the reports; False if it is in one."""
        age = self.epoch - epoch
        if age == 0 and self.new:
            self.new -= 1
        elif age == 1 and self.old:
            self.old -= 1
        else:
            return False
        return True


class LoadBalancer:
    """Finds the rank with the least `4 * waiting + running`, looking round from behind where it found the last one.

    The coordinator's statistics count all clients' requests. What this client has sent since they were made is added
    as waiting, so that a burst spreads before anybody has reported. A report says which step it is of, not which
    requests had reached the engine core by then: those sent in the last interval may be in it or not. They are
    counted until the second newer report of their rank, or until their first output, with which they run. For an
    interval a request may so be counted twice, and its rank look busier than it is; were it forgotten, the next burst
    would go to the same rank. What begins and ends between two reports moves the counts at once.

    Of several clients, each sees the same statistics and sends to the same idle rank. Therefore a request that is on
    its way counts as many times as there are requests of all clients to one of this client (`MAX_SHARE` at most).

    For one thread. The scores are in one list, so that the least of 64 is found by one pass in C.
    """

    def __init__(self, start: int = 0) -> None:
        """`start` is where the first look round begins; clients take different ones."""
        self._next = start
        self._ranks: list[int] = []
        self._loads: list[_Load] = []
        self._scores: list[int] = []
        self._index_of: dict[int, int] = {}
        self._num_in_flight = 0
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

    def observe(self, stats: EngineStats) -> None:
        """Take in the coordinator's newest statistics."""
        total = 0
        for engine in stats.engines:
            waiting, running = engine.num_waiting_reqs, engine.num_running_reqs
            total += waiting + running
            index = self._index_of.get(engine.engine_index)
            if index is None:
                continue
            load = self._loads[index]
            seen = (engine.current_wave, engine.step_counter, waiting, running)
            if seen != load.seen:
                load.seen = seen
                load.report(waiting, running)
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

    def add(self, rank: int) -> int:
        """Count a request that is sent to `rank`; returns what `begin` and `end` want to know about it."""
        self._num_in_flight += 1
        index = self._index_of.get(rank)
        if index is None:
            return 0
        load = self._loads[index]
        load.new += 1
        self._scores[index] = load.score(self._share)
        return load.epoch

    def begin(self, rank: int, epoch: int) -> None:
        """The request has its first output: it runs."""
        index = self._index_of.get(rank)
        if index is not None:
            self._loads[index].begin(epoch)
            self._scores[index] = self._loads[index].score(self._share)

    def end(self, rank: int, epoch: int, *, begun: bool) -> None:
        """The request is finished, aborted or lost; `begun`: it has had an output."""
        self._num_in_flight -= 1
        index = self._index_of.get(rank)
        if index is not None:
            self._loads[index].end(epoch, begun)
            self._scores[index] = self._loads[index].score(self._share)

    def _score_all(self) -> None:
        self._scores = [load.score(self._share) for load in self._loads]
