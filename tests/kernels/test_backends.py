"""The kernels that run on the CPU, compiled and plain torch, against the reference."""

from __future__ import annotations

import pytest
import torch

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import reference
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.torch.backend import TorchKernels

SHAPES = [
    (9, 3, 64, 16),
    (8, 1, 32, 32),
    (4, 4, 80, 8),
    (14, 2, 96, 64),
    (4, 2, 256, 16),
    (3, 1, 40, 1),
    (32, 1, 16, 256),
]
LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 127, 128, 129, 300)],
    "prefill": [(n, n) for n in (2, 15, 16, 17, 150)],
    "mixed": [(1, 33), (1, 1), (4, 4), (17, 100), (2, 259), (50, 51)],
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.fixture(params=["cpu", "torch"])
def make_kernels(request):
    return CpuKernels if request.param == "cpu" else lambda dtype: TorchKernels()


def cases():
    """Every shape in float32, every type with the default model's shape."""
    for lens in LENS:
        for shape in SHAPES:
            yield pytest.param(shape, lens, torch.float32, id=f"{shape}-{lens}-float32")
        for dtype in (torch.bfloat16, torch.float16):
            yield pytest.param(SHAPES[0], lens, dtype, id=f"{SHAPES[0]}-{lens}-{DTYPES[dtype]}")


@pytest.mark.parametrize(("shape", "lens", "dtype"), list(cases()))
def test_attention_equals_the_reference_and_reads_no_poison(
    make_kernels, make_batch, make_shape, assert_close, shape, lens, dtype
):
    batch = make_batch(make_kernels(dtype), make_shape(*shape), LENS[lens], dtype)
    assert_close(batch.run(), batch.expected(), weights=batch.weights)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (4, 4, 80, 8), (3, 1, 40, 1)])
def test_write_equals_the_reference_bit_for_bit(make_kernels, make_batch, make_shape, shape, dtype):
    kernels = make_kernels(dtype)
    batch = make_batch(kernels, make_shape(*shape), [(1, 70), (1, 3), (1, 130)], dtype)
    slots = batch.all_slots.clone()
    slots[5] = -1
    expected, actual = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    reference.write_kv(batch.key, batch.value, expected, slots, keys_transposed=kernels.keys_transposed)
    kernels.write_kv(batch.key, batch.value, actual, slots)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (4, 4, 80, 8), (3, 1, 40, 1)])
@pytest.mark.parametrize("lens", LENS)
def test_rows_may_be_of_a_wider_type_than_the_cache(
    make_batch, make_shape, assert_close, lens, shape, cache_dtype
):
    kernels = CpuKernels(cache_dtype, torch.float32)
    batch = make_batch(kernels, make_shape(*shape), LENS[lens], cache_dtype)
    chance = torch.Generator().manual_seed(1)
    batch.query = torch.randn(batch.query.shape, generator=chance)
    output = batch.run()
    assert output.dtype is torch.float32
    assert_close(output, batch.expected(), weights=batch.weights)
    key, value = (torch.randn(batch.key.shape, generator=chance) for _ in range(2))
    expected, actual = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    reference.write_kv(key, value, expected, batch.all_slots, keys_transposed=True)
    kernels.write_kv(key, value, actual, batch.all_slots)
    assert torch.equal(actual, expected)
    with pytest.raises(InvalidArgumentError, match=r"query\.dtype must be the model's, torch\.float32"):
        kernels.paged_attention(batch.query.to(cache_dtype), batch.kv_cache, batch.metadata, batch.options)


def test_what_float16_cannot_hold_is_written_as_its_largest_number(make_batch, make_shape):
    kernels = CpuKernels(torch.float16, torch.float32)
    batch = make_batch(kernels, make_shape(4, 2, 40, 16), [(1, 1)], torch.float16)
    value = torch.zeros(1, 2, 40)
    value[0, 1, :5] = torch.tensor([1e6, -torch.inf, torch.nan, 65504.0, -65519.0])
    cache = torch.zeros_like(batch.kv_cache)
    kernels.write_kv(value, value, cache, torch.zeros(1, dtype=torch.int64))
    largest = torch.finfo(torch.float16).max
    for found in (cache[1, 0, 1, 0, :5], reference.rows_of_keys(cache, True)[0, 1, 0, :5]):
        assert found.isnan().tolist() == [False, False, True, False, False]
        assert found.nan_to_num(0).tolist() == [largest, -largest, 0, largest, -largest]


def test_views_into_a_joint_projection_are_read_in_place(make_kernels, make_batch, make_shape, assert_close):
    kernels = make_kernels(torch.float32)
    batch = make_batch(kernels, make_shape(6, 2, 32, 16), [(1, 20), (3, 9)])
    joint = torch.randn(4, 10, 32)
    joint[:, :6] = batch.query
    batch.query, key, value = joint.split([6, 2, 2], dim=1)
    kernels.write_kv(key, value, batch.kv_cache, batch.metadata.slot_mapping)
    assert_close(batch.run(), batch.expected())
    stored = reference.rows_of_keys(batch.kv_cache, kernels.keys_transposed)
    block, offset = divmod(int(batch.metadata.slot_mapping[0]), 16)
    assert torch.equal(stored[block, :, offset], key[0])


def test_one_query_expanded_over_all_tokens_gives_a_contiguous_result(
    make_kernels, make_batch, make_shape, assert_close
):
    batch = make_batch(make_kernels(torch.float32), make_shape(6, 2, 32, 16), [(1, 20), (3, 9)])
    batch.query = batch.query[:1].expand(4, -1, -1)
    output = batch.run()
    assert output.is_contiguous()
    assert_close(output, batch.expected())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_single_token_sees_only_its_own_value(make_kernels, make_batch, make_shape, dtype):
    batch = make_batch(make_kernels(dtype), make_shape(6, 2, 32, 16), [(1, 1)], dtype)
    assert torch.equal(batch.run(), batch.value.repeat_interleave(3, dim=1))


def test_huge_scores_do_not_overflow(make_kernels, make_batch, make_shape, assert_close):
    batch = make_batch(make_kernels(torch.float32), make_shape(6, 2, 32, 16), [(1, 200), (30, 90)])
    batch.query *= 1000
    output = batch.run()
    assert torch.isfinite(output).all()
    torch.testing.assert_close(output.double(), batch.expected(), rtol=1e-2, atol=1e-3)


def test_a_broken_query_breaks_its_own_row_alone(make_kernels, make_batch, make_shape, assert_close):
    batch = make_batch(make_kernels(torch.float32), make_shape(6, 2, 32, 16), [(1, 50), (1, 60), (9, 70)])
    expected = batch.expected()
    batch.query[4, 3, 7] = float("nan")
    output = batch.run()
    assert torch.isnan(output[4, 3]).all()
    output[4, 3] = expected[4, 3]
    assert_close(output, expected)
