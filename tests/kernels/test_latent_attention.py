"""Attention over latents on the CPU against the reference, whatever lies where nobody may read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu import attention_functions
from nbengine.kernels.dispatch import select_kernels
from nbengine.kernels.latent import LatentOptions
from nbengine.kernels.torch.backend import TorchKernels
from tests.kernels.latent_batches import LENS, SHAPES, LatentBatch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernels_of(kind: str, dtype: torch.dtype, hidden: torch.dtype | None = None) -> Any:
    return TorchKernels() if kind == "torch" else select_kernels(CPU, dtype, hidden)


@pytest.mark.parametrize("kind", ["torch", "cpu"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference_and_reads_no_poison(
    assert_close: Any, kind: str, shape: tuple[int, int, int, int], lens: str
) -> None:
    batch = LatentBatch.of(kernels_of(kind, torch.float32), shape, LENS[lens])
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("kind", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_narrow_types_are_widened(assert_close: Any, kind: str, dtype: torch.dtype) -> None:
    for lens in LENS.values():
        batch = LatentBatch.of(kernels_of(kind, dtype), SHAPES[0], lens, dtype)
        assert_close(batch.run(), batch.expected())


def test_a_narrow_cache_serves_wide_queries(assert_close: Any) -> None:
    kernels = kernels_of("cpu", torch.float16, torch.float32)
    batch = LatentBatch.of(kernels, SHAPES[0], LENS["mixed"], torch.float32, cache_dtype=torch.float16)
    assert_close(batch.run(), batch.expected())
    batch.check_write()


@pytest.mark.parametrize("kind", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_written_bit_for_bit_where_they_have_a_slot(kind: str, dtype: torch.dtype) -> None:
    LatentBatch.of(kernels_of(kind, dtype), SHAPES[1], [(1, 20), (1, 3)], dtype).check_write()


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_a_long_prompt_of_many_heads_is_cut_into_tiles(assert_close: Any, kind: str) -> None:
    batch = LatentBatch.of(kernels_of(kind, torch.float32), (64, 16, 8, 16), [(150, 300)])
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_a_request_gets_what_it_gets_alone(assert_close: Any, kind: str) -> None:
    kernels = kernels_of(kind, torch.float32)
    batch = LatentBatch.of(kernels, SHAPES[0], LENS["mixed"])
    together, start = batch.run(), 0
    for request, (query_len, _) in enumerate(LENS["mixed"]):
        alone = LatentBatch.of(kernels, SHAPES[0], [LENS["mixed"][request]])
        stop = start + query_len
        alone.query = batch.query[start:stop]
        alone.cache = batch.cache
        alone.metadata.block_table = batch.metadata.block_table[request : request + 1]
        if kind == "cpu":
            assert torch.equal(alone.run(), together[start:stop])
        else:
            torch.testing.assert_close(alone.run(), together[start:stop], rtol=1e-5, atol=1e-6)
        start = stop


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(chunk: int) -> None:
    kernels = kernels_of("cpu", torch.bfloat16, torch.float32)
    given: dict[str, Any] = {"cache_dtype": torch.bfloat16}
    whole = LatentBatch.of(kernels, (8, 48, 24, 16), [(200, 330)], **given)
    together = whole.run()
    for start in range(0, 200, chunk):
        stop = min(start + chunk, 200)
        part = LatentBatch.of(kernels, (8, 48, 24, 16), [(stop - start, 130 + stop)], **given)
        part.query, part.cache = whole.query[start:stop], whole.cache
        part.metadata.block_table = whole.metadata.block_table
        assert torch.equal(part.run(), together[start:stop])


def test_warm_up_leaves_nothing_to_compile(assert_close: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of("cpu", torch.float32)
    heads, rank, rope, block_size = 10, 40, 16, 4
    batch = LatentBatch.of(kernels, (heads, rank, rope, block_size), LENS["mixed"])
    kernels.warm_up_latent(heads, rank + rope, block_size, batch.options)

    def refuse(*_: object) -> None:
        raise AssertionError("compiled during a step")

    monkeypatch.setattr(attention_functions, "compile_tried", refuse)
    batch.check_write()
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize(("scale", "rank", "name"), [(float("nan"), 4, "scale"), (1.0, 0, "rank")])
def test_options_out_of_range_are_refused(scale: float, rank: int, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
        LatentOptions(scale, rank)
