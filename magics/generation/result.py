"""The result that `%%generate` leaves in the notebook, and the handle to it with `-a`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from IPython.core.getipython import get_ipython

from nbengine.errors import IncompleteOutputError, InvalidArgumentError, NBEngineError
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.runs.run import KeptRun
from nbengine.magics.answers.diff import AnswerDiff, Earlier
from nbengine.magics.conversations.answer import answer_in, reading_of
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.waits import LOOK_SECONDS, WaitNotice
from nbengine.magics.interrupts import ticking
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, joined

if TYPE_CHECKING:
    from nbengine.magics.tokens.branch import Branch
    from nbengine.magics.tokens.branching import BranchTree

UNREADABLE_JSON = (ValueError, RecursionError)
"""Errors that `json` raises: for text that is no JSON, and for numbers and nesting that Python refuses."""
_NOTHING = CompletionOutput(0, "", [])
"""The first completion before it begins."""

_LOST_HANDLE = (
    "this is a copy of a handle whose generation was under way; it has what was written then (.text, .results), "
    "and the rest comes to the handle itself alone"
)

R = TypeVar("R")


class ShownOnce:
    """A result of a cell; its repr is not shown where the text has just streamed into the same cell."""

    _silent_in: int | None = None

    def silence_once(self) -> None:
        """Skip the next display if it is the running cell's: the text has just streamed into that cell."""
        self._silent_in = _execution()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another object, which no cell has streamed yet.
        return {name: value for name, value in self.__dict__.items() if name != "_silent_in"}

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
    `finish_reason` and `stop_reason` are those of the first one. `finish_reason` is None until its end, then
    "stop", "length" or "abort"; `str(result)` is the text, and so is `{result}` in a later prompt. Of the
    `num_prompt_tokens` prompt tokens, `num_cached_tokens` came from the prefix cache.

    A result can be copied and pickled. The copy is data without an engine: it cannot branch, and has ended
    with "abort" if the answer was still being written.
    """

    def __init__(self, request_id: str, prompt: str) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.outputs: list[CompletionOutput] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finished = False
        """Nothing more will come."""
        self.prompt_token_ids: list[int] | None = None
        """The prompt as the model receives it, once the answer has begun; None for embeddings."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics()
        self.is_json = False
        """The answer was asked for with `--json`."""
        self.reading: AnswerReading = reading_of({})
        """The way in which reasoning is told from the answer."""
        self.max_tokens: int | None = None
        """The most tokens that were asked for; None: as many as there is room for."""
        self.names_ranks = False
        """There are several engine cores, so the footer says which one has answered."""
        self.kept_tokens: list[int] | None = None
        """The number of tokens of each completion that a kept run had; None for an answer of an engine."""
        self.kept_figures: Mapping[str, Any] = {}
        """The figures of that run."""
        self.kept_run: KeptRun | None = None
        """The run that is kept of it, once it has ended; None where none is."""
        self.previous: Earlier | None = None
        """The prompt and answer that the same cell had before."""
        self._whole: RequestOutput | None = None
        self._tree: BranchTree | None = None

    def absorb(self, output: RequestOutput) -> None:
        """Add the new part, which `output` has as a delta."""
        whole = self._whole = output if self._whole is None else joined([self._whole, output])
        self.outputs = whole.outputs
        self.prompt_logprobs = whole.prompt_logprobs
        self.finished = whole.finished
        self.num_cached_tokens = whole.num_cached_tokens
        self.metrics = whole.metrics
        if whole.prompt_token_ids is not None:
            self.prompt_token_ids = whole.prompt_token_ids
            self.num_prompt_tokens = len(whole.prompt_token_ids)

    def restore(self, run: Mapping[str, Any]) -> None:
        """Take the answer of a run that was kept; its tokens are known by their number alone."""
        several = run["outputs"] or [{key: run[key] for key in ("text", "finish_reason", "tokens")}]
        self.outputs = [
            CompletionOutput(index, each["text"], [], finish_reason=each["finish_reason"])
            for index, each in enumerate(several)
        ]
        self.kept_tokens = [each["tokens"] for each in several]
        self.num_prompt_tokens, self.num_cached_tokens = run["prompt_tokens"], run["cached_tokens"]
        self.kept_figures = run["metrics"]
        self.kept_run = KeptRun(run["run"])
        self.finished = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or an unpickled result is data: of an answer under way it has what was written then.
        self.__dict__.update(state)
        if not self.finished:
            self.abort()

    def abort(self, reason: str = "abort") -> None:
        """End an answer that is not complete."""
        self.finished = True
        self.outputs = [
            completion if completion.finished else msgspec.structs.replace(completion, finish_reason=reason)
            for completion in self.outputs or [_NOTHING]
        ]

    @property
    def text(self) -> str:
        """Return the text of the first completion."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of the first completion."""
        return self._first.token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Return one entry for each token of the first completion; None without `--logprobs`."""
        return self._first.logprobs

    @property
    def finish_reason(self) -> str | None:
        """Say why the first completion ended: "stop", "length", "abort", or None before its end."""
        return self._first.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Return the stop string or token that ended the first completion."""
        return self._first.stop_reason

    @property
    def value(self) -> Any:
        """Return the value of the first completion: with `--json` the parsed JSON, otherwise the text.

        Raises:
            IncompleteOutputError: the JSON is not complete, or Python cannot read it; the message says why.
        """
        if not self.is_json:
            return self.text
        try:
            return json.loads(self.without_reasoning(self._first).text)
        except UNREADABLE_JSON as error:
            # The error is shown in one line: the place where the parser met the end does not explain the end.
            raise without_traceback(IncompleteOutputError(_why_no_value(self, error))) from None

    def num_tokens_of(self, completion: CompletionOutput) -> int:
        """Count the tokens of a completion."""
        return len(completion.token_ids) if self.kept_tokens is None else self.kept_tokens[completion.index]

    def without_reasoning(self, completion: CompletionOutput) -> CompletionOutput:
        """Return a completion with the text behind its reasoning, or as it is while that goes on."""
        answer = answer_in(completion.text, self.reading)
        if answer.is_reasoning or answer.text == completion.text:
            return completion
        return msgspec.structs.replace(completion, text=answer.text)

    @property
    def tree(self) -> BranchTree:
        """Return the tree of the answers and their branches.

        Raises:
            NBEngineError: the result does not know which engine has answered.
        """
        if self._tree is None:
            raise NBEngineError(f"request {self.request_id} has no tree: its result does not know its engine")
        return self._tree

    @tree.setter
    def tree(self, tree: BranchTree) -> None:
        self._tree = tree

    def branch(self, position: int, token: int | str, *, answer: int = 0) -> Branch:
        """Go on from another token at a position of an answer, in the background.

        The tokens before it are computed already. Sampling parameters stay the same, and the length counts
        from the beginning of the answer.

        Args:
            position: the position of the token that is replaced, counted from 0.
            token: a token id, or the text of an alternative.
            answer: the number of the completion, counted from 0.

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
        """Compare the words with another answer, or with the cell's previous one if none is given.

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
        "length": _which_limit(result),
        "abort": "it was ended early",
        "stop": "a stop string or stop token ended it",
    }
    reason = reasons.get(result.finish_reason, f"it ended with {result.finish_reason!r}")
    return f"the answer is not complete JSON: {reason} (.text has the part that was written)"


