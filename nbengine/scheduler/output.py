"""The plan that the scheduler gives the workers for each step, and the outcome that they give back."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbengine.ipc.messages import LogprobsLists
from nbengine.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class NewRequestData:
    """A request that the workers see for the first time."""

    req_id: str
    token_ids: list[int]
    """Prompt tokens; zeros for a prompt given as embeddings."""
    sampling_params: SamplingParams | None
    """None for a pooling request."""
    block_ids: list[int]
    """The block tables: see `CacheGroups`."""
    num_computed_tokens: int
    """Tokens whose keys and values are already in the blocks (prefix cache)."""
    pooling_params: PoolingParams | None = None
    prompt_embeds: Any = None
    """For a prompt given as embeddings: a tensor [prompt tokens, hidden size]."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the workers know, in struct-of-arrays form: only what changed since they last ran.

    For requests in `resumed_req_ids` (preempted earlier) `new_block_ids` replaces the block tables, otherwise
    it extends them. Blocks that a window has passed stay in the workers' tables, and must not be read. `new_token_ids` has the tokens that were sampled since a request was last planned, for
    pipeline stages that do not sample; it is empty without pipeline parallelism.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step: for every scheduled request, the number of next tokens that are computed."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    """Requests that ended since the previous step: workers forget them before anything else."""
    preempted_req_ids: set[str] = field(default_factory=set)
    """Requests that lost their blocks since the previous step; workers keep their tokens for the
    resumption."""
    incomplete_req_ids: set[str] = field(default_factory=set)
    """Requests that have known tokens after those of this step, so that nothing is sampled for them."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Drafts that are computed after a request's last known token, and count in `num_scheduled_tokens`.
    Nothing proposes drafts yet: the model runner refuses a plan with drafts, and `StepInputBuilder.build`
    says what it lacks."""
    state_slots: dict[str, tuple[int, int]] = field(default_factory=dict)
    """With recurrent layers, for the requests that are admitted in this step: the slot of their state, and the
    slot from which it starts, `NO_SLOT` for zeros. Afterwards a state goes on in its slot."""
    checkpoints: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The states that the step also writes elsewhere: for a request, the numbers of its tokens after which,
    ascending, all computed in this step, and the slot for each. No slot in which a step writes is one from
    which it starts."""
    num_steps: int = 1
    """Most steps that may be computed at once: a request whose token is known after one of them goes on with it in the
    next one. More than 1 where every request of the plan computes one token, has room for as many, may have as many,
    and asks for nothing but tokens of the model's own logits."""
    has_structured_output_requests: bool = False
    """True if some request that gets a token has a grammar: a `GrammarOutput` is then due before sampling."""
    step: int = 0

    @property
    def is_blank(self) -> bool:
        """Tell whether there is nothing to compute and nothing to tell the workers."""
        return not (self.total_num_scheduled_tokens or self.finished_req_ids or self.preempted_req_ids)


@dataclass(slots=True)
class GrammarOutput:
    """The tokens that the requests with a grammar may get in a step."""

    req_ids: list[str]
    bitmask: NDArray[np.int32]
    """[len(req_ids), vocabulary / 32 rounded up]; bit i of word w is set where token 32 w + i is allowed."""


class Fault(enum.Enum):
    """The reasons why the model runner has no result for a request that was due one."""

    NOT_FINITE = "not finite"
    """The model computed NaN or infinity. A draw among all tokens also meets NaN where no token was
    allowed."""
    NOTHING_ALLOWED = "nothing allowed"
    """Every token had a logit of minus infinity."""
    OUT_OF_MEMORY = "out of memory"
    """There was not enough memory for what the request asks for besides its tokens."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """The outcome of one step.

    `sampled_token_ids[i]` belongs to `req_ids[i]`. It is empty for a request whose prompt is not completely
    computed yet, for pooling requests, and for requests with a fault. Where drafts were computed, it has the
    accepted ones, which are the first of them, and one more token. Where several steps were computed, it has a token
    of each, the same number for all requests; a request with a fault has one less.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, LogprobsLists] | None = None
    """Logprobs of the sampled tokens, for the requests that asked for them."""
    prompt_logprobs: dict[str, LogprobsLists] | None = None
    """Logprobs of the prompts, for the requests that asked for them and whose prompt was completed in this
    step."""
    pooler_output: dict[str, NDArray[np.float32]] | None = None
    """Results of the pooling requests whose prompt was completed in this step."""
    faults: dict[str, Fault] | None = None
    """Faults of the requests for which there is no result, and which therefore end."""
    step_ends: Sequence[float] = ()
    """`time.time()` at the end of each step but the last one, where several were computed."""
    draft_token_ids: dict[str, list[int]] | None = None
    """Tokens that may come after `sampled_token_ids`, for the next step to verify. The model runner proposes
    none yet."""


class AsyncModelRunnerOutput(ABC):
    """A `ModelRunnerOutput` whose tokens are still on their way from the device."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Tell whether `get_output` returns without waiting."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens and return the outcome; to be called once, on any thread."""
