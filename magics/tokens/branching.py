"""This module goes on from another token: it has the tree of an answer and of its alternatives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from nbengine.checks import require_int
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.magics.generation.readiness import wake_if_asleep
from nbengine.magics.generation.request import Origin, Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Generation
from nbengine.magics.generation.view import UPDATE_SECONDS
from nbengine.magics.tokens.branch import Branch
from nbengine.outputs import RequestOutput
from nbengine.plain import plain
from nbengine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nbengine.frontend.async_llm import AsyncLLM

_EXCERPT = 60
"""The most characters of a text that `print(tree)` shows."""


class BranchTree:
    """The answers to one prompt and all their branches, in the order in which they were begun.

    `tree[0]` is the first answer; `print(tree)` draws the tree. Safe on any thread. Copies, also pickled ones,
    have all answers, and cannot branch.
    """

    def __init__(self, result: GenerationResult, origin: Origin) -> None:
        self.origin = origin
        self.listeners: list[Callable[[Branch], object]] = []
        """Functions that are called when a branch begins, grows or ends, on the thread that noticed."""
        self._result = result
        self._lock = threading.Lock()
        self._nodes = [Branch(self, index, result, index=index) for index in range(origin.params.n)]

    @classmethod
    def of(
        cls, llm: AsyncLLM, output: RequestOutput, params: SamplingParams, *, cache_salt: str | None = None
    ) -> BranchTree:
        """Make the tree of an answer that a script got from an `AsyncLLM` with `params` and `cache_salt`."""
        result = GenerationResult(output.request_id, output.prompt or "")
        result.absorb(output)
        result.tree = cls(result, Origin(llm, params, cache_salt))
        return result.tree

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {**self.__dict__, "_lock": None, "listeners": [], "_nodes": list(self._nodes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def roots(self) -> list[Branch]:
        """List the first answers, of which there are several with `-n`."""
        return [node for node in self if node.parent is None]

    @property
    def leaves(self) -> list[Branch]:
        """List the answers that no other one branches from."""
        return [node for node in self if not node.children]

    def paths(self) -> list[list[Branch]]:
        """List the paths from a first answer to each leaf."""
        return [leaf.path for leaf in self.leaves]

    def branch(self, position: int, token: int | str, *, node: Branch | None = None) -> Branch:
        """Go on from `node`, the first answer if None; see `GenerationResult.branch`."""
        node = node or self._nodes[0]
        token_id = self._checked_token(node, self._checked_position(node, position), token)
        while node.parent is not None and node.position is not None and position <= node.position:
            node = node.parent
        prompt: dict[str, Any] = {"prompt_token_ids": self._prompt_token_ids()}
        if self.origin.params.thinking_budget is not None:
            prompt["reasoning"] = self.origin.reasoning
        if self.origin.cache_salt is not None:
            prompt["cache_salt"] = self.origin.cache_salt
        request = Request(
            replace(self.origin, params=self._branch_params()),
            prompt,
            self._result.prompt,
            rank=self._rank(node),
            written=[*node.token_ids[:position], token_id],
        )
        wake_if_asleep(self.origin.client)
        request.send(foreground=False)
        view = _BranchView(self.notify)
        with self._lock:
            branch = Branch(
                self,
                len(self._nodes),
                request.result,
                parent=node,
                position=position,
                token_id=token_id,
            )
            view.branch = branch
            self._nodes.append(branch)
            node.children.append(branch)
        self.notify(branch)
        self.origin.ongoing.add_background(branch.run(Generation(request, view, [self.origin.client])))
        return branch

    def existing(self, node: Branch, position: int, token_id: int) -> Branch | None:
        """Find a branch that would say the same as a new one; None if there is none."""
        same = (
            branch
            for branch in self
            if branch.token_id == token_id
            and branch.position == position
            and branch.token_ids[:position] == node.token_ids[:position]
            and branch.finish_reason != "abort"
        )
        return next(same, None) if self.origin.is_repeatable else None

    def notify(self, branch: Branch) -> None:
        """Call the listeners for a branch that has changed."""
        for listener in list(self.listeners):
            listener(branch)

    def abort_first(self) -> None:
        """End the request of the first answers."""
        self.origin.client.abort_soon(self._result.request_id)

    def _branch_params(self) -> SamplingParams:
        return msgspec.structs.replace(
            self.origin.params,
            n=1,
            # The prompt has been truncated already.
            truncate_prompt_tokens=None,
            # Prompt log probabilities would keep the request from the prefix cache.
            prompt_logprobs=None,
            output_kind=RequestOutputKind.DELTA,
        )

    def _prompt_token_ids(self) -> list[int]:
        if self.origin.refusal:
            raise NBEngineError(f"request {self._result.request_id} cannot branch: {self.origin.refusal}")
        token_ids = self._result.prompt_token_ids
        if not token_ids:
            raise NBEngineError(
                f"request {self._result.request_id} cannot branch: its prompt has no tokens (it was given as embeddings)"
            )
        return token_ids

    def _rank(self, node: Branch) -> int | None:
        """Return the rank that has the beginning in its prefix cache; None unless it takes requests."""
        ranks = node.metrics.data_parallel_ranks
        there = self.origin.client.engine_ranks
        return ranks[0] if len(there) > 1 and len(ranks) == 1 and ranks[0] in there else None

    @staticmethod
    def _checked_position(node: Branch, position: object) -> int:
        position = require_int("position", position)
        count = len(node.token_ids)
        if not 0 <= position < count:
            allowed = (
                f"in [0, {count}), for the answer has {count} tokens" if count else "the position of a token"
            )
            raise InvalidArgumentError("position", position, allowed)
        return position

    @staticmethod
    def _checked_token(node: Branch, position: int, token: object) -> int:
        token = plain(token)
        if isinstance(token, int) and not isinstance(token, bool):
            if token < 0:
                raise InvalidArgumentError("token", token, "a token id, 0 or greater")
            return token
        if not isinstance(token, str):
            raise InvalidTypeError("token", token, "a token id, or the text of an alternative")
        entries = node.logprobs
        if entries is None:
            raise InvalidArgumentError(
                "token", token, "a token id: alternatives are known by their text with --logprobs"
            )
        texts = {
            token_id: logprob.decoded_token
            for token_id, logprob in entries[position].items()
            if logprob.decoded_token
        }
        found = [token_id for token_id, text in texts.items() if text == token]
        if len(found) != 1:
            raise InvalidArgumentError(
                "token", token, f"a token id, or one of the texts at position {position}: {[*texts.values()]}"
            )
        return found[0]

    def __getitem__(self, node_id: int) -> Branch:
        return self._nodes[node_id]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Branch]:
        with self._lock:
            return iter(list(self._nodes))

    def __str__(self) -> str:
        return "\n".join(line for root in self.roots for line in _drawn(root, "", ""))

    def __repr__(self) -> str:
        return str(self)


class _BranchView:
    """The view of a branch, which only notifies the tree's listeners."""

    interval = UPDATE_SECONDS
    key = ""

    def __init__(self, notify: Callable[[Branch], None]) -> None:
        self.branch: Branch | None = None
        self._notify = notify

    def update(self, result: GenerationResult) -> None:
        del result
        if self.branch is not None:
            self._notify(self.branch)

    def finish(self, result: GenerationResult, note: str = "") -> None:
        if self.branch is not None:
            self.branch.error = note
        self.update(result)

    def show_waiting(self, line: str) -> bool:
        del line
        return False


def _drawn(node: Branch, first: str, others: str) -> Iterator[str]:
    text = node.text if len(node.text) <= _EXCERPT else node.text[: _EXCERPT - 1] + "…"
    state = node.finish_reason or ("failed" if node.error else "running")
    what = f"{node.label!r} at {node.position}: " if node.parent is not None else ""
    yield f"{first}{node.id}  {what}{text!r}  {state}, {len(node.token_ids)} tokens"
    for child in node.children:
        last = child is node.children[-1]
        yield from _drawn(child, others + ("└─ " if last else "├─ "), others + ("   " if last else "│  "))
