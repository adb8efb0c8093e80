"""The experts of a layer in Triton: two grouped products over the tokens sorted by expert.

An assignment is a (token, expert) pair, number token * experts_per_token + choice. `plan_kernel` sorts the
assignments by expert and cuts each expert's into tiles of rows. A program of the products has one tile and
some columns; it finds its expert by the tile's number, so that grids depend on the batch's shape alone, never
on device data, and programs beyond the last tile do nothing. Every number is summed by one program in a fixed
order, which makes the results reproducible.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_ROWS = 16  # what a tensor core takes
MAX_ROWS = 64
_CHUNK = 1024
_COMBINED_COLUMNS = 256


@dataclass(frozen=True)
class Tiling:
    """The rows and columns of a program's result, what it sums at a time, its warps and its software
    pipeline's depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tiling(assignments: int, num_experts: int, dtype: torch.dtype) -> Tiling:
    """Choose tiles that fit into the registers and shared memory of compute capability 8.0 without spilling.

    A tile has as many rows as an expert has on average, so that little of it is empty.
    """
    average = triton.next_power_of_2(triton.cdiv(assignments, num_experts))
    if dtype == torch.float32:
        return Tiling(min(max(average, MIN_ROWS), 32), columns=32, depth=32, warps=4, stages=2)
    return Tiling(min(max(average, MIN_ROWS), MAX_ROWS), columns=64, depth=64, warps=4, stages=3)


