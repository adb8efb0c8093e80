"""The transcripts of marked requests, which an engine core keeps in bounded memory until they are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from nbengine.checks import require
from nbengine.ipc.messages import TranscriptMark
from nbengine.ipc.peer_log import printable
from nbengine.ipc.transcripts import TranscriptRecord, decoding_params, pack_tokens
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

RECORD_OVERHEAD = 1024
"""Bytes that a record counts besides its tokens and texts."""
CLIENT_LEFT = "the client that had asked left the engine"
ALL_ABORTED = "the engine ended all requests"


_Key = tuple[str, int]


@dataclass(frozen=True)
class TranscriptLimits:
    """The most records and bytes of one session, and of all together."""

    session_records: int = 1000
    session_bytes: int = 4 << 20
    records: int = 4000
    bytes: int = 32 << 20


class _Shelf:
    """Records by group and index, the oldest first, and their sums."""

    def __init__(self) -> None:
        self.records: dict[_Key, TranscriptRecord] = {}
        self.num_bytes = 0
        self.num_read = 0

    def add(self, record: TranscriptRecord) -> None:
        self.records[_key(record)] = record
        self.num_bytes += cost_of(record)
        self.num_read += record.was_read

    def remove(self, record: TranscriptRecord) -> None:
        del self.records[_key(record)]
        self.num_bytes -= cost_of(record)
        self.num_read -= record.was_read

    def has_room(self, cost: int, max_records: int, max_bytes: int) -> bool:
        return len(self.records) < max_records and self.num_bytes + cost <= max_bytes

    def victim(self) -> TranscriptRecord:
        """Return the oldest record that has been read, or the oldest of all if none has."""
        records = self.records.values()
        return next(record for record in records if record.was_read or not self.num_read)


class TranscriptStore:
    """The records of requests that have ended, within `limits`.

    If a session, or all together, have too many, the oldest record that has been read goes, or the oldest of
    all.
    """

    def __init__(self, limits: TranscriptLimits | None = None) -> None:
        self._limits = limits or TranscriptLimits()
        self._all = _Shelf()
        self._by_session: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return len(self._all.records)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all records count."""
        return self._all.num_bytes

    def add(self, record: TranscriptRecord) -> None:
        """Keep a record, at the expense of others if need be, unless it exceeds the limits by itself."""
        limits, session, cost = self._limits, record.mark.session, cost_of(record)
        former = self._all.records.get(_key(record))
        if former is not None:
            self._drop(former)
        if cost > min(limits.session_bytes, limits.bytes):
            group = printable(record.mark.group)
            logger.warning("the output of request %s is too large to be kept", group)
            return
        shelf = self._by_session.get(session)
        while shelf is not None and not shelf.has_room(cost, limits.session_records, limits.session_bytes):
            self._drop(shelf.victim())
        while not self._all.has_room(cost, limits.records, limits.bytes):
            self._drop(self._all.victim())
        for shelf in (self._all, self._by_session.setdefault(session, _Shelf())):
            shelf.add(record)

    def of(self, session: str) -> list[TranscriptRecord]:
        """Return the records of a session, in the order in which the requests ended."""
        shelf = self._by_session.get(session)
        return [] if shelf is None else list(shelf.records.values())

    def mark_read(self, session: str, groups: Collection[str]) -> None:
        """Note that somebody has seen the requests `groups`; unknown ones are ignored."""
        for record in self.of(session):
            if record.mark.group in groups and not record.was_read:
                record.was_read = True
                for shelf in (self._all, self._by_session[session]):
                    shelf.num_read += 1

    def forget(self, session: str, groups: Collection[str] | None) -> int:
        """Drop the requests `groups` of a session, all if None, and return how many records these had."""
        found = [record for record in self.of(session) if groups is None or record.mark.group in groups]
        for record in found:
            self._drop(record)
        return len(found)

    def unread(self) -> dict[str, int]:
        """Count the records that nobody has read, by session; sessions without any have 0."""
        return {name: len(shelf.records) - shelf.num_read for name, shelf in self._by_session.items()}

    def _drop(self, record: TranscriptRecord) -> None:
        session = record.mark.session
        for shelf in (self._all, self._by_session[session]):
            shelf.remove(record)
        if not self._by_session[session].records:
            del self._by_session[session]


class TranscriptKeeper:
    """The keeper of the output of marked requests, of those that have ended and those that have not.

    It is for the thread that steps. Requests that are not marked cost nothing.
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
        """Keep the marked requests that have ended; `cause` is the reason of those that were aborted."""
        ended = self._scheduler.ended_for_transcripts
        if not ended:
            return
        self._scheduler.ended_for_transcripts = []
        now = self._clock()
        for request in ended:
            record = self._record(request)
            if record is not None:
                record.ended = now
                is_aborted = request.status is RequestStatus.FINISHED_ABORTED
                record.cause = cause if is_aborted else request.error
                self.store.add(record)

    def transcripts(self, session: str) -> list[TranscriptRecord]:
        """Return a session's records: of requests that have ended, then of those still being computed."""
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
        """Note that somebody has seen the requests `groups`, which may now be the first to be dropped."""
        _check_session(session)
        self.take_ended()
        self.store.mark_read(session, _checked_groups(groups))

    def forget(self, session: str, groups: list[str] | None = None) -> int:
        """Drop the requests `groups`, all ended ones if None, and return how many completions these had."""
        _check_session(session)
        self.take_ended()
        return self.store.forget(session, None if groups is None else _checked_groups(groups))

    def sessions(self) -> dict[str, int]:
        """Count the completions that have ended and nobody has read, by session."""
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
    """Return the bytes that a record counts."""
    texts = (record.mark.session, record.mark.prompt, record.mark.group, *record.decoding.stop)
    return RECORD_OVERHEAD + len(record.tokens) + sum(len(text.encode(errors="replace")) for text in texts)


def _key(record: TranscriptRecord) -> _Key:
    return record.mark.group, record.mark.index


def _check_session(session: object) -> None:
    require("session", session, isinstance(session, str) and bool(session), "a string that is not empty")


def _checked_groups(groups: Any) -> set[str]:
    names = isinstance(groups, (list, tuple)) and all(isinstance(group, str) for group in groups)
    require("groups", groups, names, "a list of engine request ids")
    return set(groups)
