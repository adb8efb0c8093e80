"""This module cuts a batch into work items for the CPU attention kernel, once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.layout import CHUNK, DECODE_PART, PREFILL_PART, Work

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class WorkList:
    """Rows of `Work`, and the numbers of tasks and partial results that they name."""

    rows: Ints
    tasks: int
    partials: int


def decode_work(metadata: AttentionMetadata, options: AttentionOptions | None = None) -> WorkList:
    """Make one task for each of the first `num_decodes` requests, of the cached tokens that layers with these options
    (None: plain ones) see."""
    count = metadata.num_decodes
    seq_lens = metadata.seq_lens[:count].numpy()
    index = np.arange(count, dtype=np.int32)
    first_seen = _first_seen(seq_lens - 1, options)
    return _cut(index, index, np.ones(count, np.int32), seq_lens, first_seen, seq_lens, DECODE_PART)


def prefill_work(
    metadata: AttentionMetadata, max_tokens: int, options: AttentionOptions | None = None
) -> WorkList:
    """Make tasks of at most `max_tokens` query tokens for the requests after the decodes, longest first, for layers
    with these options (None: plain ones)."""
    starts = metadata.query_start_loc[metadata.num_decodes :].numpy()
    query_lens = np.diff(starts)
    contexts = metadata.seq_lens[metadata.num_decodes :].numpy() - query_lens
    requests, nth = _repeat(-(-query_lens // max_tokens))
    offsets = nth * max_tokens
    tokens = np.minimum(query_lens[requests] - offsets, max_tokens)
    visible = contexts[requests] + offsets + 1
    kv_end = visible + tokens - 1
    first_seen = _first_seen(visible - 1, options)
    # A long task that is begun last would leave the other threads idle.
    order = np.argsort(-kv_end if first_seen is None else first_seen - kv_end, kind="stable")
    first_seen = None if first_seen is None else first_seen[order]
    requests, offsets = requests[order], offsets[order]
    first_tokens = starts[requests] + offsets
    numbers = requests + np.int32(metadata.num_decodes)
    return _cut(numbers, first_tokens, tokens[order], visible[order], first_seen, kv_end[order], PREFILL_PART)


def _first_seen(positions: Ints, options: AttentionOptions | None) -> Ints | None:
    """Return the first tokens that queries at these positions see; None: the very first for all of them."""
    return None if options is None or options.span is None else options.first_seen(positions)


def _cut(
    requests: Ints,
    first_tokens: Ints,
    tokens: Ints,
    visible: Ints,
    first_seen: Ints | None,
    kv_end: Ints,
    part: int,
) -> WorkList:
    """Cut tasks at multiples of `part`, wherever they begin: so a token's sums are cut at the same places in every
    step."""
    parts = -(-kv_end // part)
    if first_seen is not None:
        parts -= first_seen // part
    task, nth = _repeat(parts)
    rows = np.empty((len(task), len(Work)), np.int32)
    rows[:, Work.REQUEST] = requests[task]
    rows[:, Work.FIRST_TOKEN] = first_tokens[task]
    rows[:, Work.TOKENS] = tokens[task]
    rows[:, Work.VISIBLE] = visible[task]
    rows[:, Work.KV_START] = nth * part
    if first_seen is not None:
        rows[:, Work.KV_START] += (first_seen // part * part)[task]
    rows[:, Work.KV_END] = np.minimum(rows[:, Work.KV_START] + part, kv_end[task])
    if first_seen is not None:
        begin = (first_seen // CHUNK * CHUNK)[task]
        np.maximum(rows[:, Work.KV_START], begin, out=rows[:, Work.KV_START])
    rows[:, Work.TASK] = task
    rows[:, Work.PART] = nth
    rows[:, Work.PARTS] = parts[task]
    rows[:, Work.PARTIAL] = _starts(parts)[task]
    return WorkList(rows, tasks=len(parts), partials=len(task))


def _repeat(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat index i counts[i] times, and number the repetitions: [0, 0, 1], [0, 1, 0] for [2, 1]."""
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return index, np.arange(len(index), dtype=np.int32) - _starts(counts)[index]


def _starts(counts: Ints) -> Ints:
    """Return the exclusive prefix sum."""
    return np.cumsum(counts, dtype=np.int32) - counts