def max_tiles(assignments: int, num_experts: int, rows: int) -> int:
    """Return the most tiles that the assignments can make, however they fall on the experts."""
    experts = min(assignments, num_experts)
    return min(assignments, (assignments + experts * (rows - 1)) // rows)


@triton.jit(do_not_specialize=["assignments"])
def plan_kernel(
    order,
    starts,
    counts,
    experts,
    assignments,
    NUM_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write an expert's assignments in `order`, `counts[expert]` of them from `starts[expert]` on: one
    program an expert."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    start = 0
    for begin in range(0, assignments, CHUNK):
        place = begin + lane
        chosen = tl.load(experts + place, mask=place < assignments, other=NUM_EXPERTS)
        start += tl.sum((chosen < expert).to(tl.int32))
    position = start
    for begin in range(0, assignments, CHUNK):
        place = begin + lane
        chosen = tl.load(experts + place, mask=place < assignments, other=NUM_EXPERTS)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order + position + tl.cumsum(is_own, 0) - 1, place, mask=is_own > 0)
        position += tl.sum(is_own)
    tl.store(starts + expert, start)
    tl.store(counts + expert, position - start)


@triton.jit
def _locate(tile, counts, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Find a tile's expert, NUM_EXPERTS beyond the last tile, and its number among that expert's tiles. BINS
    is a power of two."""
    bins = tl.arange(0, BINS)
    tiles = (tl.load(counts + bins, mask=bins < NUM_EXPERTS, other=0) + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    is_before = (ends <= tile) & (bins < NUM_EXPERTS)
    return tl.sum(is_before.to(tl.int32)), tile - tl.sum(tl.where(is_before, tiles, 0))


@triton.jit
def gate_up_kernel(
    activated,
    x,
    gate_up,
    order,
    starts,
    counts,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute silu(gate) * up of a tile's tokens; `activated` [assignments, INNER] is in the order of
    `order`."""
    expert, tile = _locate(tl.program_id(0), counts, NUM_EXPERTS, BINS, ROWS)
    if expert < NUM_EXPERTS:
        start = tl.load(starts + expert)
        row = start + tile * ROWS + tl.arange(0, ROWS)
        is_row = row < start + tl.load(counts + expert)
        token = tl.load(order + row, mask=is_row, other=0) // PER_TOKEN
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < INNER
        inputs = x + token.to(tl.int64)[:, None] * HIDDEN
        gates = gate_up + (expert.to(tl.int64) * (2 * INNER) + column)[None, :] * HIDDEN
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, HIDDEN, DEPTH):
            term = begin + tl.arange(0, DEPTH)
            is_term = term < HIDDEN
            own = tl.load(inputs + term[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
            inside = is_term[:, None] & is_column[None, :]
            weight = tl.load(gates + term[:, None], mask=inside, other=0.0)
            gate = tl.dot(own, weight, gate, input_precision="ieee")
            weight = tl.load(gates + INNER * HIDDEN + term[:, None], mask=inside, other=0.0)
            up = tl.dot(own, weight, up, input_precision="ieee")
        result = gate * tl.sigmoid(gate) * up
        place = activated + row.to(tl.int64)[:, None] * INNER + column[None, :]
        tl.store(place, result.to(activated.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_kernel(
    outputs,
    activated,
    down,
    order,
    starts,
    counts,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a tile's second product; `outputs` [assignments, HIDDEN] is in the order of the assignments'
    numbers."""
    expert, tile = _locate(tl.program_id(0), counts, NUM_EXPERTS, BINS, ROWS)
    if expert < NUM_EXPERTS:
        start = tl.load(starts + expert)
        row = start + tile * ROWS + tl.arange(0, ROWS)
        is_row = row < start + tl.load(counts + expert)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < HIDDEN
        inputs = activated + row.to(tl.int64)[:, None] * INNER
        weights = down + (expert.to(tl.int64) * HIDDEN + column)[None, :] * INNER
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, INNER, DEPTH):
            term = begin + tl.arange(0, DEPTH)
            is_term = term < INNER
            own = tl.load(inputs + term[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
            inside = is_term[:, None] & is_column[None, :]
            weight = tl.load(weights + term[:, None], mask=inside, other=0.0)
            total = tl.dot(own, weight, total, input_precision="ieee")
        assignment = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
        place = outputs + assignment[:, None] * HIDDEN + column[None, :]
        tl.store(place, total.to(outputs.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def combine_kernel(
    result,
    outputs,
    weights,
    experts,
    PER_TOKEN: tl.constexpr,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a token's weighted sum over its experts, in float32, of COLUMNS columns; CHOICES is the power
    of two above PER_TOKEN."""
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    assignment = token * PER_TOKEN + choice
    chosen = tl.load(experts + assignment, mask=choice < PER_TOKEN, other=NUM_EXPERTS)
    is_here = chosen < NUM_EXPERTS
    weight = tl.load(weights + assignment, mask=is_here, other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < HIDDEN
    inside = is_here[:, None] & is_column[None, :]
    rows = tl.load(outputs + assignment[:, None] * HIDDEN + column[None, :], mask=inside, other=0.0)
    total = tl.sum(weight[:, None] * rows.to(tl.float32), axis=0)
    tl.store(result + token * HIDDEN + column, total.to(result.dtype.element_ty), mask=is_column)


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """See `nbengine.kernels.dispatch.ExpertKernels.experts`."""
    num_experts, hidden, inner = down.shape
    num_tokens, per_token = experts.shape
    assignments = experts.numel()
    tiling = choose_tiling(assignments, num_experts, x.dtype)
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    order = torch.empty(assignments, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    plan_kernel[(num_experts,)](
        order, starts, counts, experts, assignments, NUM_EXPERTS=num_experts, CHUNK=_CHUNK
    )
    activated, outputs = x.new_empty(assignments, inner), x.new_empty(assignments, hidden)
    tiles = max_tiles(assignments, num_experts, tiling.rows)
    options = {
        "NUM_EXPERTS": num_experts,
        "BINS": triton.next_power_of_2(num_experts),
        "ROWS": tiling.rows,
        "HIDDEN": hidden,
        "INNER": inner,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        "enable_fp_fusion": True,
    }
    gate_up_kernel[(tiles, triton.cdiv(inner, tiling.columns))](
        activated, x, gate_up, order, starts, counts, PER_TOKEN=per_token, **options
    )
    down_kernel[(tiles, triton.cdiv(hidden, tiling.columns))](
        outputs, activated, down, order, starts, counts, **options
    )
    result = torch.empty_like(x)
    columns = min(_COMBINED_COLUMNS, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, columns))](
        result,
        outputs,
        weights,
        experts,
        PER_TOKEN=per_token,
        CHOICES=triton.next_power_of_2(per_token),
        HIDDEN=hidden,
        NUM_EXPERTS=num_experts,
        COLUMNS=columns,
    )
    return result


class TritonExperts:
    """The experts on one CUDA device."""

    name = "triton"

    def warm_up(self, gate_up: torch.Tensor, down: torch.Tensor, experts_per_token: int) -> None:
        """Run the kernels once with each number of rows that `choose_tiling` may choose."""
        num_experts, hidden, _ = down.shape
        rows = MIN_ROWS
        while rows <= choose_tiling(MAX_ROWS * num_experts, num_experts, down.dtype).rows:
            num_tokens = triton.cdiv(rows * num_experts, experts_per_token)
            x = down.new_zeros(num_tokens, hidden)
            weights = torch.zeros(num_tokens, experts_per_token, device=down.device)
            experts = torch.arange(experts_per_token, device=down.device).repeat(num_tokens, 1)
            self.experts(x, gate_up, down, weights, experts)
            rows *= 2

    def experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.ExpertKernels.experts`."""
        return moe_experts(x, gate_up, down, weights, experts)
