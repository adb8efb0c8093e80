"""What `%%generate` leaves behind: the result, and with `-a` a handle to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from IPython.core.getipython import get_ipython

from nbengine.errors import IncompleteOutputError, InvalidArgumentError, NBEngineError
from nbengine.magics.generation.diff import AnswerDiff, Earlier
from nbengine.magics.interrupts import ticking
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, joined

if TYPE_CHECKING:
    from nbengine.magics.tokens.branch import Branch
    from nbengine.magics.tokens.branching import BranchTree

UNREADABLE_JSON = (ValueError, RecursionError)
"""What `json` raises: of text that is no JSON, of longer numbers and deeper nesting than Python takes."""
_NOTHING = CompletionOutput(0, "", [])
"""The first completion before it begins."""

R = TypeVar("R")


class ShownOnce:
    """What a cell leaves behind; its repr is not shown where the text has just streamed into the same cell."""

    _silent_in: int | None = None

    def silence_once(self) -> None:
        """Let the next display pass in silence, if it is the running cell's: the text has just streamed into it."""
        self._silent_in = _execution()

    def _ipython_display_(self) -> None:
        silent_in, self._silent_in = self._silent_in, None
        if silent_in is None or silent_in != _execution():
            raise NotImplementedError  # IPython then shows the repr


def _execution() -> int | None:
    shell = get_ipython()
    return None if shell is None else shell.execution_count


class GenerationResult(ShownOnce):
    """The answer to one prompt, which grows while it streams.

    `outputs` has all completions, of which there are several with `-n`; `text`, `token_ids`, `logprobs`,
    `finish_reason` and `stop_reason` are the first one's. `finish_reason` is None until its end, then "stop", "length"
    or "abort"; `str(result)` is the text, so that `{result}` in a later prompt is the text too. `num_cached_tokens` of
    the `num_prompt_tokens` prompt tokens came from the prefix cache.
    """

    def __init__(self, request_id: str, prompt: str) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.outputs: list[CompletionOutput] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finished = False
        """Whether nothing more will come."""
        self.prompt_token_ids: list[int] | None = None
        """The prompt as the model has it, once the answer has begun; None for embeddings."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics()
        self.is_json = False
        """The answer was asked for with `--json`."""
        self.names_ranks = False
        """There are several engine cores, and it is worth saying which one has answered."""
        self.previous: Earlier | None = None
        """What the same cell had asked and got before."""
        self._whole: RequestOutput | None = None
        self._tree: BranchTree | None = None

    def absorb(self, output: RequestOutput) -> None:
        """Add what is new: `output` is a delta."""
        whole = self._whole = output if self._whole is None else joined([self._whole, output])
        self.outputs = whole.outputs
        self.prompt_logprobs = whole.prompt_logprobs
        self.finished = whole.finished
        self.num_cached_tokens = whole.num_cached_tokens
        self.metrics = whole.metrics
        if whole.prompt_token_ids is not None:
            self.prompt_token_ids = whole.prompt_token_ids
            self.num_prompt_tokens = len(whole.prompt_token_ids)

    def abort(self, reason: str = "abort") -> None:
        """Nothing more will come, although the answer is not complete."""
        self.finished = True
        self.outputs = [
            completion if completion.finished else msgspec.structs.replace(completion, finish_reason=reason)
            for completion in self.outputs or [_NOTHING]
        ]

    @property
    def text(self) -> str:
        """The text, of the first completion."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """The tokens, of the first completion."""
        return self._first.token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """One entry a token of the first completion, with `--logprobs`."""
        return self._first.logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended."""
        return self._first.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token that ended the first completion."""
        return self._first.stop_reason

    @property
    def value(self) -> Any:
        """What the first completion stands for: with `--json` the parsed JSON, else the text.

        Raises:
            IncompleteOutputError: the JSON is not complete, and why; or Python cannot read it.
        """
        if not self.is_json:
            return self.text
        try:
            return json.loads(self.text)
        except UNREADABLE_JSON as error:
            raise IncompleteOutputError(_why_no_value(self, error)) from error

    @property
    def tree(self) -> BranchTree:
        """The answers and what branches from them.

        Raises:
            NBEngineError: the result does not know who has answered.
        """
        if self._tree is None:
            raise NBEngineError(f"request {self.request_id} has no tree: its result does not know its engine")
        return self._tree

    @tree.setter
    def tree(self, tree: BranchTree) -> None:
        self._tree = tree

    def branch(self, position: int, token: int | str, *, answer: int = 0) -> Branch:
        """Go on from another token at a position of an answer, in the background; what stands before it is computed
        already. Sampling parameters stay the same, and the length counts from the beginning of the answer.

        Args:
            position: of the token that is replaced, counted from 0.
            token: a token id, or the text of an alternative.
            answer: which of several, counted from 0.

        Raises:
            InvalidArgumentError: there is no such token or position.
            NBEngineError: the answer cannot branch, or the engine cannot be reached.
        """
        tree = self.tree
        if not 0 <= answer < len(tree.roots):
            raise InvalidArgumentError("answer", answer, f"in [0, {len(tree.roots)})")
        return tree.branch(position, token, node=tree.roots[answer])

    @property
    def _first(self) -> CompletionOutput:
        return self.outputs[0] if self.outputs and self.outputs[0].index == 0 else _NOTHING

    def diff(self, other: GenerationResult | str | None = None) -> AnswerDiff:
        """The words that differ from another answer; from the cell's previous one if none is given.

        Raises:
            InvalidArgumentError: none is given, and there is no previous one.
        """
        if other is None:
            if self.previous is None:
                raise InvalidArgumentError(
                    "other", other, "an answer to compare with: the cell had none before"
                )
            earlier = self.previous
        else:
            prompt = other.prompt if isinstance(other, GenerationResult) else self.prompt
            earlier = Earlier(prompt, str(other))
        return AnswerDiff(earlier, Earlier(self.prompt, self.text))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        state = f"finish_reason={self.finish_reason!r}" if self.finished else "running"
        count = sum(len(completion.token_ids) for completion in self.outputs)
        return f"GenerationResult({self.request_id!r}, {count} tokens, {state})"


def _why_no_value(result: GenerationResult, error: Exception) -> str:
    if result.finish_reason == "stop" and not isinstance(error, json.JSONDecodeError):
        return f"the answer is JSON that cannot be read: {error} (.text has it)"
    reasons = {
        None: "it is still being written",
        "length": "it reached the limit of tokens; raise --max-tokens",
        "abort": "it was ended early",
        "stop": "a stop string or stop token ended it",
    }
    reason = reasons.get(result.finish_reason, f"it ended with {result.finish_reason!r}")
    return f"the answer is not complete JSON: {reason} (.text has what there is)"


class Handle(Generic[R]):
    """What goes on while other cells run. `await handle` gives the result, too."""

    def __init__(self, name: str, partial: R, cancel: Callable[[], None]) -> None:
        self._name = name
        self._partial = partial
        self._cancel = cancel
        self._future: concurrent.futures.Future[R] = concurrent.futures.Future()

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> R:
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

    def __await__(self) -> Generator[Any, None, R]:
        return self._wait().__await__()

    async def _wait(self) -> R:
        async with ticking():
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {'done' if self.done else 'running'})"


class GenerationHandle(Handle[GenerationResult]):
    """A generation that goes on while other cells run."""

    def __init__(self, partial: GenerationResult, cancel: Callable[[], None]) -> None:
        super().__init__(partial.request_id, partial, cancel)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._partial.request_id

    @property
    def text(self) -> str:
        """The text so far."""
        return self._partial.text
