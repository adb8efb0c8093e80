"""The options of a scheduler, which follow from the model and the workers that carry out its plans."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.errors import InvalidArgumentError
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The settings of a scheduler that follow from the model, its cache and the workers.

    Raises:
        InvalidArgumentError: drafts are wanted, and the model has recurrent layers; or these have no slot.
    """

    num_lookahead_tokens: int = 0
    """Most drafts of a request in a step; this number of slots is kept free after its tokens. Where a request goes
    on then depends on how many were accepted, so that nothing is scheduled ahead. An engine core leaves it at 0:
    its model runner computes no drafts."""
    async_scheduling: bool = False
    """Plan requests further while what was sampled for them is in flight."""
    num_stages: int = 1
    """Number of pipeline stages, of which the first ones know only the tokens that plans tell them: nothing is
    scheduled ahead, and requests are shared out among `num_stages` steps."""
    max_concurrent_steps: int | None = None
    """Most steps that can be in flight, if fewer than the stages: requests are then shared out among these."""
    groups: CacheGroups = ONE_GROUP
    """The groups of the model's layers."""
    num_state_slots: int = 0
    """Slots for the states of recurrent layers; `num_lookahead_tokens` must be 0 then."""
    state_tokens: int = 0
    """Number of tokens whose keys and values weigh as much as such a state; 0: there are none."""

    def __post_init__(self) -> None:
        if self.groups.recurrent is None:
            return
        if self.num_lookahead_tokens:
            allowed = "0: a recurrent state cannot go back behind rejected drafts"
            raise InvalidArgumentError("num_lookahead_tokens", self.num_lookahead_tokens, allowed)
        if self.num_state_slots < 1:
            raise InvalidArgumentError("num_state_slots", self.num_state_slots, "at least 1")

    @property
    def schedules_ahead(self) -> bool:
        """Tell whether requests are planned further than their tokens are known."""
        return self.async_scheduling and not self.num_lookahead_tokens and self.num_stages == 1


PLAIN = SchedulerOptions()
"""The options for a model with one kind of layers, and a worker that makes one step after another."""
