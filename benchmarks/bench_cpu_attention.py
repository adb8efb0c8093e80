"""Measure attention on the CPU: the paged kernels against torch's dense attention, alternating in one run.

    python benchmarks/bench_cpu_attention.py [--json PATH]

The shape is that of SmolLM2-135M: 30 layers of 9 query heads on 3 KV heads of 64 channels. The opponent,
`scaled_dot_product_attention(enable_gqa=True)`, has its keys and values contiguous, without the cost of
gathering them. A step is all layers. Times are medians in milliseconds; the ratio is the median of the
ratios of neighbouring runs, theirs by ours.

Cases with a window have as their opponent the paged kernels without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import alternate, median_ratio, parser, report
from torch.nn.functional import scaled_dot_product_attention

from nbengine.kernels.attention_metadata import build_attention_metadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.dispatch import Kernels, select_kernels

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch of equal requests: the new tokens and all tokens of each."""

    name: str
    batch: int
    query_len: int
    seq_len: int
    window: int | None = None


CASES = [
    *(Case(f"decode, batch {batch}, context 256", batch, 1, 256) for batch in (1, 8, 32)),
    Case("decode, batch 4, context 2048", 4, 1, 2048),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 256 on a context of 256", 1, 256, 512),
    Case("prefill 8 x 64", 8, 64, 64),
    Case("decode, window 512, context 16384", 1, 1, 16384, window=512),
    Case("prefill 256, window 512, context 16384", 1, 256, 16384, window=512),
]


def ours(case: Case, kernels: Kernels, dtype: torch.dtype) -> Callable[[], None]:
    """Make a step of the paged kernels, cache writes included."""
    blocks = -(-case.seq_len // BLOCK_SIZE)
    num_blocks = case.batch * blocks
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(case.batch, blocks)
    tokens = case.batch * case.query_len
    shape = (2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [torch.randn(shape).to(dtype) for _ in range(LAYERS)]
    query = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
    key, value = (torch.randn(tokens, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    options = AttentionOptions(HEAD_DIM**-0.5, window=case.window)

    def step() -> None:
        metadata = build_attention_metadata(
            np.full(case.batch, case.query_len, np.int32),
            np.full(case.batch, case.seq_len, np.int32),
            table,
            block_size=BLOCK_SIZE,
            kernels=kernels,
            device=CPU,
        )
        for cache in caches:
            kernels.write_kv(key, value, cache, metadata.slot_mapping)
            kernels.paged_attention(query, cache, metadata, options)

    return step


def theirs(case: Case, dtype: torch.dtype) -> Callable[[], None]:
    """Make a step of torch's attention over contiguous keys and values."""
    shape = (case.batch, KV_HEADS, case.seq_len, HEAD_DIM)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]
    query = torch.randn(case.batch, HEADS, case.query_len, HEAD_DIM).to(dtype)
    from_nothing = case.query_len == case.seq_len
    mask = None
    if case.query_len > 1 and not from_nothing:
        mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool).tril(case.seq_len - case.query_len)

    def step() -> None:
        for key, value in caches:
            scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=from_nothing, enable_gqa=True
            )

    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Return the milliseconds that one step takes."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def measure(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Alternate the two sides `rounds` times, after one step of each."""
    kernels = select_kernels(CPU, dtype)
    opponent = (
        theirs(case, dtype) if case.window is None else ours(replace(case, window=None), kernels, dtype)
    )
    sides = ours(case, kernels, dtype), opponent
    our_times, their_times = alternate(rounds, lambda: milliseconds(sides[0]), lambda: milliseconds(sides[1]))
    name = "SDPA" if case.window is None else "without window"
    return {
        "case": case.name,
        "type": str(dtype).removeprefix("torch."),
        "nbengine ms": statistics.median(our_times),
        "min": min(our_times),
        f"{name} ms": statistics.median(their_times),
        f"{name} min": min(their_times),
        "speed-up (median ratio)": 1 / median_ratio(our_times, their_times),
    }


def main() -> None:
    """Measure one row for each case and data type."""
    arguments = parser(__doc__).parse_args()
    rows = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            rows += [measure(case, dtype, arguments.rounds) for case in CASES]
    report("attention on the CPU, 30 layers", rows, arguments.json, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
