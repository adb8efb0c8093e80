"""Batches for the kernel tests: caches filled through the reference, everything else poisoned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nbengine.kernels import reference
from nbengine.kernels.dispatch import Kernels
from nbengine.worker.attention_metadata import AttentionMetadata, build_attention_metadata

NO_SUCH_BLOCK = 2**30


@dataclass(frozen=True)
class Shape:
    """A model's attention: query heads, KV heads, head dimension; and the cache's block size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}on{self.num_kv_heads}x{self.head_dim}_bs{self.block_size}"


@dataclass
class Batch:
    """One step: its queries, and the cache that holds its tokens and NaN everywhere else."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    all_slots: torch.Tensor
    scale: float

    def run(self) -> torch.Tensor:
        """The kernels' output, on the CPU."""
        output = self.metadata.kernels.paged_attention(self.query, self.kv_cache, self.metadata, self.scale)
        return output.cpu()

    def expected(self) -> torch.Tensor:
        """The reference's output, float64, on the CPU."""
        transposed = self.metadata.kernels.keys_transposed
        return reference.paged_attention(
            self.query, self.kv_cache, self.metadata, self.scale, keys_transposed=transposed
        ).cpu()


def _make_batch(
    kernels: Kernels,
    shape: Shape,
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch of requests, each (query_len, seq_len), those with one query first."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*lens, strict=True))
    counts = -(-seq_lens // shape.block_size)
    num_blocks = int(counts.sum()) + 2
    shuffled = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    table = np.full((len(lens), int(counts.max()) + 1), NO_SUCH_BLOCK, np.int32)
    for row, blocks in zip(table, np.split(shuffled, np.cumsum(counts)), strict=False):
        row[: len(blocks)] = blocks
    common = {"block_size": shape.block_size, "kernels": kernels, "device": torch.device(device)}
    metadata = build_attention_metadata(query_lens, seq_lens, table, **common)
    all_slots = build_attention_metadata(seq_lens, seq_lens, table, **common).slot_mapping

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=generator).to(device, dtype)

    key, value = (random(len(all_slots), shape.num_kv_heads) for _ in range(2))
    cache_shape = (2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    kv_cache = torch.full(cache_shape, float("nan"), dtype=dtype, device=device)
    reference.write_kv(key, value, kv_cache, all_slots, keys_transposed=kernels.keys_transposed)
    query = random(metadata.num_tokens, shape.num_heads)
    return Batch(query, key, value, kv_cache, metadata, all_slots, shape.head_dim**-0.5)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, *, exact_weights: bool = True) -> None:
    """Compare with a float64 reference: float32 to a few units, narrower types to their own rounding.

    Without `exact_weights` the softmax weights may be rounded to the type as well.
    """
    precision = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[actual.dtype]
    absolute = 2e-6 + (0.0 if exact_weights else 4 * precision)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6 + precision, atol=absolute)


MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """See `_make_batch`."""
    return _make_batch


@pytest.fixture(scope="session")
def make_shape() -> type[Shape]:
    """See `Shape`."""
    return Shape


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """See `_assert_close`."""
    return _assert_close
