"""This module lays out a step for each cache group: block tables for attention, slots for recurrent state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.kernels.attention_metadata import (
    AttentionMetadata,
    build_attention_metadata,
    slot_mapping,
)
from nbengine.kernels.dispatch import Kernels, RecurrentKernels
from nbengine.kernels.recurrent_metadata import Checkpoints, RecurrentMetadata, build_recurrent_metadata
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kernels.transfer import upload
from nbengine.kv_cache.specs import CacheGroups
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.batch.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """The states of a step's B requests, in the order of its tokens, and C checkpoints; all arrays are int32."""

    query_lens: NDArray[np.int32]
    """[B]: new tokens a request."""
    slots: NDArray[np.int32]
    """[B]: where each request's state is left."""
    sources: NDArray[np.int32]
    """[B]: where each request's state is found; -1: a state of zeros."""
    checkpoint_requests: NDArray[np.int32]
    """[C]: the request of each checkpoint."""
    checkpoint_ends: NDArray[np.int32]
    """[C]: how many of the request's tokens of this step come before it, from 1 to all."""
    checkpoint_slots: NDArray[np.int32]
    """[C]: where it is kept."""
    num_slots: int
    """All slots are below this number."""


def recurrent_inputs(
    batch: InputBatch,
    plan: SchedulerOutput,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_slots: int,
    *,
    padded: bool,
) -> RecurrentInputs:
    """Lay out the states of a plan's requests, which are in `rows` and compute `counts` tokens each.

    With `padded` one more request follows, of one token, which begins from zeros in the last slot.
    """
    slots = batch.rows["state_slot"][rows].astype(np.int32)
    sources = slots.copy()
    place_of = {int(row): place for place, row in enumerate(rows)}
    for req_id, (_, source) in plan.state_slots.items():
        sources[place_of[batch.row_of[req_id]]] = source
    made = []
    for req_id, checkpoints in plan.checkpoints.items():
        row = batch.row_of[req_id]
        start = int(batch.rows["num_computed_tokens"][row])
        made += [(place_of[row], place - start, slot) for place, slot in checkpoints]
    columns = np.asarray(sorted(made), np.int32).reshape(-1, 3)
    lengths = counts.astype(np.int32)
    if padded:
        lengths, slots, sources = (
            np.append(array, np.int32(value))
            for array, value in ((lengths, 1), (slots, num_slots - 1), (sources, -1))
        )
    return RecurrentInputs(lengths, slots, sources, columns[:, 0], columns[:, 1], columns[:, 2], num_slots)


def one_state(counts: NDArray[np.int32]) -> RecurrentInputs:
    """Return the inputs of a dummy step whose tokens are one request's, in slot 0."""
    length, none = np.asarray([counts.sum()], np.int32), np.empty(0, np.int32)
    zero = np.zeros(1, np.int32)
    return RecurrentInputs(length, zero, zero - 1, none, none, none, 1)


def dummy_metadata(
    counts: NDArray[np.int32],
    groups: CacheGroups,
    *,
    block_size: int,
    kernels: Kernels,
    recurrent_kernels: RecurrentKernels | None,
    device: torch.device,
) -> AttentionMetadata | StepMetadata:
    """Return the metadata of requests of `counts` tokens without context that all read block 0 and write nothing;
    recurrent layers take them for one request."""
    block_table = np.zeros((len(counts), -(-int(counts.max()) // block_size)), np.int32)
    metadata = build_attention_metadata(
        counts, counts, block_table, block_size=block_size, kernels=kernels, device=device
    )
    metadata.slot_mapping.fill_(-1)
    if groups.num_groups == groups.num_tables == 1:
        return metadata
    states = None
    if recurrent_kernels is not None:
        states = recurrent_metadata(one_state(counts), recurrent_kernels, device)
    return all_groups([metadata] * groups.num_tables, states)


def step_metadata(
    first: AttentionMetadata,
    other_tables: list[NDArray[np.int32]],
    counts: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_size: int,
) -> list[AttentionMetadata]:
    """Return `first` and, for each of the other groups' block tables, the same batch's metadata with them."""
    found = [first]
    device = first.block_table.device
    for table in other_tables:
        slots = upload(slot_mapping(counts, seq_lens, table, block_size), device)
        found.append(replace(first, block_table=upload(table, device), slot_mapping=slots, plan=None))
    return found


def recurrent_metadata(
    inputs: RecurrentInputs, kernels: RecurrentKernels, device: torch.device
) -> RecurrentMetadata:
    """Return the metadata that recurrent layers take."""
    checkpoints = Checkpoints(inputs.checkpoint_requests, inputs.checkpoint_ends, inputs.checkpoint_slots)
    return build_recurrent_metadata(
        inputs.query_lens,
        inputs.slots,
        inputs.sources,
        checkpoints,
        num_slots=inputs.num_slots,
        kernels=kernels,
        device=device,
    )


def all_groups(attention: list[AttentionMetadata], recurrent: RecurrentMetadata | None) -> StepMetadata:
    """Put the metadata of attention groups and of recurrent layers, if there are any, in the groups' order."""
    return StepMetadata((*attention, recurrent) if recurrent is not None else tuple(attention))
