"""Cutting a batch into work items for the CPU attention kernel, once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbengine.kernels.cpu_layout import CHUNK, Work
from nbengine.worker.attention_metadata import AttentionMetadata

DECODE_PART = CHUNK
PREFILL_PART = 16 * CHUNK
"""Cached tokens an item covers at most: fixed, so that a request's result does not depend on its company."""

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class WorkList:
    """Rows of `Work`, and how many tasks and partial results they name."""

    rows: Ints
    tasks: int
    partials: int


def decode_work(metadata: AttentionMetadata) -> WorkList:
    """One task for each of the first `num_decodes` requests."""
    count = metadata.num_decodes
    seq_lens = metadata.seq_lens[:count].numpy()
    index = np.arange(count, dtype=np.int32)
    return _cut(index, index, np.ones(count, np.int32), seq_lens, seq_lens, DECODE_PART)


def prefill_work(metadata: AttentionMetadata, max_tokens: int) -> WorkList:
    """Tasks of at most `max_tokens` query tokens for the requests after the decodes, longest first."""
    starts = metadata.query_start_loc[metadata.num_decodes :].numpy()
    query_lens = np.diff(starts)
    contexts = metadata.seq_lens[metadata.num_decodes :].numpy() - query_lens
    requests, nth = _repeat(-(-query_lens // max_tokens))
    offsets = nth * max_tokens
    tokens = np.minimum(query_lens[requests] - offsets, max_tokens)
    visible = contexts[requests] + offsets + 1
    kv_end = visible + tokens - 1
    order = np.argsort(-kv_end, kind="stable")
    requests, offsets = requests[order], offsets[order]
    first_tokens = starts[requests] + offsets
    numbers = requests + np.int32(metadata.num_decodes)
    return _cut(numbers, first_tokens, tokens[order], visible[order], kv_end[order], PREFILL_PART)


def _cut(
    requests: Ints, first_tokens: Ints, tokens: Ints, visible: Ints, kv_end: Ints, part: int
) -> WorkList:
    parts = -(-kv_end // part)
    task, nth = _repeat(parts)
    rows = np.empty((len(task), len(Work)), np.int32)
    rows[:, Work.REQUEST] = requests[task]
    rows[:, Work.FIRST_TOKEN] = first_tokens[task]
    rows[:, Work.TOKENS] = tokens[task]
    rows[:, Work.VISIBLE] = visible[task]
    rows[:, Work.KV_START] = nth * part
    rows[:, Work.KV_END] = np.minimum(rows[:, Work.KV_START] + part, kv_end[task])
    rows[:, Work.TASK] = task
    rows[:, Work.PART] = nth
    rows[:, Work.PARTS] = parts[task]
    rows[:, Work.PARTIAL] = _starts(parts)[task]
    return WorkList(rows, tasks=len(parts), partials=len(task))


def _repeat(counts: Ints) -> tuple[Ints, Ints]:
    """Index i repeated counts[i] times, and the number of each repetition: [0, 0, 1], [0, 1, 0] for [2, 1]."""
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return index, np.arange(len(index), dtype=np.int32) - _starts(counts)[index]


def _starts(counts: Ints) -> Ints:
    """Exclusive prefix sum."""
    return np.cumsum(counts, dtype=np.int32) - counts
