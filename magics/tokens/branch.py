"""One answer of a tree of answers."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from nbengine.magics.generation.result import GenerationResult, Handle
from nbengine.magics.generation.stream import Generation
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics

if TYPE_CHECKING:
    from nbengine.magics.tokens.branching import BranchTree


class Branch:
    """A node of a `BranchTree`: an answer from first to last token; it shares its beginning with its parent.

    The tokens before `position` are those of the parent; at `position` the branch has `token_id` instead.
    `token_ids`, `logprobs` and `text` are those of the whole answer, which grows while it is written.
    `metrics` are those of the branch's own request. Of the `num_prompt_tokens` tokens before the branch's own
    part, the shared ones among them, `num_cached_tokens` came from the prefix cache. The first answers have
    no `parent`, no `position` and no `token_id`. `await branch` and `branch.result()` wait for its end and
    give the branch; `str(branch)` is its text.
    """

    def __init__(
        self,
        tree: BranchTree,
        node_id: int,
        result: GenerationResult,
        *,
        index: int = 0,
        parent: Branch | None = None,
        position: int | None = None,
        token_id: int | None = None,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.position = position
        self.token_id = token_id
        self.children: list[Branch] = []
        self.error = ""
        """The reason why the branch could not be written to its end; empty if there is none."""
        self.own = result
        """The result of the branch's own request."""
        self._tree = tree
        self._index = index
        self._handle: Handle[GenerationResult] | None = None
        self._written: list[int] = []
        self._written_logprobs: list[dict[int, Logprob]] = []
        if parent is not None and position is not None and token_id is not None:
            self._written = [*parent.token_ids[:position], token_id]
            before = parent.logprobs
            if before is not None:
                self._written_logprobs = [*before[:position], _moved_first(before[position], token_id)]

    @property
    def token_ids(self) -> list[int]:
        """Return all tokens of the answer."""
        return self._written + self._completion.token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Return one entry for each token, which begins with the token itself; None without `--logprobs`.

        Where a branch was begun with a token that was not among the alternatives, its log probability is NaN.
        """
        own = self._completion.logprobs
        if own is None and not self._written_logprobs:
            return None
        return self._written_logprobs + (own or [])

    @property
    def text(self) -> str:
        """Return the text of the whole answer."""
        return self._completion.text

    @property
    def finish_reason(self) -> str | None:
        """Say why the answer ended, None while it is being written."""
        return self._completion.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Return the stop string or token that ended the answer."""
        return self._completion.stop_reason

    @property
    def num_cached_tokens(self) -> int:
        """Count the tokens before the branch's own part whose keys and values were in the cache already."""
        return self.own.num_cached_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Count the tokens before the branch's own part: the prompt's and those shared with its parent."""
        return self.own.num_prompt_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """Return the times of the branch's own request."""
        return self.own.metrics

    @property
    def own_logprobs(self) -> list[dict[int, Logprob]]:
        """Return the entries of the tokens that the branch does not share with its parent."""
        return (self.logprobs or [])[self.position or 0 :]

    @property
    def own_token_ids(self) -> list[int]:
        """Return the tokens that are not shared with the parent: of a branch, `token_id` and what follows."""
        return self.token_ids[self.position or 0 :]

    @property
    def label(self) -> str:
        """Return the number of a first answer; for a branch, the text of its token, or the token's id."""
        if self.token_id is None or self.position is None or self.parent is None:
            return str(self.id + 1)
        entry = (self.parent.logprobs or [])[self.position : self.position + 1]
        known = entry[0].get(self.token_id) if entry else None
        return (known.decoded_token if known else None) or f"token {self.token_id}"

    @property
    def done(self) -> bool:
        """Return whether the answer has ended, in whatever way."""
        return self.own.finished

    @property
    def path(self) -> list[Branch]:
        """List the answers from the first one to this one."""
        return [self] if self.parent is None else [*self.parent.path, self]

    def branch(self, position: int, token: int | str) -> Branch:
        """Go on from another token of this answer; see `GenerationResult.branch`."""
        return self._tree.branch(position, token, node=self)

    def result(self, timeout: float | None = None) -> Branch:
        """Wait until the answer has ended.

        Raises:
            TimeoutError: the answer has not ended after `timeout` seconds.
            NBEngineError: the request or its engine failed.
        """
        if self._handle is not None:
            self._handle.result(timeout)
        return self

    def cancel(self) -> None:
        """End the answer; what has been written stays, with `finish_reason="abort"`."""
        if self._handle is not None:
            self._handle.cancel()
        elif not self.own.finished:
            self._tree.abort_first()

    def run(self, generation: Generation) -> Handle[GenerationResult]:
        """Begin to write in the background."""
        self._handle = generation.run_in_background()
        return self._handle

    @property
    def _completion(self) -> CompletionOutput:
        found = (completion for completion in self.own.outputs if completion.index == self._index)
        return next(found, CompletionOutput(self._index, "", []))

    def __await__(self) -> Generator[Any, None, Branch]:
        if self._handle is not None:
            yield from self._handle.__await__()
        return self

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        state = f"finish_reason={self.finish_reason!r}" if self.done else "running"
        at = f", {self.label!r} at {self.position}" if self.parent is not None else ""
        return f"Branch({self.id}{at}, {len(self.token_ids)} tokens, {state})"


def _moved_first(entry: dict[int, Logprob], token_id: int) -> dict[int, Logprob]:
    """Return the same entry, beginning with another token."""
    return {token_id: entry.get(token_id, Logprob(math.nan)), **entry}
