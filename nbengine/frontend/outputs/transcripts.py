"""The transcripts: requests that an engine has kept because they were submitted with `transcript`, made into
outputs again."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from nbengine.checks import checked_texts, require_text
from nbengine.errors import InvalidTypeError
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.ipc.messages import EngineCoreRequest, FinishReason, TranscriptMark
from nbengine.ipc.transcripts import TranscriptRecord, shortened, unpack_tokens
from nbengine.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

CALL_TIMEOUT = 30.0
"""Seconds that a blocking call waits for the engine cores, which answer between two steps."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A request that an engine has kept: `output` has all that was written, as a stream would have brought
    it, without log probabilities and times."""

    request_id: str
    """The engine's id of the request, which is unique."""
    session: str
    prompt: str
    """The prompt, or its first `nbengine.ipc.transcripts.MAX_PROMPT_CHARACTERS` characters."""
    output: RequestOutput
    num_prompt_tokens: int
    submitted: float
    """The `time.time()` of the submission, by the clock of its client."""
    ended: float | None
    """The `time.time()` of the end, by the engine's clock; None while the answer is being written."""
    cause: str
    """The reason for which the request ended, where neither the model nor the client that had asked ended
    it."""
    was_read: bool
    num_missing: int = 0
    """Completions, of `n`, that the engine has not kept or keeps no longer."""


class Transcripts(ABC):
    """The calls that a frontend offers for requests that were submitted with `transcript`.

    An engine core keeps what such a request has written, however the request ends: also when its client
    restarts or dies. The transcript is kept until `forget_transcripts`; if there are too many, those that
    were read go first. It is gone when its engine core ends.
    """

    _tokenizer: Any

    @property
    @abstractmethod
    def session(self) -> str:
        """Return the name that this client keeps across restarts of its process."""

    @abstractmethod
    def _submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Start a utility call; safe on any thread."""

    @abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core by name."""

    async def transcripts(self, session: str | None = None) -> list[Transcript]:
        """Return the transcripts that the engine has kept of a session, this client's own if None, the latest
        first.

        A request that is still being written is there as far as it has come. It counts as read only after
        `read_transcripts`.
        """
        answer = await self.call_utility("transcripts", self._named(session))
        return self._transcripts_of(answer)

    def transcripts_blocking(self, session: str | None = None) -> list[Transcript]:
        """Do what `transcripts` does, for code without an event loop.

        Raises:
            TimeoutError: the engine did not answer.
        """
        answer = self._submit_utility("transcripts", self._named(session)).result(CALL_TIMEOUT)
        return self._transcripts_of(answer)

    def read_transcripts(self, request_ids: Iterable[str], session: str | None = None) -> None:
        """Tell the engine, without waiting, that these transcripts (`Transcript.request_id`) have been
        seen."""
        call = self._submit_utility("read_transcripts", self._named(session), _checked_ids(request_ids))
        call.add_done_callback(_log_failure)

    async def forget_transcripts(
        self, request_ids: Iterable[str] | None = None, session: str | None = None
    ) -> int:
        """Have the engine drop these transcripts, all that have ended if None; return the number of
        completions dropped."""
        ids = None if request_ids is None else _checked_ids(request_ids)
        return cast("int", await self.call_utility("forget_transcripts", self._named(session), ids))

    def forget_transcripts_blocking(
        self, request_ids: Iterable[str] | None = None, session: str | None = None
    ) -> int:
        """Do what `forget_transcripts` does, for code without an event loop.

        Raises:
            TimeoutError: the engine did not answer.
        """
        ids = None if request_ids is None else _checked_ids(request_ids)
        call = self._submit_utility("forget_transcripts", self._named(session), ids)
        return cast("int", call.result(CALL_TIMEOUT))

    async def transcript_sessions(self) -> dict[str, int]:
        """Count the completions that have ended and that nobody has read, by session."""
        return cast("dict[str, int]", await self.call_utility("transcript_sessions"))

    def transcript_sessions_blocking(self) -> dict[str, int]:
        """Do what `transcript_sessions` does, for code without an event loop."""
        return cast("dict[str, int]", self._submit_utility("transcript_sessions").result(CALL_TIMEOUT))

    def _named(self, session: str | None) -> str:
        if session is None:
            return self.session
        require_text("session", session)
        return session

    def _transcripts_of(self, records: Sequence[TranscriptRecord]) -> list[Transcript]:
        return transcripts_of(records, TextDecoding.of(self._tokenizer))


