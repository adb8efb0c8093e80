"""The splits of a context in decode: how many there are, where their results lie, and the kernel that merges them."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nbengine.kernels.triton.attention_rule import first_seen

MAX_SPLITS = 32
MIN_SPLIT_TOKENS = 128
BUSY_SPLIT_TOKENS = 1024
"""The tokens from which on a context is split where every processor has a program without that: the merge costs more
than shorter splits gain."""
_PROGRAMS_PER_PROCESSOR = 2


def choose_splits(programs: int, max_seq_len: int, processors: int) -> tuple[int, int]:
    """Choose (splits, tokens a split) that keep `processors` busy with `programs` (request, KV head)
    pairs."""
    wanted = -(-processors * _PROGRAMS_PER_PROCESSOR // programs)
    least = MIN_SPLIT_TOKENS if programs < processors else BUSY_SPLIT_TOKENS
    splits = max(1, min(wanted, MAX_SPLITS, -(-max_seq_len // least)))
    tokens = -(-max_seq_len // splits)
    tokens = -(-tokens // MIN_SPLIT_TOKENS) * MIN_SPLIT_TOKENS
    return -(-max_seq_len // tokens), tokens


def new_parts(
    requests: int, heads: int, splits: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for what the splits give, float32: sums [requests, heads, splits, head_dim], and statistics [...,
    splits, 2], which are the maximum in base 2 and the total."""
    sums = torch.empty((requests, heads, splits, head_dim), dtype=torch.float32, device=device)
    return sums, torch.empty((requests, heads, splits, 2), dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["splits", "split_tokens", "span"])
def merge_kernel(
    output,
    partial_sums,
    partial_stats,
    seq_lens,
    splits,
    split_tokens,
    span,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Merge a request's splits, on the grid (requests, heads); SPLITS is a power of two that is not below
    `splits`."""
    request = tl.program_id(0)
    row = request.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    seq_len = tl.load(seq_lens + request)
    begin = first_seen(seq_len - 1, span, SPAN) // TOKENS * TOKENS
    used = (split < splits) & (begin + split * split_tokens < seq_len)
    slot = row * splits + split
    maxima = tl.load(partial_stats + slot * 2, mask=used, other=float("-inf"))
    totals = tl.load(partial_stats + slot * 2 + 1, mask=used, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, axis=0))
    inside = used[:, None] & (column < HEAD_DIM)[None, :]
    sums = tl.load(partial_sums + slot[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    result = tl.sum(sums * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    target = output + row * HEAD_DIM + column
    tl.store(target, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)


def merge(
    output: torch.Tensor,
    sums: torch.Tensor,
    stats: torch.Tensor,
    seq_lens: torch.Tensor,
    split_tokens: int,
    *,
    span: int,
    span_kind: int,
    tokens: int,
    warps: int,
) -> None:
    """Fill output [requests, heads, head_dim] from what `new_parts` describes, of requests with `seq_lens` tokens,
    int32.

    `tokens` are those of a tile, of which the first begins the first split.
    """
    requests, heads, splits, head_dim = sums.shape
    merge_kernel[(requests, heads)](
        output,
        sums,
        stats,
        seq_lens,
        splits,
        split_tokens,
        span,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        SPLITS=triton.next_power_of_2(splits),
        TOKENS=tokens,
        SPAN=span_kind,
        num_warps=warps,
        enable_fp_fusion=True,
    )


def warm_up_merge(output: torch.Tensor, *, span_kind: int, tokens: int, warps: int) -> None:
    """Compile the merge into output [1, heads, head_dim], whose content is lost, for every number of splits."""
    _, heads, head_dim = output.shape
    seq_lens = torch.ones(1, dtype=torch.int32, device=output.device)
    splits = 2
    while splits <= MAX_SPLITS:
        sums, stats = new_parts(1, heads, splits, head_dim, output.device)
        merge(output, sums, stats, seq_lens, 1, span=1, span_kind=span_kind, tokens=tokens, warps=warps)
        splits *= 2
