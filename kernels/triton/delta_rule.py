"""The gated delta rule in Triton: token by token for decodes, in chunks of tokens for prompts.

A program does some columns of one head's state, which do not depend on the others. For a decode they lie in registers;
for a prompt they stay in the request's slot, of which a program has a slice of rows at a time. Within a chunk the changes
that tokens make to the state depend on each other through a triangular system (Yang et al., 2024, Parallelizing linear
transformers with the delta rule), which is solved by substitution, as it is small.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.kernels.recurrent_reference import L2_EPS

MIN_SIZE = 16  # what a tensor core takes
CHUNK = 32
"""The tokens of a prompt that a program does together."""
SLICE = 32
"""The rows of a state that a program has at a time, for prompts."""


@dataclass(frozen=True)
class Tiling:
    """The rows (powers of two) and columns of a state that a program does, its warps, and the precision of its
    products."""

    rows: int
    columns: int
    warps: int
    precision: str


def choose_tiling(key_dim: int, value_dim: int, dtype: torch.dtype, *, decode: bool) -> Tiling:
    """Choose tiles that fit into the registers of compute capability 8.0 without spilling."""
    rows, columns = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    precision = "ieee" if dtype == torch.float32 else "tf32"
    if decode:
        return Tiling(rows, min(columns, max(1, 4096 // rows)), 4, precision)
    return Tiling(max(rows, SLICE), min(max(columns, MIN_SIZE), 32), 4, precision)


@triton.jit(do_not_specialize=["query_stride", "key_stride", "value_stride"])
def step_kernel(
    output,
    query,
    key,
    value,
    decay,
    beta,
    states,
    slots,
    sources,
    checkpoint_start_loc,
    checkpoint_slots,
    scale,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Do the only token of each request, on the grid (blocks of columns, value heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < KEY_DIM, column < VALUE_DIM
    place = (head * KEY_DIM + row)[:, None] * VALUE_DIM + column[None, :]
    inside = here[:, None] & there[None, :]
    slot_size = HEADS * KEY_DIM * VALUE_DIM
    source = tl.load(sources + request).to(tl.int64)
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    if source >= 0:
        state = tl.load(states + source * slot_size + place, mask=inside, other=0.0)
    at = head // GROUP * KEY_DIM + row
    queries = tl.load(query + request * query_stride + at, mask=here, other=0.0).to(tl.float32)
    keys = tl.load(key + request * key_stride + at, mask=here, other=0.0).to(tl.float32)
    queries *= tl.rsqrt(tl.sum(queries * queries, axis=0) + EPS) * scale
    keys *= tl.rsqrt(tl.sum(keys * keys, axis=0) + EPS)
    values = tl.load(value + request * value_stride + head * VALUE_DIM + column, mask=there, other=0.0)
    state *= tl.exp(tl.load(decay + request * HEADS + head))
    change = values.to(tl.float32) - tl.sum(keys[:, None] * state, axis=0)
    change *= tl.load(beta + request * HEADS + head)
    state += keys[:, None] * change[None, :]
    result = tl.sum(queries[:, None] * state, axis=0).to(output.dtype.element_ty)
    tl.store(output + (request * HEADS + head) * VALUE_DIM + column, result, mask=there)
    tl.store(states + tl.load(slots + request).to(tl.int64) * slot_size + place, state, mask=inside)
    last = tl.load(checkpoint_start_loc + request + 1)
    for number in range(tl.load(checkpoint_start_loc + request), last):
        kept = tl.load(checkpoint_slots + number).to(tl.int64)
        tl.store(states + kept * slot_size + place, state, mask=inside)


@triton.jit(do_not_specialize=["first_request", "query_stride", "key_stride", "value_stride"])
def chunks_kernel(
    output,
    query,
    key,
    value,
    decay,
    beta,
    states,
    query_start_loc,
    slots,
    sources,
    checkpoint_start_loc,
    checkpoint_ends,
    checkpoint_slots,
    scale,
    first_request,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """Do a request in chunks of TOKENS, cut at checkpoints, on the grid (blocks of columns, value heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2) + first_request
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, SLICE)
    index = tl.arange(0, TOKENS)
    later = index[:, None] > index[None, :]
    begin = tl.load(query_start_loc + request)
    own = tl.load(slots + request).to(tl.int64)
    source = tl.load(sources + request).to(tl.int64)
    # A request that begins has no rows to read.
    height = (source >= 0).to(tl.int32) * KEY_DIM
    head_states = states + head * (KEY_DIM * VALUE_DIM) + column
    head_query = query + head // GROUP * KEY_DIM
    head_key = key + head // GROUP * KEY_DIM
    slot_size = HEADS * KEY_DIM * VALUE_DIM
    last = tl.load(checkpoint_start_loc + request + 1)
    first = begin
    for number in range(tl.load(checkpoint_start_loc + request), last + 1):
        end = tl.load(query_start_loc + request + 1)
        if number < last:
            end = begin + tl.load(checkpoint_ends + number)
        for at in range(first, end, TOKENS):
            token = (at + index).to(tl.int64)
            present = token < end
            known = tl.zeros([TOKENS, COLUMNS], tl.float32)
            seen = tl.zeros([TOKENS, COLUMNS], tl.float32)
            key_key = tl.zeros([TOKENS, TOKENS], tl.float32)
            query_key = tl.zeros([TOKENS, TOKENS], tl.float32)
            key_squares = tl.zeros([TOKENS], tl.float32)
            query_squares = tl.zeros([TOKENS], tl.float32)
            for top in range(0, ROWS, SLICE):
                rows = top + row
                mask = present[:, None] & (rows < KEY_DIM)[None, :]
                queries = tl.load(
                    head_query + token[:, None] * query_stride + rows[None, :], mask=mask, other=0.0
                )
                keys = tl.load(head_key + token[:, None] * key_stride + rows[None, :], mask=mask, other=0.0)
                queries, keys = queries.to(tl.float32), keys.to(tl.float32)
                inside = (rows < height)[:, None] & (column < VALUE_DIM)
                place = source * slot_size + rows[:, None] * VALUE_DIM
                state = tl.load(head_states + place, mask=inside, other=0.0)
                known = tl.dot(keys, state, known, input_precision=PRECISION)
                seen = tl.dot(queries, state, seen, input_precision=PRECISION)
                key_key = tl.dot(keys, tl.trans(keys), key_key, input_precision=PRECISION)
                query_key = tl.dot(queries, tl.trans(keys), query_key, input_precision=PRECISION)
                key_squares += tl.sum(keys * keys, axis=1)
                query_squares += tl.sum(queries * queries, axis=1)
            key_factor = tl.rsqrt(key_squares + EPS)
            query_factor = tl.rsqrt(query_squares + EPS) * scale
            gates = token * HEADS + head
            decays = tl.load(decay + gates, mask=present, other=0.0)
            betas = tl.load(beta + gates, mask=present, other=0.0)
            total = tl.cumsum(decays, axis=0)
            since_start = tl.exp(total)
            difference = total[:, None] - total[None, :]
            between = tl.where(later, tl.exp(tl.where(later, difference, 0.0)), 0.0)
            coupling = key_key * between * (betas * key_factor)[:, None] * key_factor[None, :]
            mask = present[:, None] & (column < VALUE_DIM)
            places = head * VALUE_DIM + column
            values = tl.load(value + token[:, None] * value_stride + places, mask=mask, other=0.0)
            known *= (since_start * key_factor)[:, None]
            change = betas[:, None] * (values.to(tl.float32) - known)
            for solved in range(1, TOKENS):
                is_here = (index == solved)[:, None]
                factors = tl.sum(tl.where(is_here, coupling, 0.0), axis=0)
                correction = tl.sum(factors[:, None] * change, axis=0)
                change = tl.where(is_here, change - correction[None, :], change)
            same = index[:, None] == index[None, :]
            weights = query_key * tl.where(same, 1.0, between) * query_factor[:, None] * key_factor[None, :]
            result = seen * (since_start * query_factor)[:, None]
            result = tl.dot(weights, change, result, input_precision=PRECISION)
            target = output + token[:, None] * (HEADS * VALUE_DIM) + places
            tl.store(target, result.to(output.dtype.element_ty), mask=mask)
            final = tl.sum(decays, axis=0)
            to_end = key_factor * tl.exp(final - total)
            for top in range(0, ROWS, SLICE):
                rows = top + row
                mask = present[:, None] & (rows < KEY_DIM)[None, :]
                keys = tl.load(head_key + token[:, None] * key_stride + rows[None, :], mask=mask, other=0.0)
                inside = (rows < KEY_DIM)[:, None] & (column < VALUE_DIM)
                place = rows[:, None] * VALUE_DIM
                started = (rows < height)[:, None] & (column < VALUE_DIM)
                state = tl.load(head_states + source * slot_size + place, mask=started, other=0.0)
                weighted = tl.trans(keys.to(tl.float32) * to_end[:, None])
                state = tl.dot(weighted, change, state * tl.exp(final), input_precision=PRECISION)
                tl.store(head_states + own * slot_size + place, state, mask=inside)
            source = own
            height = tl.full([], KEY_DIM, tl.int32)
            # The next chunk's loads are other threads' stores of this one.
            tl.debug_barrier()
        if number < last:
            kept = tl.load(checkpoint_slots + number).to(tl.int64)
            for top in range(0, ROWS, SLICE):
                rows = (top + row)[:, None]
                inside = (rows < KEY_DIM) & (column < VALUE_DIM)
                state = tl.load(head_states + own * slot_size + rows * VALUE_DIM, mask=inside, other=0.0)
                tl.store(head_states + kept * slot_size + rows * VALUE_DIM, state, mask=inside)
        first = end


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """See `nbengine.kernels.dispatch.RecurrentKernels.gated_delta_rule`."""
    tokens, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[1:]
    output = torch.empty((tokens, heads, value_dim), dtype=value.dtype, device=value.device)
    sizes = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "EPS": L2_EPS,
    }
    inputs = (output, query, key, value, decay, beta, state)
    strides = (query.stride(0), key.stride(0), value.stride(0))
    prompts = metadata.num_reqs - metadata.num_decodes
    if metadata.num_decodes:
        tiling = choose_tiling(key_dim, value_dim, value.dtype, decode=True)
        step_kernel[(triton.cdiv(value_dim, tiling.columns), heads, metadata.num_decodes)](
            *inputs,
            metadata.slots,
            metadata.sources,
            metadata.checkpoint_start_loc,
            metadata.checkpoint_slots,
            key_dim**-0.5,
            *strides,
            **sizes,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            num_warps=tiling.warps,
            enable_fp_fusion=True,
        )
    if prompts:
        tiling = choose_tiling(key_dim, value_dim, value.dtype, decode=False)
        chunks_kernel[(triton.cdiv(value_dim, tiling.columns), heads, prompts)](
            *inputs,
            metadata.query_start_loc,
            metadata.slots,
            metadata.sources,
            metadata.checkpoint_start_loc,
            metadata.checkpoint_ends,
            metadata.checkpoint_slots,
            key_dim**-0.5,
            metadata.num_decodes,
            *strides,
            **sizes,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            TOKENS=CHUNK,
            SLICE=SLICE,
            PRECISION=tiling.precision,
            num_warps=tiling.warps,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return output
