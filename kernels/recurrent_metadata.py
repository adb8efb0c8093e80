"""The metadata of one step's batch that layers with a recurrent state need, built once a step and shared by all
such layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.transfer import upload

if TYPE_CHECKING:
    from nbengine.kernels.dispatch import RecurrentKernels

NO_SOURCE = -1
"""The source of a request that begins: a state of zeros."""


@dataclass(frozen=True)
class Checkpoints:
    """The C states that a step keeps beside its requests' own: arrays of one length, int32.

    `ends[c]` says how many of the step's tokens of request `requests[c]` come before the kept state, 1 to all of
    them, and `slots[c]` where it is kept.
    """

    requests: NDArray[np.int32]
    ends: NDArray[np.int32]
    slots: NDArray[np.int32]

    @classmethod
    def none(cls) -> Checkpoints:
        """Return no checkpoints."""
        return cls(*(np.empty(0, np.int32) for _ in range(3)))

    def sorted(self) -> Checkpoints:
        """Return them by request, and by place within a request."""
        order = np.lexsort((self.ends, self.requests))
        return Checkpoints(*(column[order] for column in (self.requests, self.ends, self.slots)))


@dataclass(slots=True)
class RecurrentMetadata:
    """The metadata of one step's batch: B requests with T new tokens in all, flattened; request b's are
    contiguous.

    Request b starts from the state in slot `sources[b]`, or from zeros, and leaves its state in slot `slots[b]`;
    the states at its checkpoints go to slots of their own. No slot is written twice in a step, and none that is
    written is another request's source.
    """

    query_start_loc: torch.Tensor
    """[B + 1] int32: the place where each request's tokens begin."""
    slots: torch.Tensor
    """[B] int32: each request's own slot."""
    sources: torch.Tensor
    """[B] int32: the slot whose state each request starts from; -1: a state of zeros."""
    checkpoint_start_loc: torch.Tensor
    """[B + 1] int32: the place where each request's checkpoints begin among all."""
    checkpoint_requests: torch.Tensor
    """[C] int32, ascending."""
    checkpoint_ends: torch.Tensor
    """[C] int32: how many of the request's tokens of this step come before it, ascending within a request."""
    checkpoint_slots: torch.Tensor
    """[C] int32."""
    num_reqs: int
    num_tokens: int
    max_query_len: int
    num_decodes: int
    """The first `num_decodes` requests have one new token each."""
    num_slots: int
    """All slots are below this number."""
    kernels: RecurrentKernels
    plan: object | None = field(default=None, repr=False)
    """The plan that `kernels` made for this batch in the first layer, for the other layers to reuse."""


def build_recurrent_metadata(
    query_lens: NDArray[np.int32],
    slots: NDArray[np.int32],
    sources: NDArray[np.int32],
    checkpoints: Checkpoints | None = None,
    *,
    num_slots: int,
    kernels: RecurrentKernels,
    device: torch.device,
) -> RecurrentMetadata:
    """Build the metadata of one step from its arrays; on the CPU they are used in place.

    Args:
        query_lens: [B] int32, new tokens a request, at least 1 each. Requests with 1 come first.
        slots: [B] int32, where each request's state is left.
        sources: [B] int32, where each request's state is found, its own slot or another; -1: it begins.
        checkpoints: the states to be kept as well, in any order.
        num_slots: the slots that the state tensors have.
        kernels: the kernels that run the step.
        device: the device on which the model runs.

    Raises:
        InvalidArgumentError: the arrays disagree about the number of requests, or there are none; a slot does not
            exist, is written twice, or is written by one request and read by another; a checkpoint lies outside of
            its request's new tokens.
    """
    checkpoints = (checkpoints or Checkpoints.none()).sorted()
    num_reqs = len(query_lens)
    if not num_reqs or len(slots) != num_reqs or len(sources) != num_reqs:
        lengths = (num_reqs, len(slots), len(sources))
        raise InvalidArgumentError("query_lens, slots, sources", lengths, "of one length, at least 1")
    _check_slots(slots, sources, checkpoints.slots, num_slots)
    _check_checkpoints(query_lens, checkpoints)
    query_start_loc = np.zeros(num_reqs + 1, np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    places = np.searchsorted(checkpoints.requests, np.arange(num_reqs + 1)).astype(np.int32)
    several = np.append(query_lens > 1, True)
    return RecurrentMetadata(
        query_start_loc=upload(query_start_loc, device),
        slots=upload(slots, device),
        sources=upload(sources, device),
        checkpoint_start_loc=upload(places, device),
        checkpoint_requests=upload(checkpoints.requests, device),
        checkpoint_ends=upload(checkpoints.ends, device),
        checkpoint_slots=upload(checkpoints.slots, device),
        num_reqs=num_reqs,
        num_tokens=int(query_start_loc[-1]),
        max_query_len=int(query_lens.max()),
        num_decodes=int(several.argmax()),
        num_slots=num_slots,
        kernels=kernels,
    )


def _check_slots(
    slots: NDArray[np.int32], sources: NDArray[np.int32], kept: NDArray[np.int32], num_slots: int
) -> None:
    written = np.concatenate((slots, kept))
    if written.min() < 0 or written.max() >= num_slots:
        raise InvalidArgumentError("slots", written.tolist(), f"from 0 to {num_slots - 1}")
    if sources.min() < NO_SOURCE or sources.max() >= num_slots:
        raise InvalidArgumentError("sources", sources.tolist(), f"from -1 to {num_slots - 1}")
    count = np.bincount(written, minlength=num_slots)
    if count.max() > 1:
        raise InvalidArgumentError("slots", written.tolist(), "all different, with those of the checkpoints")
    others = sources[(sources != slots) & (sources != NO_SOURCE)]
    if count[others].any():
        raise InvalidArgumentError("sources", sources.tolist(), "not written by other requests of the step")


def _check_checkpoints(query_lens: NDArray[np.int32], checkpoints: Checkpoints) -> None:
    if not len(checkpoints.requests):
        return
    first, last = checkpoints.requests[[0, -1]]
    if first < 0 or last >= len(query_lens):
        allowed = f"from 0 to {len(query_lens) - 1}"
        raise InvalidArgumentError("checkpoints.requests", checkpoints.requests.tolist(), allowed)
    if (checkpoints.ends < 1).any() or (checkpoints.ends > query_lens[checkpoints.requests]).any():
        allowed = "from 1 to the number of the request's new tokens"
        raise InvalidArgumentError("checkpoints.ends", checkpoints.ends.tolist(), allowed)
