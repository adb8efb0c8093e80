"""Attention over latents in Triton, decode and prefill alike.

A program handles a tile of rows of one request, a row being a (query token, head) pair: all of them read the same
latents, each of which is loaded once, as key and as value. The rest is as in `paged_attention`: the online softmax,
splits of the context in decode, and its merge.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.latent import LatentOptions
from nbengine.kernels.triton.attention_rule import NO_SPAN
from nbengine.kernels.triton.paged_attention import MIN_ROWS, Tiling
from nbengine.kernels.triton.splits import choose_splits, merge, new_parts, warm_up_merge

_LOG2_E = 1.4426950408889634
_MIN_WIDTH = 16  # what a tensor core takes
MERGE_WARPS = 8


def choose_tiling(rank: int, heads: int, dtype: torch.dtype, *, decode: bool) -> Tiling:
    """Choose tiles that fit into the registers and shared memory of compute capability 8.0 without spilling."""
    if dtype == torch.float32:
        return Tiling(MIN_ROWS, tokens=16, warps=8, stages=1)
    wide = triton.next_power_of_2(rank) > 256
    rows = MIN_ROWS if decode and heads <= MIN_ROWS else 32
    return Tiling(rows, tokens=32, warps=8 if wide else 4, stages=2)


@triton.jit
def _attend_to_tokens(
    contents,
    turned,
    cache,
    table,
    positions,
    begin,
    end,
    scale,
    maximum,
    total,
    sums,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Fold TOKENS tokens from `begin` on, before `end`, into the running (maximum, total, sums)."""
    token = begin + tl.arange(0, TOKENS)
    column = tl.arange(0, RANK_WIDTH)
    turning = tl.arange(0, ROPE_WIDTH)
    present = token < end
    block = tl.load(table + token // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    place = (block * BLOCK_SIZE + token % BLOCK_SIZE) * (RANK + ROPE)
    latents = tl.load(
        cache + place[:, None] + column[None, :], mask=present[:, None] & (column < RANK)[None, :], other=0.0
    )
    keys = tl.load(
        cache + place[:, None] + (RANK + turning)[None, :],
        mask=present[:, None] & (turning < ROPE)[None, :],
        other=0.0,
    )
    scores = tl.dot(contents, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scale
    seen = present[None, :]
    if CAUSAL:
        seen = seen & (token[None, :] <= positions[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - peak[:, None])
    decay = tl.exp2(maximum - peak)
    sums = tl.dot(weights.to(latents.dtype), latents, sums * decay[:, None], input_precision="ieee")
    return peak, total * decay + tl.sum(weights, axis=1), sums


@triton.jit(do_not_specialize=["first_request", "table_stride", "split_tokens"])
def latent_kernel(
    output,
    partial_sums,
    partial_stats,
    query,
    cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    first_request,
    table_stride,
    split_tokens,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend, on the grid (tiles of rows, splits of the context, requests); there are splits in DECODE alone.

    The kernel writes the output, or, if SPLIT, partial sums [requests, heads, splits, RANK] and statistics [..., 2]
    (maximum in base 2, total). `scale` includes log2(e).
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2) + first_request
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    begin = split * split_tokens
    if tile * ROWS >= query_len * HEADS or begin >= seq_len:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    valid = row < query_len * HEADS
    context = seq_len - query_len
    positions = context + row // HEADS
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, query_len - 1)
    column = tl.arange(0, RANK_WIDTH)
    turning = tl.arange(0, ROPE_WIDTH)
    source = query + (start.to(tl.int64) * HEADS + row) * (RANK + ROPE)
    inside = valid[:, None] & (column < RANK)[None, :]
    contents = tl.load(source[:, None] + column[None, :], mask=inside, other=0.0)
    turned = tl.load(
        source[:, None] + (RANK + turning)[None, :],
        mask=valid[:, None] & (turning < ROPE)[None, :],
        other=0.0,
    )
    table = block_table + request.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, RANK_WIDTH], tl.float32)
    end = context + last + 1
    if DECODE:
        end = tl.minimum(begin + split_tokens, seq_len)
        whole = end
    else:
        # Every row sees all tokens up to the first row's position: only later ones need the causal mask.
        whole = (context + tile * ROWS // HEADS + 1) // TOKENS * TOKENS
    for at in range(begin, whole, TOKENS):
        maximum, total, sums = _attend_to_tokens(
            contents, turned, cache, table, positions, at, end, scale, maximum, total, sums,
            RANK, ROPE, RANK_WIDTH, ROPE_WIDTH, BLOCK_SIZE, TOKENS, CAUSAL=False,
        )  # fmt: skip
    if not DECODE:
        for at in range(whole, end, TOKENS):
            maximum, total, sums = _attend_to_tokens(
                contents, turned, cache, table, positions, at, end, scale, maximum, total, sums,
                RANK, ROPE, RANK_WIDTH, ROPE_WIDTH, BLOCK_SIZE, TOKENS, CAUSAL=True,
            )  # fmt: skip
    if SPLIT:
        slot = (tl.program_id(2) * HEADS + row).to(tl.int64) * tl.num_programs(1) + split
        tl.store(partial_sums + slot[:, None] * RANK + column[None, :], sums, mask=inside)
        tl.store(partial_stats + slot * 2, maximum, mask=valid)
        tl.store(partial_stats + slot * 2 + 1, total, mask=valid)
    else:
        target = output + (start.to(tl.int64) * HEADS + row) * RANK
        result = (sums / total[:, None]).to(output.dtype.element_ty)
        tl.store(target[:, None] + column[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["row_stride"])
def write_latent_kernel(rows, cache, slots, row_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy a token's row of SIZE numbers: one program a token; WIDTH is the power of two above."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        inside = column < SIZE
        row = tl.load(rows + token * row_stride + column, mask=inside)
        tl.store(cache + slot * SIZE + column, row, mask=inside)


def write_latent(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `nbengine.kernels.latent.LatentKernels.write_latent`; each row is contiguous."""
    size = cache.shape[4]
    write_latent_kernel[(slot_mapping.shape[0],)](
        rows,
        cache,
        slot_mapping,
        rows.stride(0),
        SIZE=size,
        WIDTH=triton.next_power_of_2(size),
        enable_fp_fusion=True,
    )


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: LatentOptions,
    processors: int,
) -> torch.Tensor:
    """See `nbengine.kernels.latent.LatentKernels.latent_attention`; queries are contiguous, `processors` are those of
    the device, to be kept busy."""
    heads, rank = query.shape[1], options.rank
    output = torch.empty((*query.shape[:2], rank), dtype=query.dtype, device=query.device)
    decodes = metadata.num_decodes
    if decodes:
        tiling = choose_tiling(rank, heads, query.dtype, decode=True)
        tiles = -(-heads // tiling.rows)
        splits, split_tokens = choose_splits(decodes * tiles, metadata.max_seq_len, processors)
        sums = stats = None
        if splits > 1:
            sums, stats = new_parts(decodes, heads, splits, rank, query.device)
        grid = (tiles, splits, decodes)
        _launch(grid, output, sums, stats, query, cache, metadata, options, tiling, 0, split_tokens)
        if sums is not None and stats is not None:
            merge(
                output,
                sums,
                stats,
                metadata.seq_lens,
                split_tokens,
                span=0,
                span_kind=NO_SPAN,
                tokens=tiling.tokens,
                warps=MERGE_WARPS,
            )
    if decodes < metadata.num_reqs:
        tiling = choose_tiling(rank, heads, query.dtype, decode=False)
        grid = (-(-metadata.max_query_len * heads // tiling.rows), 1, metadata.num_reqs - decodes)
        _launch(grid, output, None, None, query, cache, metadata, options, tiling, decodes, 0)
    return output


def warm_up_merges(query: torch.Tensor, rank: int) -> None:
    """Compile the merges of every number of splits for queries like `query` [1, heads, width]."""
    tokens = choose_tiling(rank, query.shape[1], query.dtype, decode=True).tokens
    output = query.new_empty(*query.shape[:2], rank)
    warm_up_merge(output, span_kind=NO_SPAN, tokens=tokens, warps=MERGE_WARPS)


def _launch(
    grid: tuple[int, int, int],
    output: torch.Tensor,
    partial_sums: torch.Tensor | None,
    partial_stats: torch.Tensor | None,
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: LatentOptions,
    tiling: Tiling,
    first_request: int,
    split_tokens: int,
) -> None:
    rank, rope = options.rank, query.shape[2] - options.rank
    latent_kernel[grid](
        output,
        output if partial_sums is None else partial_sums,
        output if partial_stats is None else partial_stats,
        query,
        cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        options.scale * _LOG2_E,
        first_request,
        metadata.block_table.stride(0),
        split_tokens,
        HEADS=query.shape[1],
        RANK=rank,
        ROPE=rope,
        RANK_WIDTH=max(_MIN_WIDTH, triton.next_power_of_2(rank)),
        ROPE_WIDTH=max(_MIN_WIDTH, triton.next_power_of_2(rope)),
        BLOCK_SIZE=cache.shape[3],
        ROWS=tiling.rows,
        TOKENS=tiling.tokens,
        DECODE=split_tokens > 0,
        SPLIT=partial_sums is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
