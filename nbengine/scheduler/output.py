"""What the scheduler tells the workers each step, and what they tell it back."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbengine.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request that the workers see for the first time."""

    req_id: str
    token_ids: list[int]
    """Prompt tokens."""
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    """Tokens whose keys and values already lie in the blocks (prefix cache)."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the workers know, in struct-of-arrays form: only what changed since they last ran.

    For requests in `resumed_req_ids` (preempted earlier) `new_block_ids` replaces the block table, otherwise it
    extends it. `new_token_ids` is empty unless the sampled tokens are not known to the worker (pipeline parallel).
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step: for every scheduled request, how many of its next tokens are computed."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    """Ended since the previous step: workers forget them before anything else."""
    preempted_req_ids: set[str] = field(default_factory=set)
    """Lost their blocks in this step; workers keep their tokens for the resumption."""
    step: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """Sampled tokens of one step: `sampled_token_ids[i]` belongs to `req_ids[i]`, and is empty for a request
    whose prompt is not completely computed yet."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
