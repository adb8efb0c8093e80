"""The calls of engine core methods by name, to one core or to all of them, with one answer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from nbengine.client.calls import CALLS, merged_answers
from nbengine.errors import NBEngineError, UtilityError
from nbengine.ipc.messages import UtilityOutput, UtilityRequest


class _Call:
    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.future: Future[Any] = Future()
        self.ranks: list[int] = []
        self.client_index = 0
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, str] = {}

    @property
    def missing(self) -> set[int]:
        """Return the ranks that have not answered."""
        return {*self.ranks} - self.answers.keys() - self.failures.keys()


class UtilityCalls:
    """The calls that have no answer yet. If several cores fail, the failure of the lowest rank is the answer.

    `begin` and `fail` are safe on any thread, the others belong to the thread of the sockets.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    def begin(self, method: str, args: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        """Register a call; return its id and the future of its answer."""
        call_id, call = next(self._ids), _Call(method, args)
        self._calls[call_id] = call
        return call_id, call.future

    def address(
        self, call_id: int, ranks: Sequence[int], client_index: int
    ) -> list[tuple[int, UtilityRequest]]:
        """Return the messages to send for a call, by rank, if `ranks` take calls;
        none if the call has failed."""
        call = self._calls.get(call_id)
        if call is None:
            return []
        call.client_index = client_index
        declared = CALLS.get(call.method)
        call.ranks = list(ranks) if declared and declared.merge else list(ranks[:1])
        if not call.ranks:
            self._settle(call_id, UtilityError(f"{call.method}: no engine core takes calls at the moment"))
        request = UtilityRequest(client_index, call_id, call.method, list(call.args))
        return [(rank, request) for rank in call.ranks]

    def answer(self, rank: int, output: UtilityOutput) -> list[tuple[int, UtilityRequest]]:
        """Take in a core's answer; return the messages to send to other cores because of it, by rank."""
        call = self._calls.get(output.call_id)
        if call is None or rank not in call.missing:
            return []
        if output.failure_message is None:
            call.answers[rank] = output.result
        else:
            call.failures[rank] = output.failure_message
        return [] if call.missing else self._conclude(output.call_id, call)

    def give_up(self, call_id: int) -> tuple[list[Any], list[int]]:
        """Stop waiting for a call; return the answers that have come, by rank,
        and the ranks that have not answered."""
        call = self._calls.pop(call_id, None)
        if call is None:
            return [], []
        answers = dict(call.answers)
        return [answers[rank] for rank in sorted(answers)], sorted(call.missing)

    def unanswered(self, future: Future[Any]) -> list[int]:
        """Return the ranks that have yet to answer the call of a future."""
        calls = [call for call in list(self._calls.values()) if call.future is future]
        return [rank for call in calls for rank in sorted(call.missing)]

    def lose(self, rank: int, cause: str) -> None:
        """Fail the calls that a core has not answered, since it has ended."""
        for call_id, call in list(self._calls.items()):
            if rank in call.missing:
                self._settle(call_id, UtilityError(f"{call.method}: engine core {rank} has ended: {cause}"))

    def refuse(self, call_id: int, reason: str) -> None:
        """Fail a call that could not be sent."""
        self._settle(call_id, UtilityError(reason))

    def fail(self, error: NBEngineError) -> None:
        """Fail all calls with copies of `error`."""
        for call_id in list(self._calls):
            self._settle(call_id, copy.copy(error))

    def _conclude(self, call_id: int, call: _Call) -> list[tuple[int, UtilityRequest]]:
        """Settle a call that all cores have answered; return the messages that undo it if some have
        failed."""
        if call.failures:
            rank = min(call.failures)
            where = f"engine core {rank}: " if len(call.ranks) > 1 else ""
            self._settle(call_id, UtilityError(where + call.failures[rank]))
            declared = CALLS.get(call.method)
            undo = declared.undone_by if declared else None
            if undo is None or not call.answers:
                return []
            undo_id, _ = self.begin(undo, ())
            return self.address(undo_id, sorted(call.answers), call.client_index)
        try:
            result = merged_answers(call.method, [call.answers[rank] for rank in call.ranks])
        except msgspec.ValidationError as error:
            self._settle(call_id, UtilityError(f"{call.method}: the answer is malformed: {error}"))
        else:
            self._settle(call_id, result=result)
        return []

    def _settle(self, call_id: int, error: NBEngineError | None = None, result: Any = None) -> None:
        call = self._calls.pop(call_id, None)
        if call is None or not call.future.set_running_or_notify_cancel():
            return
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
