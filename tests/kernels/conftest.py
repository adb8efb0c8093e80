"""Batches for the kernel tests: caches filled through the reference, everything else poisoned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nbengine.kernels import reference
from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import compile_attention
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.dispatch import ExpertKernels, Kernels
from nbengine.kernels.kv_cache import cache_shape
from tests.support.shared_kernels import many_kernels_are_compiled_once

__all__ = ["many_kernels_are_compiled_once"]

NO_SUCH_BLOCK = 2**30
NOWHERE = [NO_SUCH_BLOCK, -1, -(2**31), 2**31 - 1]
"""Entries of a block table that must not be read."""


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
    """One step: its queries, and the cache that holds its tokens and NaN everywhere else (of int8 the scales)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    all_slots: torch.Tensor
    options: AttentionOptions

    def run(self) -> torch.Tensor:
        """The kernels' output, on the CPU."""
        output = self.metadata.kernels.paged_attention(self.query, self.kv_cache, self.metadata, self.options)
        return output.cpu()

    @property
    def weights(self) -> torch.dtype:
        """The type to which the kernels of the CPU round the softmax weights of a cache like this one."""
        if not isinstance(self.metadata.kernels, CpuKernels):
            return torch.float32
        elements = {dtype: element for element, dtype in TYPES.items()}
        (_, heads, channels), (_, _, kv_heads, block_size, _) = self.query.shape, self.kv_cache.shape
        types = elements[self.kv_cache.dtype], elements[self.query.dtype]
        return TYPES[compile_attention(channels, heads // kv_heads, block_size, *types).decode_shape.factor]

    def expected(self) -> torch.Tensor:
        """The reference's output, float64, on the CPU."""
        transposed = self.metadata.kernels.keys_transposed
        return reference.paged_attention(
            self.query, self.kv_cache, self.metadata, self.options, keys_transposed=transposed
        ).cpu()


def _make_batch(
    kernels: Kernels,
    shape: Shape,
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    *,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch of requests, each (query_len, seq_len), those with one query first; the cache is of type `dtype`
    unless another is given."""
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
    cache_dtype = cache_dtype or dtype
    sizes = cache_shape(cache_dtype, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    # Four bytes of -1 are a scale that is NaN.
    poison = -1 if cache_dtype is torch.int8 else float("nan")
    kv_cache = torch.full(sizes, poison, dtype=cache_dtype, device=device)
    reference.write_kv(key, value, kv_cache, all_slots, keys_transposed=kernels.keys_transposed)
    query = random(metadata.num_tokens, shape.num_heads)
    return Batch(query, key, value, kv_cache, metadata, all_slots, AttentionOptions(shape.head_dim**-0.5))


_PRECISION = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, weights: torch.dtype = torch.float32
) -> None:
    """Compare with a float64 reference: float32 to a few units, narrower types to their own rounding.

    The softmax weights may be rounded to the type `weights` before.
    """
    relative, absolute = 2e-6 + _PRECISION[actual.dtype], 2e-6 + 4 * _PRECISION[weights]
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=absolute)


@dataclass
class ExpertBatch:
    """Tokens and their experts; the weights of experts that no token takes are NaN.

    Of the experts a token takes those from `num_experts` on are elsewhere.
    """

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def random(
        cls,
        num_tokens: int,
        num_experts: int,
        per_token: int,
        *,
        hidden: int = 40,
        inner: int = 24,
        elsewhere: int = 0,
        popular: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> ExpertBatch:
        """Make a batch; `elsewhere` more experts are not here, and tokens choose among the first
        `popular`."""
        generator = torch.Generator().manual_seed(num_tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        total = num_experts + elsewhere
        preference = torch.rand(num_tokens, total, generator=generator)
        preference[:, : popular or total] += 1
        chosen = preference.topk(per_token).indices
        gate_up = normal(num_experts, 2 * inner, hidden) * hidden**-0.5
        down = normal(num_experts, hidden, inner) * inner**-0.5
        for expert in set(range(num_experts)) - set(chosen.flatten().tolist()):
            gate_up[expert], down[expert] = float("nan"), float("nan")
        weights = torch.rand(num_tokens, per_token, generator=generator)
        return cls(
            normal(num_tokens, hidden).to(device, dtype),
            gate_up.to(device, dtype),
            down.to(device, dtype),
            weights.to(device),
            chosen.clamp(max=num_experts).to(device),
        )

    def run(self, kernels: ExpertKernels) -> torch.Tensor:
        """The kernels' output."""
        return kernels.experts(self.x, self.gate_up, self.down, self.weights, self.experts)

    def check(self, actual: torch.Tensor) -> None:
        """Compare with the reference; narrower types than float32 round every expert's two results."""
        expected = reference.experts(self.x, self.gate_up, self.down, self.weights, self.experts)
        precision = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[actual.dtype]
        tolerance = 4e-6 + 4 * precision
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


EXPERT_BATCHES: dict[str, dict[str, int]] = {
    "one token": {"num_tokens": 1, "num_experts": 8, "per_token": 2},
    "one expert": {"num_tokens": 70, "num_experts": 1, "per_token": 1},
    "few tokens of many experts": {"num_tokens": 3, "num_experts": 60, "per_token": 4},
    "all experts": {"num_tokens": 9, "num_experts": 5, "per_token": 5},
    "many tokens": {"num_tokens": 150, "num_experts": 7, "per_token": 2},
    "two popular experts": {"num_tokens": 130, "num_experts": 6, "per_token": 2, "popular": 2},
    "some elsewhere": {"num_tokens": 40, "num_experts": 3, "per_token": 2, "elsewhere": 4},
    "most elsewhere": {"num_tokens": 4, "num_experts": 1, "per_token": 1, "elsewhere": 60},
    "odd sizes": {"num_tokens": 33, "num_experts": 3, "per_token": 2, "hidden": 77, "inner": 35},
    "several blocks each way": {
        "num_tokens": 20,
        "num_experts": 4,
        "per_token": 2,
        "hidden": 200,
        "inner": 130,
    },
}


def _forget_unseen(batch: Batch) -> None:
    """Fill the blocks of which no query sees a token with NaN, and their entries in the table with no block."""
    metadata, block_size = batch.metadata, batch.kv_cache.shape[3]
    poison = -1 if batch.kv_cache.dtype is torch.int8 else float("nan")
    query_lens = metadata.query_start_loc.diff().tolist()
    for row, query_len, seq_len in zip(
        metadata.block_table, query_lens, metadata.seq_lens.tolist(), strict=True
    ):
        gone = batch.options.first_seen(seq_len - query_len) // block_size
        batch.kv_cache[:, row[:gone].long()] = poison
        row[:gone] = torch.tensor((NOWHERE * gone)[:gone], dtype=torch.int32)


MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """See `_make_batch`."""
    return _make_batch


@pytest.fixture(scope="session")
def forget_unseen() -> Callable[[Batch], None]:
    """See `_forget_unseen`."""
    return _forget_unseen


@pytest.fixture(scope="session")
def make_shape() -> type[Shape]:
    """See `Shape`."""
    return Shape


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """See `_assert_close`."""
    return _assert_close


@pytest.fixture(params=list(EXPERT_BATCHES))
def make_expert_batch(request: pytest.FixtureRequest) -> Callable[..., ExpertBatch]:
    """Makes each of `EXPERT_BATCHES`, of a data type and on a device."""

    def make(**settings: Any) -> ExpertBatch:
        return ExpertBatch.random(**EXPERT_BATCHES[request.param], **settings)

    return make


@pytest.fixture(scope="session")
def expert_batch() -> type[ExpertBatch]:
    """See `ExpertBatch`."""
    return ExpertBatch
