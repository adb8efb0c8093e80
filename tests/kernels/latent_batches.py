"""Batches for the tests of latent attention: what nobody may read is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nbengine.kernels import reference
from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.kv_cache import cache_shape
from nbengine.kernels.latent import LatentOptions

NO_SUCH_BLOCK = 2**30
LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 129, 256, 257, 600)],
    "prefill": [(2, 2), (17, 17), (3, 66), (40, 300)],
    "mixed": [(1, 33), (1, 530), (4, 4), (23, 270)],
}
SHAPES = [(5, 24, 8, 16), (16, 40, 6, 8), (1, 16, 16, 32), (20, 33, 7, 64)]
"""Heads, rank, dimensions that turn, and tokens a block."""


@dataclass
class LatentBatch:
    """One step: its queries, and the cache that holds its tokens' rows and NaN everywhere else."""

    query: torch.Tensor
    rows: torch.Tensor
    cache: torch.Tensor
    metadata: AttentionMetadata
    all_slots: torch.Tensor
    options: LatentOptions

    @classmethod
    def of(
        cls,
        kernels: Any,
        shape: tuple[int, int, int, int],
        lens: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        *,
        cache_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> LatentBatch:
        """Make a batch of requests, each (query_len, seq_len), those with one query first."""
        heads, rank, rope, block_size = shape
        generator = torch.Generator().manual_seed(0)
        query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*lens, strict=True))
        counts = -(-seq_lens // block_size)
        num_blocks = int(counts.sum()) + 2
        shuffled = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
        table = np.full((len(lens), int(counts.max()) + 1), NO_SUCH_BLOCK, np.int32)
        for row, blocks in zip(table, np.split(shuffled, np.cumsum(counts)), strict=False):
            row[: len(blocks)] = blocks
        common = {"block_size": block_size, "kernels": kernels, "device": torch.device(device)}
        metadata = build_attention_metadata(query_lens, seq_lens, table, **common)
        all_slots = build_attention_metadata(seq_lens, seq_lens, table, **common).slot_mapping
        rows = torch.randn(len(all_slots), rank + rope, generator=generator).to(device, dtype)
        query = torch.randn(metadata.num_tokens, heads, rank + rope, generator=generator).to(device, dtype)
        sizes = cache_shape(cache_dtype or dtype, num_blocks, 1, block_size, rank + rope, parts=1)
        cache = torch.full(sizes, float("nan"), dtype=cache_dtype or dtype, device=device)
        reference.write_latent(rows, cache, all_slots)
        options = LatentOptions((rank + rope) ** -0.5, rank)
        return cls(query, rows, cache, metadata, all_slots, options)

    def run(self) -> torch.Tensor:
        """The kernels' output, on the CPU."""
        kernels: Any = self.metadata.kernels
        return kernels.latent_attention(self.query, self.cache, self.metadata, self.options).cpu()

    def expected(self) -> torch.Tensor:
        """The reference's output, float64, on the CPU."""
        return reference.latent_attention(self.query, self.cache, self.metadata, self.options).cpu()

    def check_write(self) -> None:
        """Compare written rows, some of which have no slot and strides of their own, with the reference's."""
        kernels: Any = self.metadata.kernels
        slots = self.all_slots.clone()
        slots[5] = -1
        joint = torch.cat([self.rows, self.rows], dim=1)[:, : self.rows.shape[1]]
        expected, actual = torch.zeros_like(self.cache), torch.zeros_like(self.cache)
        reference.write_latent(self.rows, expected, slots)
        kernels.write_latent(joint, actual, slots)
        assert torch.equal(actual, expected)
