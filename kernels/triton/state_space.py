"""The selective state space of Mamba-2 in Triton: token by token for decodes, in chunks of tokens for prompts.

A program does some columns of one head's state, which do not depend on the others, as that of the delta rule does. The
tokens of a chunk read each other's inputs through products (Dao and Gu, 2024), and nothing has to be solved.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.kernels.triton.delta_rule import SLICE, choose_tiling

CHUNK = 64
"""The tokens of a prompt that a program does together."""
WARPS = 8
"""The warps of a program that does a prompt: with fewer, registers spill."""


@triton.jit(do_not_specialize=["x_stride", "b_stride", "c_stride"])
def step_kernel(
    output,
    x,
    dt,
    b,
    c,
    rate,
    skip,
    states,
    slots,
    sources,
    checkpoint_start_loc,
    checkpoint_slots,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Do the only token of each request, on the grid (blocks of columns, heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < STATE_SIZE, column < HEAD_DIM
    place = (head * STATE_SIZE + row)[:, None] * HEAD_DIM + column[None, :]
    inside = here[:, None] & there[None, :]
    slot_size = HEADS * STATE_SIZE * HEAD_DIM
    source = tl.load(sources + request).to(tl.int64)
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    if source >= 0:
        state = tl.load(states + source * slot_size + place, mask=inside, other=0.0)
    at = head // GROUP * STATE_SIZE + row
    bs = tl.load(b + request * b_stride + at, mask=here, other=0.0).to(tl.float32)
    cs = tl.load(c + request * c_stride + at, mask=here, other=0.0).to(tl.float32)
    xs = tl.load(x + request * x_stride + head * HEAD_DIM + column, mask=there, other=0.0).to(tl.float32)
    step = tl.load(dt + request * HEADS + head)
    state *= tl.exp(step * tl.load(rate + head))
    state += bs[:, None] * (step * xs)[None, :]
    result = tl.sum(cs[:, None] * state, axis=0) + tl.load(skip + head) * xs
    target = output + (request * HEADS + head) * HEAD_DIM + column
    tl.store(target, result.to(output.dtype.element_ty), mask=there)
    tl.store(states + tl.load(slots + request).to(tl.int64) * slot_size + place, state, mask=inside)
    last = tl.load(checkpoint_start_loc + request + 1)
    for number in range(tl.load(checkpoint_start_loc + request), last):
        kept = tl.load(checkpoint_slots + number).to(tl.int64)
        tl.store(states + kept * slot_size + place, state, mask=inside)


@triton.jit(do_not_specialize=["first_request", "x_stride", "b_stride", "c_stride"])
def chunks_kernel(
    output,
    x,
    dt,
    b,
    c,
    rate,
    skip,
    states,
    query_start_loc,
    slots,
    sources,
    checkpoint_start_loc,
    checkpoint_ends,
    checkpoint_slots,
    first_request,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Do a request in chunks of TOKENS, cut at checkpoints, on the grid (blocks of columns, heads, requests)."""
    head = tl.program_id(1)
    request = tl.program_id(2) + first_request
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, SLICE)
    index = tl.arange(0, TOKENS)
    not_before = index[:, None] >= index[None, :]
    begin = tl.load(query_start_loc + request)
    own = tl.load(slots + request).to(tl.int64)
    source = tl.load(sources + request).to(tl.int64)
    # A request that begins has no rows to read.
    height = (source >= 0).to(tl.int32) * STATE_SIZE
    head_states = states + head * (STATE_SIZE * HEAD_DIM) + column
    head_b = b + head // GROUP * STATE_SIZE
    head_c = c + head // GROUP * STATE_SIZE
    head_rate, head_skip = tl.load(rate + head), tl.load(skip + head)
    slot_size = HEADS * STATE_SIZE * HEAD_DIM
    last = tl.load(checkpoint_start_loc + request + 1)
    first = begin
    for number in range(tl.load(checkpoint_start_loc + request), last + 1):
        end = tl.load(query_start_loc + request + 1)
        if number < last:
            end = begin + tl.load(checkpoint_ends + number)
        for at in range(first, end, TOKENS):
            token = (at + index).to(tl.int64)
            present = token < end
            seen = tl.zeros([TOKENS, COLUMNS], tl.float32)
            weights = tl.zeros([TOKENS, TOKENS], tl.float32)
            for top in range(0, ROWS, SLICE):
                rows = top + row
                mask = present[:, None] & (rows < STATE_SIZE)[None, :]
                bs = tl.load(head_b + token[:, None] * b_stride + rows[None, :], mask=mask, other=0.0)
                cs = tl.load(head_c + token[:, None] * c_stride + rows[None, :], mask=mask, other=0.0)
                bs, cs = bs.to(tl.float32), cs.to(tl.float32)
                inside = (rows < height)[:, None] & (column < HEAD_DIM)
                place = source * slot_size + rows[:, None] * HEAD_DIM
                state = tl.load(head_states + place, mask=inside, other=0.0)
                seen = tl.dot(cs, state, seen, input_precision=PRECISION)
                weights = tl.dot(cs, tl.trans(bs), weights, input_precision=PRECISION)
            steps = tl.load(dt + token * HEADS + head, mask=present, other=0.0)
            total = tl.cumsum(steps * head_rate, axis=0)
            difference = total[:, None] - total[None, :]
            weights *= tl.where(not_before, tl.exp(tl.where(not_before, difference, 0.0)), 0.0)
            mask = present[:, None] & (column < HEAD_DIM)
            places = head * HEAD_DIM + column
            xs = tl.load(x + token[:, None] * x_stride + places, mask=mask, other=0.0).to(tl.float32)
            added = xs * steps[:, None]
            result = seen * tl.exp(total)[:, None] + head_skip * xs
            result = tl.dot(weights, added, result, input_precision=PRECISION)
            target = output + token[:, None] * (HEADS * HEAD_DIM) + places
            tl.store(target, result.to(output.dtype.element_ty), mask=mask)
            final = tl.sum(steps * head_rate, axis=0)
            to_end = tl.exp(final - total)
            for top in range(0, ROWS, SLICE):
                rows = top + row
                mask = present[:, None] & (rows < STATE_SIZE)[None, :]
                bs = tl.load(head_b + token[:, None] * b_stride + rows[None, :], mask=mask, other=0.0)
                inside = (rows < STATE_SIZE)[:, None] & (column < HEAD_DIM)
                place = rows[:, None] * HEAD_DIM
                started = (rows < height)[:, None] & (column < HEAD_DIM)
                state = tl.load(head_states + source * slot_size + place, mask=started, other=0.0)
                weighted = tl.trans(bs.to(tl.float32) * to_end[:, None])
                state = tl.dot(weighted, added, state * tl.exp(final), input_precision=PRECISION)
                tl.store(head_states + own * slot_size + place, state, mask=inside)
            source = own
            height = tl.full([], STATE_SIZE, tl.int32)
            # The next chunk's loads are other threads' stores of this one.
            tl.debug_barrier()
        if number < last:
            kept = tl.load(checkpoint_slots + number).to(tl.int64)
            for top in range(0, ROWS, SLICE):
                rows = (top + row)[:, None]
                inside = (rows < STATE_SIZE) & (column < HEAD_DIM)
                state = tl.load(head_states + own * slot_size + rows * HEAD_DIM, mask=inside, other=0.0)
                tl.store(head_states + kept * slot_size + rows * HEAD_DIM, state, mask=inside)
        first = end


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """See `nbengine.kernels.dispatch.RecurrentKernels.state_space`."""
    tokens, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    output = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    sizes = {"HEADS": heads, "GROUP": heads // groups, "STATE_SIZE": state_size, "HEAD_DIM": head_dim}
    inputs = (output, x, dt, b, c, rate, skip, state)
    strides = (x.stride(0), b.stride(0), c.stride(0))
    prompts = metadata.num_reqs - metadata.num_decodes
    if metadata.num_decodes:
        tiling = choose_tiling(state_size, head_dim, x.dtype, decode=True)
        step_kernel[(triton.cdiv(head_dim, tiling.columns), heads, metadata.num_decodes)](
            *inputs,
            metadata.slots,
            metadata.sources,
            metadata.checkpoint_start_loc,
            metadata.checkpoint_slots,
            *strides,
            **sizes,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            num_warps=tiling.warps,
            enable_fp_fusion=True,
        )
    if prompts:
        tiling = choose_tiling(state_size, head_dim, x.dtype, decode=False)
        chunks_kernel[(triton.cdiv(head_dim, tiling.columns), heads, prompts)](
            *inputs,
            metadata.query_start_loc,
            metadata.slots,
            metadata.sources,
            metadata.checkpoint_start_loc,
            metadata.checkpoint_ends,
            metadata.checkpoint_slots,
            metadata.num_decodes,
            *strides,
            **sizes,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            TOKENS=CHUNK,
            SLICE=SLICE,
            PRECISION=tiling.precision,
            num_warps=WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return output
