"""What an engine core keeps of marked requests until somebody has read it: bounded, in memory, gone with the core."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from nbengine.checks import require
from nbengine.ipc.messages import FinishReason, TranscriptMark
from nbengine.ipc.transcripts import TranscriptRecord, decoding_params, pack_tokens
from nbengine.scheduler.request import FINISH_REASONS, Request
from nbengine.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

RECORD_OVERHEAD = 1024
"""Bytes that a record counts for beside its tokens and texts."""
CLIENT_LEFT = "the client that had asked left the engine"
ALL_ABORTED = "the engine ended all requests"


@dataclass(frozen=True)
class TranscriptLimits:
    """Most records and bytes, of one session and of all together."""

    session_records: int = 200
    session_bytes: int = 4 << 20
    records: int = 2000
    bytes: int = 32 << 20


class TranscriptStore:
    """Records of requests that have ended, within `limits`.

    When there are too many of a session, or of all, the oldest goes that has been read, else the oldest.
    """

    def __init__(self, limits: TranscriptLimits | None = None) -> None:
        self._limits = limits or TranscriptLimits()
        self._records: dict[tuple[str, int], TranscriptRecord] = {}
        """By group and index, oldest first."""
        self._num_records: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """What the records count for."""
        return self._total_bytes

    def add(self, record: TranscriptRecord) -> None:
        """Keep a record, at the expense of others if need be; one that exceeds the limits alone is not kept."""
        limits, session, cost = self._limits, record.mark.session, cost_of(record)
        self._drop(_key(record))
        if cost > min(limits.session_bytes, limits.bytes):
            logger.warning("the output of request %s is too large to be kept", record.mark.group)
            return
        while (
            self._num_records[session] >= limits.session_records
            or self._num_bytes[session] + cost > limits.session_bytes
        ):
            self._drop(self._victim(self.of(session)))
        while len(self._records) >= limits.records or self._total_bytes + cost > limits.bytes:
            self._drop(self._victim(self._records.values()))
        self._records[_key(record)] = record
        self._num_records[session] += 1
        self._num_bytes[session] += cost
        self._total_bytes += cost

    def of(self, session: str) -> list[TranscriptRecord]:
        """The records of a session, in the order in which the requests ended."""
        return [record for record in self._records.values() if record.mark.session == session]

    def mark_read(self, session: str, groups: Collection[str]) -> None:
        """Somebody has seen these requests; unknown ones are ignored."""
        for record in self.of(session):
            if record.mark.group in groups:
                record.was_read = True

    def forget(self, session: str, groups: Collection[str] | None) -> int:
        """Drop these requests of a session, all of them if None; returns how many records there were."""
        found = [record for record in self.of(session) if groups is None or record.mark.group in groups]
        for record in found:
            self._drop(_key(record))
        return len(found)

    def unread(self) -> dict[str, int]:
        """How many records nobody has read, by session; sessions without such are there with 0."""
        counts = dict.fromkeys(self._num_records, 0)
        for record in self._records.values():
            counts[record.mark.session] += not record.was_read
        return counts

    @staticmethod
    def _victim(records: Iterable[TranscriptRecord]) -> tuple[str, int]:
        """The oldest that has been read, else the oldest."""
        candidates = list(records)
        return _key(next((record for record in candidates if record.was_read), candidates[0]))

    def _drop(self, key: tuple[str, int]) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        session, cost = record.mark.session, cost_of(record)
        self._total_bytes -= cost
        self._num_bytes[session] -= cost
        self._num_records[session] -= 1
        if not self._num_records[session]:
            del self._num_records[session], self._num_bytes[session]


class TranscriptKeeper:
    """Keeps what marked requests have written when they end, and shows it with what is still being written.

    For the thread that steps. Requests that are not marked cost nothing.
    """

    def __init__(
        self,
        scheduler: SchedulerState,
        rank: int,
        limits: TranscriptLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = TranscriptStore(limits)
        self._scheduler = scheduler
        self._rank = rank
        self._clock = clock
        self.utilities: dict[str, Callable[..., Any]] = {
            "transcripts": self.transcripts,
            "read_transcripts": self.read,
            "forget_transcripts": self.forget,
            "transcript_sessions": self.sessions,
        }

    def take_ended(self, cause: str = "") -> None:
        """Keep the marked requests that have ended; `cause` is why those among them that were aborted were."""
        ended = self._scheduler.ended_for_transcripts
        if not ended:
            return
        self._scheduler.ended_for_transcripts = []
        now = self._clock()
        for request in ended:
            record = self._record(request)
            if record is not None:
                record.ended = now
                record.cause = _cause(request, cause)
                self.store.add(record)

    def transcripts(self, session: str) -> list[TranscriptRecord]:
        """What there is of a session: requests that have ended, then those that are still being computed."""
        _check_session(session)
        self.take_ended()
        records = self.store.of(session)
        for request in self._scheduler.requests.values():
            if request.transcript is not None and request.transcript.session == session:
                record = self._record(request)
                if record is not None:
                    records.append(record)
        return records

    def read(self, session: str, groups: list[str]) -> None:
        """Somebody has seen these requests: they are the first to go when there is too much."""
        _check_session(session)
        self.take_ended()
        self.store.mark_read(session, _checked_groups(groups))

    def forget(self, session: str, groups: list[str] | None = None) -> int:
        """Drop these requests, all that have ended if None; returns how many completions there were."""
        _check_session(session)
        self.take_ended()
        return self.store.forget(session, None if groups is None else _checked_groups(groups))

    def sessions(self) -> dict[str, int]:
        """How many completions that have ended nobody has read, by session."""
        self.take_ended()
        return self.store.unread()

    def _record(self, request: Request) -> TranscriptRecord | None:
        mark: TranscriptMark | None = request.transcript
        if mark is None or request.sampling_params is None:
            return None
        num_before = request.num_prompt_tokens - max(0, mark.num_written)
        return TranscriptRecord(
            mark,
            pack_tokens(request.all_token_ids[max(0, num_before) :]),
            request.num_prompt_tokens,
            decoding_params(request.sampling_params),
            finish_reason=FINISH_REASONS.get(request.status),
            stop_reason=request.stop_reason,
            rank=self._rank,
        )


def cost_of(record: TranscriptRecord) -> int:
    """Bytes that a record counts for."""
    texts = (record.mark.session, record.mark.prompt, record.mark.group, *record.decoding.stop)
    return RECORD_OVERHEAD + len(record.tokens) + sum(len(text.encode(errors="replace")) for text in texts)


def _key(record: TranscriptRecord) -> tuple[str, int]:
    return record.mark.group, record.mark.index


def _cause(request: Request, cause: str) -> str:
    reason = FINISH_REASONS[request.status]
    if reason is FinishReason.ABORT:
        return cause
    if reason is FinishReason.ERROR and request.grammar is not None:
        return f"structured_outputs: {request.grammar.error}"
    return ""


def _check_session(session: object) -> None:
    require("session", session, isinstance(session, str) and bool(session), "a string that is not empty")


def _checked_groups(groups: Any) -> set[str]:
    names = isinstance(groups, (list, tuple)) and all(isinstance(group, str) for group in groups)
    require("groups", groups, names, "a list of engine request ids")
    return set(groups)
