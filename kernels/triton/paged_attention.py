"""Paged attention in Triton, decode and prefill alike.

A program handles a tile of rows of one request and KV head, a row being a (query token, query head) pair of
the group, so that every key and value is read once for the whole group. The softmax is the online one of
FlashAttention-2 (Dao, 2023). In decode the context is cut into splits, one program each, whose results a
second kernel merges, as in Flash-Decoding (Dao et al., 2023). Grids depend on the host's copies of the
batch's extremes alone, never on device data.

A kernel is compiled for what a layer's options want: a window or chunks (`SPAN`), a soft cap, sinks. A program
begins with the first tile of tokens of which one of its rows sees something.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.triton.attention_rule import Rule, first_seen, tanh
from nbengine.kernels.triton.splits import choose_splits, merge, new_parts, warm_up_merge

MIN_ROWS = 16  # what a tensor core takes
MERGE_WARPS = 4


@dataclass(frozen=True)
class Tiling:
    """The rows and cached tokens that a program computes at a time, its warps and its software pipeline's
    depth."""

    rows: int
    tokens: int
    warps: int
    stages: int


def choose_tiling(
    head_dim: int, group: int, dtype: torch.dtype, *, decode: bool, has_soft_cap: bool = False
) -> Tiling:
    """Choose tiles that fit into the registers and shared memory of compute capability 8.0 without
    spilling."""
    width = triton.next_power_of_2(head_dim)
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    if dtype == torch.float32:
        if width <= 64:
            return Tiling(rows if decode or has_soft_cap else max(rows, 32), tokens=16, warps=4, stages=1)
        return (
            Tiling(rows, tokens=16, warps=4, stages=1)
            if width == 128
            else Tiling(rows, 32 if width <= 256 else 16, 8, 1)
        )
    if width > 256:
        return Tiling(rows, tokens=16, warps=8, stages=3 if decode else 2)
    if decode:
        return Tiling(rows, tokens=64 if width <= 128 else 32, warps=4, stages=3)
    rows = max(rows, 64 if width <= 128 else 32)
    return Tiling(rows, tokens=64 if width <= 64 else 32, warps=4, stages=2)


@triton.jit
def _attend_to_tokens(
    query,
    key_cache,
    value_cache,
    table,
    head,
    kv_heads,
    positions,
    begin,
    end,
    scale,
    soft_cap,
    lowest,
    span,
    maximum,
    total,
    sums,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPAN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Fold TOKENS tokens from `begin` on, before `end`, into the running (maximum, total, sums). With SPAN no row
    sees any before `lowest`."""
    token = begin + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < end
    if SPAN:
        present = present & (token >= lowest)
    block = tl.load(table + token // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    place = ((block * kv_heads + head) * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    keys = tl.load(key_cache + place[:, None] + column[None, :], mask=inside, other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if SOFT_CAP:
        scores = tanh(scores) * soft_cap
    seen = present[None, :]
    if CAUSAL:
        seen = seen & (token[None, :] <= positions[:, None])
    if SPAN:
        seen = seen & (token[None, :] >= first_seen(positions, span, SPAN)[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(maximum, tl.max(scores, axis=1))
    base = peak
    if SPAN:
        # A row may have seen nothing yet.
        base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(maximum - base)
    values = tl.load(value_cache + place[:, None] + column[None, :], mask=inside, other=0.0)
    sums = tl.dot(weights.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
    return peak, total * decay + tl.sum(weights, axis=1), sums


@triton.jit(do_not_specialize=["first_request", "query_stride", "table_stride", "split_tokens", "span"])
def attention_kernel(
    output,
    partial_sums,
    partial_stats,
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    first_request,
    query_stride,
    table_stride,
    split_tokens,
    sinks,
    soft_cap,
    span,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend, on the grid (tiles of query tokens, KV heads, requests), or (splits of the context, ..., ...)
    if DECODE.

    The kernel writes the output, or, if SPLIT, partial sums [requests, heads, splits, HEAD_DIM] and
    statistics [..., 2] (maximum in base 2, total). `scale` includes log2(e); with SOFT_CAP it is `soft_cap` that
    does, and `scale` is divided by the cap. `sinks` [heads] are float32, `span` is the size of the window or of a
    chunk.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2) + first_request
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    if DECODE:
        first = 0
        lowest = first_seen(seq_len - 1, span, SPAN)
        begin = lowest // TOKENS * TOKENS + tile * split_tokens
        end = tl.minimum(begin + split_tokens, seq_len)
        done = begin >= seq_len
    else:
        first = tile * (ROWS // GROUP)
        lowest = first_seen(seq_len - query_len + first, span, SPAN)
        begin = lowest // TOKENS * TOKENS
        end = seq_len - query_len + tl.minimum(first + ROWS // GROUP, query_len)
        done = first >= query_len
    if done:
        return
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    token = first + row // GROUP
    positions = seq_len - query_len + token
    valid = (row < ROWS // GROUP * GROUP) & (token < query_len)
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    source = (start + token).to(tl.int64) * query_stride + query_head * HEAD_DIM
    queries = tl.load(query + source[:, None] + column[None, :], mask=inside, other=0.0)
    table = block_table + request.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        maximum = tl.load(sinks + query_head) * 1.4426950408889634
        if SPLIT:
            # The first split has them.
            maximum = tl.where(tile == 0, maximum, float("-inf"))
        total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    # Every row sees all tokens up to the first row's position: only later ones need the causal mask.
    whole = end if DECODE else (seq_len - query_len + first + 1) // TOKENS * TOKENS
    for at in range(begin, whole, TOKENS):
        maximum, total, sums = _attend_to_tokens(
            queries, key_cache, value_cache, table, head, KV_HEADS, positions, at, end, scale, soft_cap,
            lowest, span, maximum, total, sums, HEAD_DIM, WIDTH, BLOCK_SIZE, TOKENS, CAUSAL=False,
            SPAN=SPAN, SOFT_CAP=SOFT_CAP,
        )  # fmt: skip
    if not DECODE:
        for at in range(whole, end, TOKENS):
            maximum, total, sums = _attend_to_tokens(
                queries, key_cache, value_cache, table, head, KV_HEADS, positions, at, end, scale, soft_cap,
                lowest, span, maximum, total, sums, HEAD_DIM, WIDTH, BLOCK_SIZE, TOKENS, CAUSAL=True,
                SPAN=SPAN, SOFT_CAP=SOFT_CAP,
            )  # fmt: skip
    if SPLIT:
        heads = KV_HEADS * GROUP
        slot = (tl.program_id(2) * heads + query_head).to(tl.int64) * tl.num_programs(0) + tile
        tl.store(partial_sums + slot[:, None] * HEAD_DIM + column[None, :], sums, mask=inside)
        tl.store(partial_stats + slot * 2, maximum, mask=valid)
        tl.store(partial_stats + slot * 2 + 1, total, mask=valid)
    else:
        target = ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + query_head) * HEAD_DIM
        if SPAN:
            # Rows of padding may have seen nothing.
            total = tl.where(total == 0, 1.0, total)
        result = (sums / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + target[:, None] + column[None, :], result, mask=inside)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    processors: int,
) -> torch.Tensor:
    """See `nbengine.kernels.dispatch.Kernels.paged_attention`; `processors` are those of the device, to be
    kept busy."""
    rule = Rule.of(options, query.shape[1])
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decodes = metadata.num_decodes
    if decodes:
        _decode(output, query, kv_cache, metadata, rule, processors)
    if decodes < metadata.num_reqs:
        group = query.shape[1] // kv_cache.shape[2]
        has_soft_cap = rule.soft_cap is not None
        tiling = choose_tiling(query.shape[2], group, query.dtype, decode=False, has_soft_cap=has_soft_cap)
        tokens_per_tile = tiling.rows // group
        tiles = -(-metadata.max_query_len // tokens_per_tile)
        requests = metadata.num_reqs - decodes
        _launch(output, None, None, query, kv_cache, metadata, rule, tiling, tiles, decodes, requests, 0)
    return output


def _decode(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    rule: Rule,
    processors: int,
) -> None:
    num_heads, head_dim = query.shape[1:]
    requests, kv_heads = metadata.num_decodes, kv_cache.shape[2]
    tiling = choose_tiling(head_dim, num_heads // kv_heads, query.dtype, decode=True)
    most = rule.most_tokens(metadata.max_seq_len, tiling.tokens)
    splits, split_tokens = choose_splits(requests * kv_heads, most, processors)
    sums = stats = None
    if splits > 1:
        sums, stats = new_parts(requests, num_heads, splits, head_dim, query.device)
    _launch(output, sums, stats, query, kv_cache, metadata, rule, tiling, splits, 0, requests, split_tokens)
    if sums is not None and stats is not None:
        merge(
            output,
            sums,
            stats,
            metadata.seq_lens,
            split_tokens,
            span=rule.span,
            span_kind=rule.span_kind,
            tokens=tiling.tokens,
            warps=MERGE_WARPS,
        )


def warm_up_merges(query: torch.Tensor, kv_heads: int, options: AttentionOptions) -> None:
    """Compile the merges of every number of splits for queries like `query` [1, num_heads, head_dim]."""
    _, num_heads, head_dim = query.shape
    kind = Rule.of(options, num_heads).span_kind
    tiling = choose_tiling(head_dim, num_heads // kv_heads, query.dtype, decode=True)
    warm_up_merge(torch.empty_like(query), span_kind=kind, tokens=tiling.tokens, warps=MERGE_WARPS)


def _launch(
    output: torch.Tensor,
    partial_sums: torch.Tensor | None,
    partial_stats: torch.Tensor | None,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    rule: Rule,
    tiling: Tiling,
    tiles: int,
    first_request: int,
    requests: int,
    split_tokens: int,
) -> None:
    _, num_heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    split = partial_sums is not None
    attention_kernel[(tiles, kv_heads, requests)](
        output,
        partial_sums if split else output,
        partial_stats if split else output,
        query,
        kv_cache[0],
        kv_cache[1],
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        rule.scale,
        first_request,
        query.stride(0),
        metadata.block_table.stride(0),
        split_tokens,
        query if rule.sinks is None else rule.sinks,
        rule.soft_cap or 0.0,
        rule.span,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        TOKENS=tiling.tokens,
        DECODE=split_tokens > 0,
        SPLIT=split,
        SPAN=rule.span_kind,
        SOFT_CAP=rule.soft_cap is not None,
        SINKS=rule.sinks is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
