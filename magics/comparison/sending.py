"""The requests of a comparison, which are sent as their engines can take them; those that are lost are sent again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import EngineEndError, LeaseExpiredError, NBEngineError, RequestLostError
from nbengine.magics.comparison.arguments import RETRIES
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.generation.request import Request
from nbengine.magics.session import AttachedEngine

AHEAD = 2
"""Requests that are sent for each one that an engine computes at once: the next ones wait in the engine."""
LEAST_ROOM = 256
"""The least room of an engine: this number of requests costs nobody anything, and the engine shows that they wait."""
MOST_IN_A_STEP = 512
"""The most requests that are made between two looks at the answers."""


class Sender:
    """A sender of the requests by their positions; each is made when there is room for it.

    `prepare` makes the request of a position, and may raise. What it or the engine refuses is an error of that
    position alone. The end of an engine is an error of all its positions that have no answer.
    """

    def __init__(
        self,
        result: ComparisonResult,
        engines: Sequence[AttachedEngine],
        prepare: Callable[[int], Request],
        on_sent: Callable[[int, Request], None],
        *,
        foreground: bool,
        retries: int = RETRIES,
    ) -> None:
        """Make the sender of all positions of `result` that have no answer yet; `engines` has each one's."""
        self.open: dict[int, Request] = {}
        """The requests that have been sent and have not ended, by position."""
        self.num_retried = 0
        self._result = result
        self._prepare = prepare
        self._on_sent = on_sent
        self._foreground = foreground
        self._retries = retries
        self._names = [engine.name for engine in engines]
        self._waiting: dict[str, deque[int]] = {engine.name: deque() for engine in engines}
        self._room = {engine.name: room_of(engine) for engine in engines}
        self._num_open: Counter[str] = Counter()
        self._tries: Counter[int] = Counter()
        for position, found in enumerate(result):
            if not found.finished:
                self._waiting[self._names[position]].append(position)

    @property
    def num_waiting(self) -> int:
        """Count the positions whose request has not been sent."""
        return sum(map(len, self._waiting.values()))

    @property
    def engines_in_use(self) -> set[str]:
        """Name the engines that still have something to answer."""
        return {name for name, waiting in self._waiting.items() if waiting or self._num_open[name]}

    def fill(self, most: int | None = None) -> None:
        """Send what there is room for, at most `most` requests for each engine."""
        for name, waiting in self._waiting.items():
            sent = 0
            while waiting and self._num_open[name] < self._room[name] and (most is None or sent < most):
                self._send(waiting.popleft())
                sent += 1

    def _send(self, position: int) -> None:
        try:
            request = self._prepare(position)
        except (UsageError, NBEngineError) as error:
            self._refuse(position, error if isinstance(error, NBEngineError) else NBEngineError(str(error)))
            return
        self._result.results[position] = request.result
        self._on_sent(position, request)
        try:
            request.send(foreground=self._foreground)
        except NBEngineError as error:
            request.fail(error)
            self._refuse(position, error)
            return
        self.open[position] = request
        self._num_open[self._names[position]] += 1

    def ended(self, position: int) -> None:
        """Note that a request has ended with its answer."""
        del self.open[position]
        self._num_open[self._names[position]] -= 1

    def failed(self, position: int, error: NBEngineError) -> None:
        """Note that a request has ended with an error: it is sent again if its engine has only lost it."""
        request = self.open[position]
        request.fail(error)
        self.ended(position)
        is_lost = isinstance(error, RequestLostError)
        if is_lost and self._tries[position] < self._retries:
            self._tries[position] += 1
            self.num_retried += 1
            self._waiting[self._names[position]].appendleft(position)
            return
        self._refuse(position, error)

    def _refuse(self, position: int, error: NBEngineError) -> None:
        self._result.errors[position] = error
        self._result.results[position].abort("error")
        if isinstance(error, EngineEndError | LeaseExpiredError):
            waiting = self._waiting[self._names[position]]
            while waiting:
                other = waiting.popleft()
                self._result.errors[other] = error
                self._result.results[other].abort("error")

    def stop(self) -> None:
        """Send nothing more, and end what has not been sent."""
        for waiting in self._waiting.values():
            while waiting:
                self._result.results[waiting.popleft()].abort()

    def abandon(self) -> None:
        """End everything at once, before anybody has waited for it."""
        self.stop()
        for position, request in list(self.open.items()):
            request.abort()
            request.end(shown=request.stop())
            self.ended(position)


def room_of(engine: AttachedEngine) -> int:
    """Return the most requests of a comparison that an engine has at once."""
    config = engine.client.config
    at_once = config.scheduler.max_num_seqs * max(1, config.parallel.data_parallel_size)
    return max(LEAST_ROOM, AHEAD * at_once)


def kept_by_position(
    questions: Sequence[str], answers: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[int, Mapping[str, Any]]:
    """Give each position a kept run that has answered its question, each run to one position alone."""
    unused = {question: list(runs)[::-1] for question, runs in answers.items()}
    found: dict[int, Mapping[str, Any]] = {}
    for position, question in enumerate(questions):
        runs = unused.get(question)
        if runs:
            found[position] = runs.pop()
    return found
