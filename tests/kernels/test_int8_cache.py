"""The int8 KV cache of the CPU kernels, against the reference on what is stored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import dispatch, reference
from nbengine.kernels.cpu import elements as cpu_elements
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.dispatch import select_kernels
from nbengine.kernels.kv_cache import LEAST_LARGEST, cache_shape, head_width
from tests.support.thorough import amount

INT8 = torch.int8
CPU = torch.device("cpu")
SHAPES = [
    (9, 3, 64, 16),
    (8, 1, 32, 32),
    (4, 4, 80, 8),
    (14, 2, 128, 64),
    (4, 2, 40, 2),
    (3, 1, 40, 1),
    (2, 2, 64, 4),
    (6, 2, 6, 1),
    (2, 1, 512, 16),
]
LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 127, 128, 129, 300)],
    "prefill": [(n, n) for n in (2, 15, 16, 17, 150)],
    "mixed": [(1, 33), (1, 1), (4, 4), (17, 100), (2, 259), (50, 51)],
}
requests = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 200)))


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def written(key, value, slots, shape, num_blocks, dtype=torch.float32):
    """The bytes of a cache of -1 after a write."""
    cache = torch.full(cache_shape(INT8, num_blocks, shape[1], shape[3], shape[2]), -1, dtype=INT8)
    CpuKernels(INT8, dtype).write_kv(key, value, cache, slots)
    return cache


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.bfloat16), (SHAPES[0], torch.float16)],
    ids=str,
)
def test_attention_equals_the_reference_on_what_is_stored_and_reads_no_poison(
    make_batch, make_shape, assert_close, shape, lens, dtype
):
    batch = make_batch(CpuKernels(INT8, dtype), make_shape(*shape), LENS[lens], dtype, cache_dtype=INT8)
    output = batch.run()
    assert output.dtype is dtype
    assert_close(output, batch.expected())


@settings(max_examples=amount(6, thorough=500), deadline=None)
@given(
    lens=st.lists(requests, min_size=1, max_size=5),
    group=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([32, 40, 64, 80, 128]),
    block_size=st.sampled_from([1, 4, 16, 64]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_batch_equals_the_reference(
    make_batch, make_shape, assert_close, lens, group, head_dim, block_size, seed
):
    lens.sort(key=lambda pair: pair[0] > 1)
    shape = make_shape(2 * group, 2, head_dim, block_size)
    batch = make_batch(CpuKernels(INT8), shape, lens, cache_dtype=INT8, seed=seed)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_write_equals_the_reference_bit_for_bit_and_touches_nothing_else(
    make_batch, make_shape, shape, dtype
):
    kernels = CpuKernels(INT8, dtype)
    batch = make_batch(kernels, make_shape(*shape), [(1, 70), (1, 3), (1, 130)], dtype, cache_dtype=INT8)
    slots = batch.all_slots.clone()
    slots[5] = -1
    batch.key[7] *= 1e-4
    batch.value[8] = 0
    expected, actual = torch.full_like(batch.kv_cache, 77), torch.full_like(batch.kv_cache, 77)
    reference.write_kv(batch.key, batch.value, expected, slots, keys_transposed=True)
    kernels.write_kv(batch.key, batch.value, actual, slots)
    assert torch.equal(actual, expected)


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(
    exponents=st.lists(st.integers(-140, 125), min_size=4, max_size=4),
    head_dim=st.sampled_from([6, 32, 40, 80]),
    seed=st.integers(0, 99),
)
def test_a_number_is_stored_within_half_a_step_of_its_heads_largest(exponents, head_dim, seed):
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(exponents, dtype=torch.float64).exp2()[:, None, None]
    key, value = (((torch.rand(4, 1, head_dim, generator=chance) * 2 - 1) * sizes).float() for _ in range(2))
    cache = written(key, value, torch.arange(4), (1, 1, head_dim, 4), 1)
    for half, numbers, transposed in ((cache[0], key, True), (cache[1], value, False)):
        levels, scales = reference.rows_of(half, head_dim, transposed)
        stored = (levels.double() * scales.double()[..., None])[0, 0]
        numbers = numbers[:, 0].double()
        step = numbers.abs().amax(-1, keepdim=True).clamp(min=LEAST_LARGEST) / 127
        assert ((stored - numbers).abs() <= step * (0.5 + 1e-4)).all()


def test_a_tokens_bytes_depend_neither_on_chunks_nor_on_neighbours_nor_on_threads(torch_threads):
    shape, tokens = (6, 2, 40, 16), 200
    chance = torch.Generator().manual_seed(3)
    key, value = (torch.randn(tokens, 2, 40, generator=chance) for _ in range(2))
    slots = torch.randperm(16 * 16, generator=chance)[:tokens]
    whole = written(key, value, slots, shape, 16)
    for threads in (1, 3):
        torch_threads(threads)
        assert torch.equal(written(key, value, slots, shape, 16), whole)
    kernels, pieces = CpuKernels(INT8), torch.full_like(whole, -1)
    for first in range(0, tokens, 7):
        part = slice(first, first + 7)
        kernels.write_kv(key[part], value[part], pieces, slots[part])
    assert torch.equal(pieces, whole)
    # Other tokens in the same blocks, a hundred times as large, change none of the first token's bytes.
    louder = [torch.cat([x[:1], x[1:] * 100]) for x in (key, value)]
    there = written(*louder, slots, shape, 16)
    block, offset = divmod(int(slots[0]), 16)
    for half, transposed in ((0, True), (1, False)):
        for before, after in zip(
            reference.rows_of(whole[half], 40, transposed),
            reference.rows_of(there[half], 40, transposed),
            strict=True,
        ):
            assert torch.equal(before[block, :, offset], after[block, :, offset])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("at", [0, 37, 63])
def test_a_number_that_is_none_spoils_what_reads_it_and_nothing_else(
    make_batch, make_shape, assert_close, bad, is_key, at
):
    """Request 1 is a prompt of 70 tokens, whose token `at` has a broken number in KV head 1."""
    shape, lens = make_shape(6, 2, 64, 16), [(1, 50), (70, 70), (9, 40)]
    batch = make_batch(CpuKernels(INT8), shape, lens, cache_dtype=INT8)
    expected = batch.expected()
    broken = (batch.key if is_key else batch.value).clone()
    token = 50 + at
    broken[token, 1, 13] = bad
    pair = (broken, batch.value) if is_key else (batch.key, broken)
    one = slice(token, token + 1)
    batch.metadata.kernels.write_kv(pair[0][one], pair[1][one], batch.kv_cache, batch.all_slots[one])
    output = batch.run()
    spoilt = torch.zeros(output.shape[:2], dtype=torch.bool)
    spoilt[1 + at : 71, 3:] = True
    assert output[spoilt].isnan().all()
    output[spoilt] = expected[spoilt].float()
    assert_close(output, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_value_spoils_the_decode_that_reads_it_though_its_weight_is_0(make_batch, make_shape, bad):
    batch = make_batch(CpuKernels(INT8), make_shape(2, 1, 32, 16), [(1, 400), (1, 20)], cache_dtype=INT8)
    batch.query *= 1e3
    value = batch.value[:1].clone()
    value[0, 0, 5] = bad
    batch.metadata.kernels.write_kv(batch.key[:1], value, batch.kv_cache, batch.all_slots[:1])
    output = batch.run()
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_results_depend_neither_on_threads_nor_on_company(make_batch, make_shape, torch_threads):
    shape, lens = make_shape(6, 2, 32, 16), [(1, 700), (1, 3), (40, 333), (5, 5)]
    outputs = []
    for threads in (1, 2, 5):
        torch_threads(threads)
        outputs.append(make_batch(CpuKernels(INT8), shape, lens, cache_dtype=INT8).run())
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    together = make_batch(CpuKernels(INT8), shape, lens, cache_dtype=INT8)
    alone = make_batch(CpuKernels(INT8), shape, lens[:1], cache_dtype=INT8)
    here, there = (batch.metadata.block_table[0, :44].long() for batch in (alone, together))
    alone.kv_cache[:, here] = together.kv_cache[:, there]
    alone.query[:] = together.query[:1]
    assert torch.equal(alone.run(), outputs[0][:1])


def test_a_cache_takes_a_byte_a_number_and_one_scale_a_head():
    assert head_width(INT8, 64) == 68
    assert head_width(INT8, 6) == 12
    # Twice as wide as a head of 256, with which it may share blocks.
    assert head_width(INT8, 512) == 2 * head_width(INT8, 256) == 520
    assert head_width(torch.float16, 6) == 6
    assert cache_shape(INT8, 5, 3, 16, 64) == (2, 5, 3, 16, 68)


def test_a_cache_of_another_width_is_refused_before_it_is_read(make_batch, make_shape):
    batch = make_batch(CpuKernels(INT8), make_shape(4, 2, 32, 16), [(1, 9)], cache_dtype=INT8)
    narrow = torch.zeros(2, 4, 2, 16, 32, dtype=INT8)
    with pytest.raises(InvalidArgumentError, match=r"kv_cache.*36 elements a head"):
        batch.metadata.kernels.paged_attention(batch.query, narrow, batch.metadata, batch.options)
    with pytest.raises(InvalidArgumentError, match="kv_cache"):
        batch.metadata.kernels.write_kv(batch.key, batch.value, narrow, batch.all_slots)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_have_no_int8_cache(device):
    with pytest.raises(InvalidArgumentError, match="only the CPU has kernels for an int8 KV cache"):
        select_kernels(torch.device(device), INT8)


def test_a_cpu_without_compiled_kernels_has_no_int8_cache(monkeypatch):
    assert select_kernels(CPU, INT8, torch.bfloat16).name == "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(cpu_elements, "supports", lambda dtype: dtype is not torch.float16)
        assert dispatch.why_not_int8(CPU, torch.float32) is None
        with pytest.raises(InvalidArgumentError, match="processor lacks an instruction"):
            select_kernels(CPU, INT8, torch.float16)
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    with pytest.raises(InvalidArgumentError, match="llvmlite is not installed"):
        select_kernels(CPU, INT8)
