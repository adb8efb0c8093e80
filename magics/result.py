"""What `%%generate` leaves behind: the result, and with `-a` a handle to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Generator
from typing import Any

from nbengine.errors import IncompleteOutputError
from nbengine.magics.interrupts import ticking
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class GenerationResult:
    """The answer to one prompt, which grows while it streams.

    `finish_reason` is None until the end, then "stop", "length" or "abort"; `str(result)` is the text, so that
    `{result}` in a later prompt is the text too. `num_cached_tokens` of the `num_prompt_tokens` prompt tokens came
    from the prefix cache.
    """

    def __init__(self, request_id: str, prompt: str) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics()
        self.is_json = False
        """The answer was asked for with `--json`."""
        self._displayed = True

    def absorb(self, output: RequestOutput) -> None:
        """Add what is new: `output` is a delta."""
        self.num_cached_tokens = output.num_cached_tokens
        self.metrics = output.metrics
        if output.prompt_token_ids is not None:
            self.num_prompt_tokens = len(output.prompt_token_ids)
        for delta in output.outputs:
            self.text += delta.text
            self.token_ids.extend(delta.token_ids)
            if delta.logprobs:
                self.logprobs = [*(self.logprobs or []), *delta.logprobs]
            if delta.finish_reason is not None:
                self.finish_reason = delta.finish_reason
                self.stop_reason = delta.stop_reason

    def abort(self) -> None:
        """Nothing more will come, although the answer is not complete."""
        if self.finish_reason is None:
            self.finish_reason = "abort"

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def value(self) -> Any:
        """What the answer stands for: with `--json` the parsed JSON, else the text.

        Raises:
            IncompleteOutputError: the JSON is not complete, and why.
        """
        if not self.is_json:
            return self.text
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            raise IncompleteOutputError(_why_incomplete(self)) from error

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions, as `RequestOutput.outputs` has them."""
        return [
            CompletionOutput(
                index=0,
                text=self.text,
                token_ids=list(self.token_ids),
                logprobs=self.logprobs,
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
            )
        ]

    def silence_once(self) -> None:
        """Let the next display pass in silence: the text has just streamed into the same cell."""
        self._displayed = False

    def _ipython_display_(self) -> None:
        if self._displayed:
            raise NotImplementedError  # IPython then shows the repr
        self._displayed = True

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        state = f"finish_reason={self.finish_reason!r}" if self.finished else "running"
        return f"GenerationResult({self.request_id!r}, {len(self.token_ids)} tokens, {state})"


def _why_incomplete(result: GenerationResult) -> str:
    reasons = {
        None: "it is still being written",
        "length": "it reached the limit of tokens; raise --max-tokens",
        "abort": "it was ended early",
        "stop": "a stop string or stop token ended it",
    }
    reason = reasons.get(result.finish_reason, f"it ended with {result.finish_reason!r}")
    return f"the answer is not complete JSON: {reason} (.text has what there is)"


class GenerationHandle:
    """A generation that goes on while other cells run. `await handle` gives the result, too."""

    def __init__(self, partial: GenerationResult, cancel: Callable[[], None]) -> None:
        self._partial = partial
        self._cancel = cancel
        self._future: concurrent.futures.Future[GenerationResult] = concurrent.futures.Future()

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._partial.request_id

    @property
    def text(self) -> str:
        """The text so far."""
        return self._partial.text

    @property
    def done(self) -> bool:
        """Whether the generation has ended, in whatever way."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the result.

        Raises:
            TimeoutError: it was not there after `timeout` seconds.
            NBEngineError: the request or its engine failed.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """End the generation; its result is what there is by now, with `finish_reason="abort"`."""
        if not self.done:
            self._cancel()

    def settle(self, error: BaseException | None = None) -> None:
        """Wake whoever waits: with the result, or with the error that ended it."""
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._partial)

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._wait().__await__()

    async def _wait(self) -> GenerationResult:
        async with ticking():
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def __repr__(self) -> str:
        return f"GenerationHandle({self.request_id!r}, {'done' if self.done else 'running'})"
