"""The answers of a notebook: those of this kernel, and those that an engine has kept for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbengine.errors import NBEngineError
from nbengine.magics.generation.result import GenerationResult

if TYPE_CHECKING:
    from nbengine.frontend.outputs.transcripts import Transcript

MAX_ANSWERS = 200
MAX_TOKENS = 1_000_000
"""The most tokens of all kept answers; answers that are still being written are kept beyond it."""


@dataclass(eq=False)
class Answer:
    """A generation, whose `result` grows until it has ended; times are `time.time()`."""

    request_id: str
    """The request id of the engine, which is unique."""
    result: GenerationResult
    engine: str
    submitted: float
    ended: float | None = None
    cause: str = ""
    """The cause of its end, where neither the model nor the user ended it."""
    is_new: bool = False
    """The answer has not been shown, or not all of it."""
    num_missing: int = 0
    """The number of completions, of `-n`, that are lost."""
    from_engine: bool = False
    """The engine has kept the answer, not this kernel."""

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all completions."""
        return sum(map(self.result.num_tokens_of, self.result.outputs))

    @property
    def ending(self) -> str:
        """Say in words how the answer ended."""
        if not self.result.finished:
            return "still being written"
        reasons = {completion.finish_reason for completion in self.result.outputs}
        if "error" in reasons:
            words = "failed"
        elif not reasons or "abort" in reasons:
            words = "ended early"
        else:
            words = "stopped at the limit" if "length" in reasons else "complete"
        if self.num_missing:
            words += f", {self.num_missing} of {self.num_missing + len(self.result.outputs)} answers lost"
        return f"{words}: {self.cause}" if self.cause else words


class Answers:
    """The latest answers of this kernel: `max_answers` with `max_tokens` at most; safe on any thread."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._max_answers = max_answers
        self._max_tokens = max_tokens

    def begin(self, request_id: str, result: GenerationResult, engine: str) -> Answer:
        """Take in a generation that has begun, and forget the oldest answers beyond the limits."""
        answer = Answer(request_id, result, engine, time.time())
        with self._lock:
            self._answers.append(answer)
            self._trim()
        return answer

    def end(self, answer: Answer, error: NBEngineError | None = None) -> None:
        """Note that an answer's generation has ended, by itself or with an error."""
        answer.ended = time.time()
        if error is not None:
            answer.cause = f"{type(error).__name__}: {getattr(error, 'cause', error)}"

    def newest_first(self) -> list[Answer]:
        """List all answers, the latest first."""
        with self._lock:
            return self._answers[::-1]

    def clear(self) -> list[str]:
        """Forget the answers that have ended, and return their request ids."""
        with self._lock:
            ended = [answer.request_id for answer in self._answers if answer.ended is not None]
            self._answers = [answer for answer in self._answers if answer.ended is None]
        return ended

    def _trim(self) -> None:
        answers = self._answers
        num_answers, num_tokens = len(answers), sum(answer.num_tokens for answer in answers)
        kept = []
        for answer in answers:
            too_many = num_answers > self._max_answers or num_tokens > self._max_tokens
            if too_many and answer.ended is not None:
                num_answers, num_tokens = num_answers - 1, num_tokens - answer.num_tokens
            else:
                kept.append(answer)
        self._answers = kept


def kept_answer(transcript: Transcript, engine: str) -> Answer:
    """Make an answer of what an engine has kept."""
    result = GenerationResult(transcript.request_id, transcript.prompt)
    result.absorb(transcript.output)
    result.num_prompt_tokens = transcript.num_prompt_tokens
    return Answer(
        transcript.request_id,
        result,
        engine,
        transcript.submitted,
        transcript.ended,
        transcript.cause,
        is_new=not transcript.was_read,
        num_missing=transcript.num_missing,
        from_engine=True,
    )


def answer_of_run(row: Mapping[str, Any]) -> Answer:
    """Make an answer of a kept run."""
    request_id = f"run-{row['run']}"
    result = GenerationResult(request_id, row["prompt"])
    result.restore(row)
    return Answer(request_id, result, row["engine"], row["time"], row["time"], row["error"])


def merged(own: Iterable[Answer], kept: Iterable[Answer]) -> list[Answer]:
    """Merge this kernel's answers with those that engines have kept: each once, the latest first.

    This kernel's answer has more to tell (log probabilities, times), unless it broke off before the engine's.
    """
    answers = {answer.request_id: answer for answer in own}
    for answer in kept:
        mine = answers.get(answer.request_id)
        if mine is None or (mine.ended is not None and mine.num_tokens < answer.num_tokens):
            answers[answer.request_id] = answer
    return sorted(answers.values(), key=lambda answer: answer.submitted, reverse=True)


def selected(answers: Sequence[Answer], which: str) -> Answer | None:
    """Find the answer of a number, 1 being the latest, or of a request id; None: there is none."""
    if which.isdecimal() and 1 <= int(which) <= len(answers):
        return answers[int(which) - 1]
    return next((answer for answer in answers if answer.request_id == which), None)
