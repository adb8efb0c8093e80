"""Calls to the workers that have been sent and whose answers have not all been taken in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from nbengine.executor.failures import WorkerReport

SUCCESS, FAILURE = 0, 1
"""What an answer is: its first item. The second is the method's result, or a `WorkerReport`."""
Answer = tuple[int, Any]

Receive = Callable[[int, float | None], Answer]
"""Next answer of a rank, waiting at most so many seconds (`TimeoutError`), or None for as long as it takes. Anything
else that it raises is the end of all calls."""
GiveUp = Callable[[int, WorkerReport], Exception]
"""Told which rank's failure has left others waiting for it; returns what all calls end with."""

PATIENCE = 1.0
"""Seconds without an answer of one worker after which those of the others are looked at; and those that it is still
given when one of them has failed."""


class FutureWrapper(Future[Any]):
    """What a call will give. Waiting for it takes in the answers to the calls before it, `done` only what has come.

    For the thread that makes the calls.
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
        """Whether `result` need not wait."""
        if not super().done():
            self._calls.poll()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, and raise what the method raised.

        Raises:
            TimeoutError: it has not come within `timeout` seconds; it may still be asked for.
            EngineDeadError: a worker has ended.
        """
        if not super().done():
            self._calls.complete(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer; returns what the method raised."""
        if not super().done():
            self._calls.complete(self, timeout)
        return super().exception(0)

    @property
    def failures(self) -> dict[int, WorkerReport]:
        """By rank, as far as answers have come."""
        return {rank: value for rank, (status, value) in self.answers.items() if status == FAILURE}

    def settle(self) -> None:
        """All answers are there."""
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
    """The calls in their order. Every rank answers those that ask it in that order, too: no answer has a number."""

    def __init__(self, receive: Receive, give_up: GiveUp, patience: float = PATIENCE) -> None:
        self._receive = receive
        self._give_up = give_up
        self._patience = patience
        self._pending: deque[FutureWrapper] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, ranks: Sequence[int], *, unique: bool = False) -> FutureWrapper:
        """A call has been sent that these ranks will answer, with `unique` a single one."""
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
        except Exception as error:  # noqa: BLE001  # whoever asks the futures gets it
            self.fail(error)

    def complete(self, future: FutureWrapper, timeout: float | None) -> None:
        """Wait until `future` is done, and those before it are.

        Raises:
            TimeoutError: it is not within `timeout` seconds.
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
            raise TimeoutError(f"no answer of the workers within {timeout} s") from None
        except Exception as error:  # noqa: BLE001  # whoever asks the futures gets it
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End all calls with `error`."""
        while self._pending:
            self._pending.popleft().set_exception(error)

    def _settle_first(self) -> None:
        self._pending.popleft().settle()

    def _wait(self, future: FutureWrapper, rank: int, deadline: float | None) -> Answer:
        """The answer of one rank, unless another one's failure is the reason that it does not come."""
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
