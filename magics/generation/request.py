"""One request of a magic: it is sent, its result takes in the outputs that come, and it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbengine.errors import NBEngineError
from nbengine.frontend.requests.output_interval import FOR_READERS
from nbengine.frontend.requests.reasoning import ReasoningMarks
from nbengine.magics.answers.kept import Answer
from nbengine.magics.generation.lost import LOST, LostClient
from nbengine.magics.generation.ongoing import OngoingRequests
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.waits import Rousable
from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.sampling_params import SamplingParams

_NEEDS_START = "its answer follows a grammar, which cannot begin in the middle"


class Collector(Protocol):
    """The part of `RequestOutputCollector` that a request reads."""

    request_id: str
    engine_request_id: str
    on_prompt_progress: Callable[[PromptProgress], object] | None

    async def get(self) -> RequestOutput:
        """Wait for the next output."""

    def get_nowait(self) -> RequestOutput | None:
        """Return the output that has come; None if there is none."""

    def get_blocking(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the next output in this thread."""


class RequestClient(Rousable, Protocol):
    """The part of `AsyncLLM` that requests use."""

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        data_parallel_rank: int | None = None,
        written: Sequence[int] = (),
        transcript: str | None = None,
        output_interval: float = 0.0,
    ) -> Collector:
        """Send a request, to one engine core of several where a rank is given, to go on behind `written`.

        With `transcript`, the prompt as it was typed, the engine keeps the answer. It may hold tokens for
        `output_interval` seconds.
        """

    def read_transcripts(self, request_ids: Iterable[str]) -> None:
        """Tell the engine, without waiting, that these answers have been read."""

    def abort_soon(self, request_id: str) -> None:
        """End a request, without waiting."""


@dataclass(frozen=True)
class Origin:
    """The origin of an answer: the client and the parameters with which it can go on from its middle."""

    client: RequestClient
    params: SamplingParams
    cache_salt: str | None = None
    ongoing: OngoingRequests = field(default_factory=OngoingRequests)
    reasoning: ReasoningMarks | None = None
    """The marks around the reasoning of its answers."""

    @property
    def refusal(self) -> str:
        """Say why no answer of this request can branch; empty if it can."""
        if isinstance(self.client, LostClient):
            return LOST
        return _NEEDS_START if self.params.structured_outputs is not None else ""

    def __getstate__(self) -> dict[str, Any]:
        # Copies of answers are data: they keep the name of the engine, and lose the connection.
        return {**self.__dict__, "client": LostClient(self.client.name), "ongoing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "ongoing": OngoingRequests()})

    @property
    def is_repeatable(self) -> bool:
        """Return whether the same question has the same answer."""
        return self.params.is_greedy or self.params.seed is not None


class Request:
    """A request that can be sent once; `collector` is None before, and when nothing more comes.

    `typed` is the prompt as the user typed it, and `written` has the tokens behind which the answer goes on.
    """

    def __init__(
        self,
        origin: Origin,
        prompt: Any,
        typed: str,
        *,
        rank: int | None = None,
        written: Sequence[int] = (),
    ) -> None:
        self.origin = origin
        self.result = GenerationResult("", typed)
        self.collector: Collector | None = None
        self.error: NBEngineError | None = None
        """The error with which the request was refused or has failed."""
        self.on_end: list[Callable[[NBEngineError | None], object]] = []
        """Functions that are called when the request ends, with the error if one ended it."""
        self.on_progress: Callable[[], object] | None = None
        """The function that the reader calls when more of a long prompt has been read, as `result.metrics` says."""
        self._prompt = prompt
        self._rank = rank
        self._written = written
        self._answer: Answer | None = None

    def send(self, *, foreground: bool, kept: bool = True) -> None:
        """Send the request.

        `foreground` says that the running cell waits for it, `kept` that `%engine recover` shows its answer.

        Raises:
            NBEngineError: the request is not possible, or the engine cannot be reached.
        """
        origin, result = self.origin, self.result
        self.collector = origin.client.submit(
            self._prompt,
            origin.params,
            data_parallel_rank=self._rank,
            written=self._written,
            transcript=result.prompt if kept else None,
            output_interval=FOR_READERS,
        )
        self.collector.on_prompt_progress = self._note_progress
        result.request_id = self.collector.request_id
        engine_request_id = self.collector.engine_request_id
        origin.ongoing.add(engine_request_id, foreground=foreground)
        if kept:
            self._answer = origin.ongoing.answers.begin(engine_request_id, result, origin.client.name)

    def _note_progress(self, progress: PromptProgress) -> None:
        self.result.metrics.prompt_progress = progress
        if self.on_progress is not None:
            self.on_progress()

    def abort(self) -> None:
        """Ask the engine to end the request if it has not ended."""
        if self.collector is not None:
            self.origin.client.abort_soon(self.result.request_id)

    def stop(self, reason: str = "abort") -> bool:
        """Expect nothing more, and return whether the answer is complete; what has arrived is kept."""
        if self.collector is not None:
            self.origin.ongoing.discard(self.collector.engine_request_id)
            if not self.result.finished:
                # An error that ended the stream is being raised already.
                with contextlib.suppress(NBEngineError):
                    output = self.collector.get_nowait()
                    if output is not None:
                        self.result.absorb(output)
        self.collector = None
        if self.result.finished:
            return True
        self.result.abort(reason)
        return False

    def end(self, error: NBEngineError | None = None, *, shown: bool) -> None:
        """Note the end, of a request that was stopped, and which error ended it.

        `shown` says that the user has seen all that there is to see. The engine then need not keep the answer
        at the expense of those that nobody has seen.
        """
        self.error = error
        if self._answer is not None:
            self.origin.ongoing.answers.end(self._answer, error)
            if shown:
                self.origin.client.read_transcripts([self._answer.request_id])
        for handler in self.on_end:
            handler(error)

    def fail(self, error: NBEngineError) -> None:
        """End the request with an error, which stays with it."""
        self.stop("error")
        self.end(error, shown=False)


def send_all(requests: Sequence[Request], *, foreground: bool) -> None:
    """Send requests; one that is refused ends with its error.

    Raises:
        NBEngineError: all were refused.
    """
    try:
        for request in requests:
            try:
                request.send(foreground=foreground)
            except NBEngineError as error:
                request.fail(error)
    except BaseException:
        for request in requests:
            if request.collector is not None:
                request.abort()
                request.end(shown=request.stop())
        raise
    errors = [request.error for request in requests if request.error is not None]
    if len(errors) == len(requests):
        raise errors[0]
