"""What the scheduler tells the workers each step, and what they tell it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbengine.ipc.messages import LogprobsLists
from nbengine.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class NewRequestData:
    """A request that the workers see for the first time."""

    req_id: str
    token_ids: list[int]
    """Prompt tokens; of a prompt given as embeddings, zeros."""
    sampling_params: SamplingParams | None
    """None for a pooling request."""
    block_ids: list[int]
    num_computed_tokens: int
    """Tokens whose keys and values already lie in the blocks (prefix cache)."""
    pooling_params: PoolingParams | None = None
    prompt_embeds: Any = None
    """Of a prompt given as embeddings: a tensor [prompt tokens, hidden size]."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the workers know, in struct-of-arrays form: only what changed since they last ran.

    For requests in `resumed_req_ids` (preempted earlier) `new_block_ids` replaces the block table, otherwise it
    extends it. `new_token_ids` has the tokens that were sampled since a request was last planned, for pipeline stages
    that do not sample; it is empty without pipeline parallelism.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_token_ids: dict[str, list[int]] = field(default_factory=dict)


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
    """Lost their blocks since the previous step; workers keep their tokens for the resumption."""
    incomplete_req_ids: set[str] = field(default_factory=set)
    """Have known tokens after those of this step, so that nothing is sampled for them."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Drafts that are computed after a request's last known token, and count in `num_scheduled_tokens`."""
    has_structured_output_requests: bool = False
    """Some request that gets a token has a grammar: a `GrammarOutput` is due before sampling."""
    step: int = 0

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to compute and nothing to tell the workers."""
        return not (self.total_num_scheduled_tokens or self.finished_req_ids or self.preempted_req_ids)


@dataclass(slots=True)
class GrammarOutput:
    """Which tokens the requests with a grammar may get in a step."""

    req_ids: list[str]
    bitmask: NDArray[np.int32]
    """[len(req_ids), vocabulary / 32 rounded up]; bit i of word w is set where token 32 w + i is allowed."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step gave: `sampled_token_ids[i]` belongs to `req_ids[i]`, and is empty for a request
    whose prompt is not completely computed yet, and for pooling requests. Where drafts were computed it has
    those that are accepted, the first ones of them, and one token more."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, LogprobsLists] | None = None
    """Of the sampled tokens, for the requests that asked for them."""
    prompt_logprobs: dict[str, LogprobsLists] | None = None
    """For the requests that asked for them and whose prompt was completed in this step."""
    pooler_output: dict[str, NDArray[np.float32]] | None = None
    """For the pooling requests whose prompt was completed in this step."""
    draft_token_ids: dict[str, list[int]] | None = None
    """What may come after `sampled_token_ids`, for the next step to verify."""


class AsyncModelRunnerOutput(ABC):
    """A `ModelRunnerOutput` whose tokens are still on their way from the device."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `get_output` need not wait."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens; to be called once, on any thread."""