def mark(request: EngineCoreRequest, session: str, prompt: object, num_written: int = 0) -> TranscriptMark:
    """Make the mark that has a request kept, whose `request_id` is the engine's; the last `num_written`
    tokens of its prompt are the beginning of the answer.

    Raises:
        InvalidTypeError: the prompt is not text.
    """
    if not isinstance(prompt, str):
        raise InvalidTypeError(
            "transcript", prompt, "None, or a string: the prompt, for those who read it later"
        )
    params = request.sampling_params
    # What cannot be written as UTF-8 could not be sent.
    shown = shortened(prompt).encode(errors="replace").decode()
    num_completions = 1 if params is None else params.n
    return TranscriptMark(
        session,
        shown,
        request.request_id,
        time.time(),
        num_completions=num_completions,
        num_written=num_written,
    )


def transcripts_of(records: Iterable[TranscriptRecord], decoding: TextDecoding) -> list[Transcript]:
    """Group records of completions by their request and make a transcript of each, the latest first."""
    groups: dict[str, list[TranscriptRecord]] = {}
    for record in records:
        groups.setdefault(record.mark.group, []).append(record)
    found = [_transcript(group, decoding) for group in groups.values()]
    return sorted(found, key=lambda transcript: transcript.submitted, reverse=True)


def completion_of(record: TranscriptRecord, decoding: TextDecoding) -> CompletionOutput:
    """Return what the stream of a completion had brought by then: text, tokens, and how it ended."""
    num_written = record.mark.num_written
    # If an end had been found in the beginning, the request would not have been sent; the rest counts on from
    # there.
    min_tokens = record.decoding.min_tokens + num_written
    params = msgspec.structs.replace(record.decoding, min_tokens=min_tokens)
    detokenizer = IncrementalDetokenizer.from_new_request(decoding, params, record.mark.context)
    reason, stop_reason = record.finish_reason, record.stop_reason
    is_aborted = reason is FinishReason.ABORT
    stop_string = detokenizer.update(unpack_tokens(record.tokens), None if is_aborted else reason)
    if stop_string is None and is_aborted:
        # The text that this brings ends nothing any more.
        detokenizer.update([], reason)
    if stop_string is not None:
        # The engine core only knows that its frontend wants no more of the completion.
        reason, stop_reason = FinishReason.STOP, stop_string
    text = detokenizer.take_text(reason is not None)
    return CompletionOutput(
        record.mark.index,
        text,
        detokenizer.token_ids[num_written:],
        finish_reason=None if reason is None else str(reason),
        stop_reason=stop_reason,
    )


def _transcript(records: list[TranscriptRecord], decoding: TextDecoding) -> Transcript:
    records.sort(key=lambda record: record.mark.index)
    first = records[0]
    outputs = [completion_of(record, decoding) for record in records]
    ends = [record.ended for record in records if record.ended is not None]
    is_running = any(not completion.finished for completion in outputs)
    output = RequestOutput(first.mark.group, first.mark.prompt, None, outputs, finished=not is_running)
    return Transcript(
        first.mark.group,
        first.mark.session,
        first.mark.prompt,
        output,
        first.num_prompt_tokens,
        first.mark.submitted,
        None if is_running else max(ends, default=None),
        next((record.cause for record in records if record.cause), ""),
        all(record.was_read for record in records),
        max(0, first.mark.num_completions - len(records)),
    )


def _checked_ids(request_ids: Iterable[str]) -> list[str]:
    return checked_texts("request_ids", request_ids, "a list of the ids of transcripts")


def _log_failure(call: Future[Any]) -> None:
    """Log that an engine could not be told; it keeps the transcripts a little longer than need be."""
    if not call.cancelled() and (error := call.exception()) is not None:
        logger.info("the engine was not told which transcripts have been read: %s", error)
