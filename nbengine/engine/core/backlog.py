"""A client's unread outputs, merged request by request: they grow with tokens, not with messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from nbengine.engine.core.work import failure
from nbengine.ipc.merged_output import merge, own_copy
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, UtilityOutput

if TYPE_CHECKING:
    from nbengine.ipc.serial import Buffer

# Bytes that CPython takes for each of these, rounded up.
_OUTPUT_BYTES = 600
_TOKEN_BYTES = 40
_EVENT_BYTES = 120
_ROW_BYTES = 256
_LOGPROB_BYTES = 72
_ANSWER_BYTES = 200
_ID_BYTES = 100


@dataclass(slots=True)
class EncodedAnswer:
    """An encoded answer to a utility call."""

    call_id: int
    frames: list[Buffer]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that the answer takes."""
        return _ANSWER_BYTES + sum(len(frame) for frame in self.frames)


@dataclass(slots=True)
class _Merged:
    outputs: EngineCoreOutputs
    latest: dict[str, EngineCoreOutput] = field(default_factory=dict)
    """By request id, the output into which the request's next one is merged."""
    num_bytes: int = 0


class Backlog:
    """The unread outputs of one client, each request's in their order; utility answers keep their places.

    `num_bytes` is the memory that the backlog holds, estimated from above.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._segments: deque[_Merged | EncodedAnswer] = deque()
        self._truncated: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, outputs: EngineCoreOutputs) -> None:
        """Merge outputs without a utility answer into the backlog; the objects themselves are not kept."""
        last = self._segments[-1] if self._segments else None
        if not isinstance(last, _Merged):
            last = _Merged(EngineCoreOutputs(outputs=[]))
            self._segments.append(last)
        before = last.num_bytes
        merged = last.outputs
        merged.timestamp = outputs.timestamp
        former, stats = merged.scheduler_stats, outputs.scheduler_stats
        if stats is not None:
            if former is not None and stats.requests is None:
                # Others may hold the statistics, too.
                stats = msgspec.structs.replace(stats, requests=former.requests)
            merged.scheduler_stats = stats
        for name in ("wave_complete", "start_wave"):
            if (newer := getattr(outputs, name)) is not None:
                setattr(merged, name, newer)
        for name in ("finished_requests", "returned"):
            if request_ids := getattr(outputs, name):
                setattr(merged, name, [*(getattr(merged, name) or ()), *request_ids])
                last.num_bytes += _ID_BYTES * len(request_ids)
        if outputs.prompts_read:
            newest = {read.request_id: read for read in (*(merged.prompts_read or ()), *outputs.prompts_read)}
            last.num_bytes += _ID_BYTES * (len(newest) - len(merged.prompts_read or ()))
            merged.prompts_read = list(newest.values())
        for output in self.filter(outputs).outputs:
            _add_output(last, output)
        self.num_bytes += last.num_bytes - before

    def add_answer(self, call_id: int, frames: list[Buffer]) -> None:
        """Keep an encoded utility answer behind the outputs that came before it."""
        answer = EncodedAnswer(call_id, frames)
        self._segments.append(answer)
        self.num_bytes += answer.num_bytes

    def pop(self) -> EngineCoreOutputs | EncodedAnswer:
        """Take out the outputs or the answer to be sent next, as one message."""
        segment = self._segments.popleft()
        self.num_bytes -= segment.num_bytes
        return segment if isinstance(segment, EncodedAnswer) else segment.outputs

    def give_up(self, reason: str) -> list[UtilityOutput]:
        """Drop all contents; requests that lost outputs end with an error instead of going on with a gap.

        Returns:
            The answers to the utility calls whose results were dropped; the caller adds them, encoded.
        """
        answers: list[UtilityOutput] = []
        ended: dict[str, None] = {}
        returned: list[str] = []
        truncated = dict.fromkeys(self._truncated, reason)
        for segment in self._segments:
            if isinstance(segment, EncodedAnswer):
                answers.append(UtilityOutput(segment.call_id, failure_message=reason))
                continue
            # A returned request goes to another engine core, and would be lost with its id.
            returned += segment.outputs.returned or ()
            for output in segment.outputs.outputs:
                if output.finished:
                    ended[output.request_id] = None
                    truncated.pop(output.request_id, None)
                else:
                    truncated[output.request_id] = reason
        self._segments.clear()
        self._truncated = {}
        self.num_bytes = 0
        if ended or returned:
            ends = [failure(request_id, reason) for request_id in ended]
            self.add(EngineCoreOutputs(outputs=ends, returned=returned or None))
        self._truncated = truncated
        return answers

    def filter(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Remove the outputs of requests that `give_up` has cut short, except for their ends."""
        if self._truncated:
            kept = [self._checked(output) for output in outputs.outputs]
            outputs.outputs = [output for output in kept if output is not None]
        return outputs

    def _checked(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        reason = self._truncated.get(output.request_id)
        if reason is None:
            return output
        if not output.finished:
            return None
        del self._truncated[output.request_id]
        return failure(output.request_id, reason)


def _add_output(segment: _Merged, output: EngineCoreOutput) -> None:
    segment.num_bytes += _contents_bytes(output)
    older = segment.latest.get(output.request_id)
    if older is not None and not older.finished:
        merge(older, output)
        return
    segment.num_bytes += _OUTPUT_BYTES
    own = own_copy(output)
    segment.latest[output.request_id] = own
    segment.outputs.outputs.append(own)


def _contents_bytes(output: EngineCoreOutput) -> int:
    num_bytes = _TOKEN_BYTES * len(output.new_token_ids)
    num_bytes += _EVENT_BYTES * len(output.events or ())
    for logprobs in (output.new_logprobs, output.new_prompt_logprobs):
        if logprobs is not None and logprobs.logprobs:
            num_bytes += len(logprobs.logprobs) * (_ROW_BYTES + _LOGPROB_BYTES * len(logprobs.logprobs[0]))
    return num_bytes + getattr(output.pooling_output, "nbytes", 0)
