"""Calls to the workers that have been sent and whose answers have not all been taken in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from nbengine.executor.failures import WorkerReport

SUCCESS, FAILURE = 0, 1
"""The first item of an answer. The second is the method's result, or a `WorkerReport`."""
Answer = tuple[int, Any]

Receive = Callable[[int, float | None], Answer]
"""A function that returns the next answer of a rank; it waits at most the seconds of its second argument
(then `TimeoutError`), without limit if that is None. Any other exception of it ends all calls."""
GiveUp = Callable[[int, WorkerReport], Exception]
"""A function that is told which rank's failure has left others waiting for it;
it returns the error of all calls."""

PATIENCE = 1.0
"""Seconds without an answer of one worker after which the others' answers are looked at, and seconds that it
still gets once another worker has failed."""


class FutureWrapper(Future[Any]):
    """The future result of a call.

    Waiting for it takes in the answers to earlier calls; `done` takes in only what has come.

    It is for the thread that makes the calls.
    """

    def __init__(self, calls: PendingCalls, ranks: Sequence[int], unique: bool) -> None:
        super().__init__()
        # A call that has been sent cannot be cancelled.
        self.set_running_or_notify_cancel()
        self._calls = calls
        self._unique = unique
        self.ranks = ranks
        self.answers: dict[int, Answer] = {}

    def done(self) -> bool:
        """Return whether `result` need not wait."""
        if not super().done():
            self._calls.poll()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, and raise what the method raised.

        Raises:
            TimeoutError: no answer came within `timeout` seconds; a later call of `result` may get it.
            EngineDeadError: a worker has ended.
        """
        if not super().done():
            self._calls.complete(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer, and return what the method raised."""
        if not super().done():
            self._calls.complete(self, timeout)
        return super().exception(0)

    @property
    def failures(self) -> dict[int, WorkerReport]:
        """Return the failures among the answers that have come, by rank."""
        return {rank: value for rank, (status, value) in self.answers.items() if status == FAILURE}

    def settle(self) -> None:
        """Set the result, or the first cause among the failures; called when all answers have come."""
        failures = self.failures
        for rank, report in failures.items():
            report.log(f"worker {rank}")
        if failures:
            own = [report for report in failures.values() if not report.is_lost_peer]
            self.set_exception((own or list(failures.values()))[0].error)
        elif self._unique:
            self.set_result(self.answers[self.ranks[0]][1])
        else:
            self.set_result([self.answers[rank][1] for rank in self.ranks])


class PendingCalls:
    """The calls without all their answers, in their order.

    Every rank answers in that order, too: answers have no numbers.
    """

    def __init__(self, receive: Receive, give_up: GiveUp, patience: float = PATIENCE) -> None:
        self._receive = receive
        self._give_up = give_up
        self._patience = patience
        self._pending: deque[FutureWrapper] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, ranks: Sequence[int], *, unique: bool = False) -> FutureWrapper:
        """Note that a call has been sent that `ranks` will answer, with `unique` a single one;
        return its future."""
        future = FutureWrapper(self, ranks, unique)
        self._pending.append(future)
        return future

    def poll(self) -> None:
        """Take in what has come, without waiting."""
        try:
            while self._pending:
                future = self._pending[0]
                for rank in future.ranks:
                    if rank not in future.answers:
                        future.answers[rank] = self._receive(rank, 0)
                self._settle_first()
        except TimeoutError:
            return
        except Exception as error:  # noqa: BLE001  # those who ask the futures get it
            self.fail(error)

    def complete(self, future: FutureWrapper, timeout: float | None) -> None:
        """Wait until `future` and all futures before it are done.

        Raises:
            TimeoutError: they are not done within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while future in self._pending:
                first = self._pending[0]
                for rank in first.ranks:
                    if rank not in first.answers:
                        first.answers[rank] = self._wait(first, rank, deadline)
                self._settle_first()
        except TimeoutError:
            raise TimeoutError(f"the workers did not answer within {timeout} s") from None
        except Exception as error:  # noqa: BLE001  # those who ask the futures get it
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End all calls with `error`."""
        while self._pending:
            self._pending.popleft().set_exception(error)

    def _settle_first(self) -> None:
        self._pending.popleft().settle()

    def _wait(self, future: FutureWrapper, rank: int, deadline: float | None) -> Answer:
        """Wait for the answer of one rank, unless it does not come because another rank has failed."""
        # The other ranks do not answer such a call, and tell of their failures over their lines.
        if len(future.ranks) == 1:
            return self._receive(rank, _time_left(deadline))
        failed_at: float | None = None
        while True:
            left = _time_left(deadline)
            try:
                return self._receive(rank, self._patience if left is None else min(left, self._patience))
            except TimeoutError:
                if left is not None and left <= self._patience:
                    raise
            self._take_in(future)
            if rank in future.answers:
                return future.answers[rank]
            failures = future.failures
            now = time.monotonic()
            if failures and failed_at is None:
                failed_at = now
            elif failures and failed_at is not None and now >= failed_at + self._patience:
                raise self._give_up(*next(iter(failures.items())))

    def _take_in(self, future: FutureWrapper) -> None:
        for rank in future.ranks:
            if rank not in future.answers:
                try:
                    future.answers[rank] = self._receive(rank, 0)
                except TimeoutError:
                    continue


def _time_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