def _which_limit(result: GenerationResult) -> str:
    limit = result.max_tokens
    if limit is None or len(result.token_ids) < limit:
        return (
            f"it was cut off after {len(result.token_ids)} tokens, where the engine's max_model_len leaves no more room; "
            "shorten the prompt, or start the engine with a greater --max-model-len"
        )
    return f"it was cut off at max_tokens={limit}; raise --max-tokens, or NBEngine.max_tokens for all that follow"


class Handle(Generic[R]):
    """A handle to something that goes on while other cells run; `await handle` gives the result, too.

    A copy, also a pickled one, has the result, or the error, of a handle that has ended. The copy of another
    one has lost its connection: its `result` raises an error that says so.
    """

    def __init__(self, name: str, partial: R, cancel: Callable[[], None], waits: WaitNotice) -> None:
        """Make the handle of `partial`, which grows; `waits` looks at the engines in the background."""
        self._name = name
        self._partial = partial
        self._cancel = cancel
        self._waits = waits
        self._future: concurrent.futures.Future[R] = concurrent.futures.Future()

    @property
    def done(self) -> bool:
        """Return whether it has ended, in whatever way."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result; where it does not come, the waiting cell says why.

        Raises:
            TimeoutError: there was no result after `timeout` seconds.
            NBEngineError: the request or its engine failed.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        notice = self._waits.again()
        while (left := end - time.monotonic()) > LOOK_SECONDS and not self.done:
            concurrent.futures.wait([self._future], min(left, LOOK_SECONDS))
            notice.look()
        return self._future.result(None if timeout is None else max(left, 0))

    def cancel(self) -> None:
        """End the generation; its result is what has been written, with `finish_reason="abort"`."""
        if not self.done:
            self._cancel()

    def settle(self, error: BaseException | None = None) -> None:
        """Wake those who wait, with the result or with the error that ended it."""
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._partial)

    def __getstate__(self) -> dict[str, Any]:
        error = self._future.exception() if self.done else NBEngineError(f"{self._name}: {_LOST_HANDLE}")
        live = ("_future", "_cancel", "_waits")
        own = {name: value for name, value in self.__dict__.items() if name not in live}
        return {**own, "_error": error}

    def __setstate__(self, state: dict[str, Any]) -> None:
        error = state.pop("_error")
        self.__dict__.update(state)
        self._cancel = _nothing
        self._waits = WaitNotice()
        self._future = concurrent.futures.Future()
        self.settle(error)

    def __await__(self) -> Generator[Any, None, R]:
        return self._wait().__await__()

    async def _wait(self) -> R:
        async with ticking(), self._waits.again().looking():
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {'done' if self.done else 'running'})"


def _nothing() -> None:
    """Cancel nothing: what a copy stands for is not its own."""


class GenerationHandle(Handle[GenerationResult]):
    """A generation that goes on while other cells run."""

    def __init__(self, partial: GenerationResult, cancel: Callable[[], None], waits: WaitNotice) -> None:
        super().__init__(partial.request_id, partial, cancel, waits)

    @property
    def request_id(self) -> str:
        """Return the id of the request."""
        return self._partial.request_id

    @property
    def text(self) -> str:
        """Return the text that has been written so far."""
        return self._partial.text
