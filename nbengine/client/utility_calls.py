"""Calls of engine core methods by name: to one core or to all of them, with one answer."""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from nbengine.errors import NBEngineError, UtilityError
from nbengine.ipc.messages import UtilityOutput, UtilityRequest
from nbengine.ipc.transcripts import TranscriptRecord, records_of
from nbengine.ipc.utilities import ProfileReport
from nbengine.metrics.stats import EngineStats, SchedulerStats

Merge = Callable[[Sequence[Any]], Any]


def merged_stats(answers: Iterable[Any]) -> EngineStats:
    """The public statistics from each engine core's answer to the utility call `stats`."""
    engines = [
        answer if isinstance(answer, SchedulerStats) else msgspec.convert(answer, SchedulerStats)
        for answer in answers
    ]
    return EngineStats(
        engines=engines,
        current_wave=max((engine.current_wave for engine in engines), default=0),
        engines_running=any(
            engine.engines_running or engine.num_running_reqs + engine.num_waiting_reqs > 0
            for engine in engines
        ),
        timestamp=time.time(),
    )


def _merged_reports(answers: Sequence[Any]) -> ProfileReport:
    reports = [msgspec.convert(answer, ProfileReport, from_attributes=True) for answer in answers]
    return ProfileReport(
        [path for report in reports for path in report.paths],
        sum(report.num_steps for report in reports),
        reports[0].summary,
    )


def _merged_records(answers: Sequence[Any]) -> list[TranscriptRecord]:
    return [record for answer in answers for record in records_of(answer)]


def _merged_counts(answers: Sequence[Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for answer in answers:
        # Sessions whose requests have all been read count 0, and are there.
        for session, number in msgspec.convert(answer, dict[str, int]).items():
            counts[session] += number
    return dict(counts)


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


MERGES: dict[str, Merge] = {
    "stats": merged_stats,
    "check_health": _first,
    "reset_prefix_cache": all,
    "pause_generation": _first,
    "resume_generation": _first,
    "is_paused": any,
    "sleep": _first,
    "wake_up": _first,
    "is_sleeping": any,
    "start_profile": _first,
    "stop_profile": _merged_reports,
    "transcripts": _merged_records,
    "read_transcripts": _first,
    "forget_transcripts": sum,
    "transcript_sessions": _merged_counts,
}
"""Methods that concern all engine cores, and how their answers become one; any other goes to the first core alone."""
UNDONE_BY = {
    "pause_generation": "resume_generation",
    "sleep": "wake_up",
    "start_profile": "stop_profile",
}
"""What is called on the cores that did something when others could not: it is done by all of them or by none."""


def merged_answers(method: str, answers: Sequence[Any]) -> Any:
    """The one answer to a call from those of the engine cores that it went to, by rank."""
    return MERGES.get(method, _first)(answers)


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
        """The ranks that have not answered."""
        return {*self.ranks} - self.answers.keys() - self.failures.keys()


class UtilityCalls:
    """The calls that have no answer yet. Of a call to several cores the failure of the lowest rank is the answer.

    `begin` and `fail` are safe on any thread, the others belong to the thread of the sockets.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    def begin(self, method: str, args: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        """Register a call; returns its id and the future of its answer."""
        call_id, call = next(self._ids), _Call(method, args)
        self._calls[call_id] = call
        return call_id, call.future

    def address(
        self, call_id: int, ranks: Sequence[int], client_index: int
    ) -> list[tuple[int, UtilityRequest]]:
        """What is to be sent for a call, by rank, `ranks` being those that there are; nothing if it has failed."""
        call = self._calls.get(call_id)
        if call is None:
            return []
        call.client_index = client_index
        call.ranks = list(ranks) if call.method in MERGES else list(ranks[:1])
        if not call.ranks:
            self._settle(call_id, UtilityError(f"{call.method}: no engine core takes calls at the moment"))
        request = UtilityRequest(client_index, call_id, call.method, list(call.args))
        return [(rank, request) for rank in call.ranks]

    def answer(self, rank: int, output: UtilityOutput) -> list[tuple[int, UtilityRequest]]:
        """A core has answered; returns what is to be sent to others because of it, by rank."""
        call = self._calls.get(output.call_id)
        if call is None or rank not in call.missing:
            return []
        if output.failure_message is None:
            call.answers[rank] = output.result
        else:
            call.failures[rank] = output.failure_message
        return [] if call.missing else self._conclude(output.call_id, call)

    def lose(self, rank: int, cause: str) -> None:
        """A core has ended: what it has not answered fails."""
        for call_id, call in list(self._calls.items()):
            if rank in call.missing:
                self._settle(call_id, UtilityError(f"{call.method}: engine core {rank} has ended: {cause}"))

    def refuse(self, call_id: int, reason: str) -> None:
        """A call could not be sent."""
        self._settle(call_id, UtilityError(reason))

    def fail(self, error: NBEngineError) -> None:
        """All calls fail with copies of `error`."""
        for call_id in list(self._calls):
            self._settle(call_id, copy.copy(error))

    def _conclude(self, call_id: int, call: _Call) -> list[tuple[int, UtilityRequest]]:
        """All have answered."""
        if call.failures:
            rank = min(call.failures)
            where = f"engine core {rank}: " if len(call.ranks) > 1 else ""
            self._settle(call_id, UtilityError(where + call.failures[rank]))
            undo = UNDONE_BY.get(call.method)
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
