"""Requests and steps as a follower of an engine core sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from nbengine.metrics.trace import RequestAdded


@dataclass(slots=True)
class RequestView:
    """A request as its engine core has published it."""

    added: RequestAdded
    state: str = "waiting"
    """"waiting", "running", "preempted" or "finished"."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int = 0
    first_token_at: float | None = None
    """None of a request that has tokens, too, when the first one came before it was followed or was lost."""
    ended_at: float | None = None
    finish_reason: str | None = None
    """None for a request that has ended, too, when the message that said how was lost."""
    block_ids: list[int] = field(default_factory=list)
    """While it runs."""
    prefill_until: int = 0
    """Tokens before this position belong to the prompt or were lost in a preemption; those after it are decoded."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.added.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True)
class StepView:
    """A step; `numbers`, `num_tokens` and `num_computed` are parallel. Steps that do the same share the lists."""

    step: int
    time: float
    """When it was planned."""
    numbers: Sequence[int]
    num_tokens: Sequence[int]
    num_computed: Sequence[int]
    admitted: Sequence[int] = ()
    """Numbers; what they had computed already is their prefix hit."""
    resumed: Sequence[int] = ()
    """Those of `admitted` that had been preempted."""
    preempted: Sequence[int] = ()
    """Numbers of requests that lost their blocks to this step, or after the one before."""
    finished: Sequence[int] = ()
    """Numbers of requests that ended after this step was planned and before the next one."""
    prefills: Sequence[int] = ()
    """Numbers of the requests of which prompt tokens, or tokens lost in a preemption, were computed."""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled: int = 0
    seconds: float | None = None
    """From the plan until its outcome was taken in; None before."""
    num_running: int = 0
    """After planning, as all that follows."""
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0


class Advanced(Sequence[int]):
    """The numbers of `base`, each greater by `by`; what many steps have instead of a list of their own."""

    __slots__ = ("base", "by")

    def __init__(self, base: Sequence[int], by: int) -> None:
        self.base, self.by = base, by

    def __len__(self) -> int:
        return len(self.base)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found = self.base[index]
        return found + self.by if isinstance(found, int) else Advanced(found, self.by)

    def __iter__(self) -> Iterator[int]:
        by = self.by
        return (value + by for value in self.base)
