"""The metadata of one step's batch that attention needs, built once a step and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.transfer import upload

if TYPE_CHECKING:
    from nbengine.kernels.dispatch import Kernels


@dataclass(slots=True)
class AttentionMetadata:
    """The metadata of one step's batch: B requests with T new tokens in all, flattened; request b's are
    contiguous.

    Request b has `seq_lens[b]` tokens, of which the last `query_start_loc[b + 1] - query_start_loc[b]` are
    new: they are this step's queries, and their keys and values are in the cache when attention runs.
    """

    query_start_loc: torch.Tensor
    """[B + 1] int32: the place where each request's tokens begin."""
    seq_lens: torch.Tensor
    """[B] int32: the number of context and new tokens."""
    block_table: torch.Tensor
    """[B, blocks of the longest request] int32: each request's cache blocks; past its last one, anything."""
    slot_mapping: torch.Tensor
    """[T] int64: block number * block size + offset, the place of each new token's key and value."""
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    """The first `num_decodes` requests have one new token each."""
    kernels: Kernels
    plan: object | None = field(default=None, repr=False)
    """The plans that `kernels` made for this batch in the first layers of each rule, for the other layers to
    reuse; None before the first layer."""


def build_attention_metadata(
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    *,
    block_size: int,
    kernels: Kernels,
    device: torch.device,
) -> AttentionMetadata:
    """Build the metadata of one step from its arrays; on the CPU they are used in place.

    Args:
        query_lens: [B] int32, new tokens a request, at least 1 each. Requests with 1 come first.
        seq_lens: [B] int32, context and new tokens.
        block_table: [B, max_blocks] int32; only a request's own blocks are read.
        block_size: tokens a block, a power of two.
        kernels: the kernels that run the step.
        device: the device on which the model runs.

    Raises:
        InvalidArgumentError: the arrays disagree about the number of requests, or there are none, or a
            request's tokens don't fit into its row of the block table.
    """
    num_reqs = len(query_lens)
    if not num_reqs or len(seq_lens) != num_reqs or len(block_table) != num_reqs:
        shapes = (query_lens.shape, seq_lens.shape, block_table.shape)
        raise InvalidArgumentError("query_lens, seq_lens, block_table", shapes, "of one length, at least 1")
    max_seq_len, capacity = int(seq_lens.max()), block_table.shape[1] * block_size
    if max_seq_len > capacity:
        raise InvalidArgumentError("seq_lens", max_seq_len, f"at most {capacity}, what the block table holds")
    query_start_loc = np.zeros(num_reqs + 1, np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    slots = slot_mapping(query_lens, seq_lens, block_table, block_size)
    several = np.append(query_lens > 1, True)
    return AttentionMetadata(
        query_start_loc=upload(query_start_loc, device),
        seq_lens=upload(seq_lens, device),
        block_table=upload(block_table, device),
        slot_mapping=upload(slots, device),
        num_reqs=num_reqs,
        num_tokens=len(slots),
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
        num_decodes=int(several.argmax()),
        kernels=kernels,
    )


def slot_mapping(
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    """Return the [T] int64 cache slots of the new tokens; arguments are those of
    `build_attention_metadata`."""
    requests = np.repeat(np.arange(len(seq_lens)), query_lens)
    positions = np.arange(len(requests)) + (seq_lens - np.cumsum(query_lens))[requests]
    slots: NDArray[np.int64] = block_table[requests, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    return slots
