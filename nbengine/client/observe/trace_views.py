"""The views that a follower of an engine core has of requests and steps."""

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
    """Prompt tokens that were found in the prefix cache at the first admission; -1 before it."""
    num_preemptions: int = 0
    first_token_at: float | None = None
    """The time of the first token; None before it,
    or if its message was lost or sent before the follower came."""
    ended_at: float | None = None
    finish_reason: str | None = None
    """The reason of the end; None even after the end if the message that told it was lost."""
    block_ids: list[int] = field(default_factory=list)
    """The block tables, one for each group of the model's layers, column by column; -1 where a window has passed.
    Empty unless it runs."""
    prefill_until: int = 0
    """Tokens before this position belong to the prompt or were lost in a preemption;
    those after it are decoded."""

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and output tokens so far."""
        return self.added.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True)
class StepView:
    """A step; `numbers`, `num_tokens` and `num_computed` are parallel.

    Steps that do the same share the lists.
    """

    step: int
    time: float
    """The time at which the step was planned."""
    numbers: Sequence[int]
    num_tokens: Sequence[int]
    num_computed: Sequence[int]
    admitted: Sequence[int] = ()
    """Numbers of the requests that were admitted; tokens that they had computed already are prefix hits."""
    resumed: Sequence[int] = ()
    """Numbers of `admitted` requests that had been preempted."""
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
    """Seconds from the plan until the outcome was taken in; None before."""
    num_running: int = 0
    """The number of running requests after planning; the fields below are of the same moment."""
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0


class Advanced(Sequence[int]):
    """The numbers of `base`, each greater by `by`: many steps share one list in this way."""

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
