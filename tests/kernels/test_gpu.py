"""The Triton kernels on a real device, against the reference."""

from __future__ import annotations

import pytest
import torch

from nbengine.kernels import reference
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.dispatch import select_expert_kernels, select_kernels
from nbengine.kernels.torch.backend import TorchKernels
from nbengine.kernels.torch.experts import TorchExperts
from tests.support.thorough import combinations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHAPES = [(9, 3, 64, 16), (32, 8, 128, 16), (4, 4, 80, 8), (8, 1, 96, 32), (4, 2, 256, 64), (16, 8, 32, 16)]
LENS = {
    "decode": [(1, n) for n in (1, 15, 16, 17, 127, 128, 129, 1000, 4097)],
    "prefill": [(n, n) for n in (2, 15, 16, 17, 63, 64, 65, 300)],
    "mixed": [(1, 33), (1, 2000), (4, 4), (17, 100), (200, 1100)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def make_kernels():
    def make(dtype):
        kernels = select_kernels(torch.device("cuda"), dtype)
        assert kernels.name == "triton"
        return kernels

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", list(LENS))
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference_and_reads_no_poison(
    make_kernels, make_batch, make_shape, assert_close, shape, lens, dtype
):
    batch = make_batch(make_kernels(dtype), make_shape(*shape), LENS[lens], dtype, device="cuda")
    assert_close(batch.run(), batch.expected(), exact_weights=False)


RULES: dict[str, dict[str, int]] = {"all": {}, "window": {"window": 50}, "chunk": {"chunk": 40}}


@pytest.mark.parametrize(
    ("rule", "extras", "dtype"), combinations(RULES, ["rule", "cap", "sinks"], DTYPES, together=2)
)
def test_attention_under_options_equals_the_reference(
    make_kernels, make_batch, make_shape, forget_unseen, assert_close, rule, extras, dtype
):
    lens = [(1, 1), (1, 33), (1, 430), (1, 3000), (23, 70)]
    batch = make_batch(make_kernels(dtype), make_shape(6, 2, 40, 16), lens, dtype, device="cuda")
    sinks = torch.linspace(-3, 4, 6, device="cuda").to(dtype) if extras == "sinks" else None
    cap = 3.0 if extras == "cap" else None
    batch.options = AttentionOptions(0.2, soft_cap=cap, sinks=sinks, **RULES[rule])
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected(), exact_weights=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_equals_the_reference_bit_for_bit(make_kernels, make_batch, make_shape, dtype):
    kernels = make_kernels(dtype)
    batch = make_batch(kernels, make_shape(6, 3, 80, 8), [(1, 200), (1, 3)], dtype, device="cuda")
    slots = batch.all_slots.clone()
    slots[5] = -1
    expected, actual = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    reference.write_kv(batch.key, batch.value, expected, slots)
    kernels.write_kv(batch.key, batch.value, actual, slots)
    assert torch.equal(actual, expected)


def test_kernels_are_right_after_a_warm_up(make_kernels, make_batch, make_shape, assert_close):
    kernels = make_kernels(torch.bfloat16)
    kernels.warm_up(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    batch = make_batch(kernels, make_shape(9, 3, 64, 16), LENS["mixed"], torch.bfloat16, device="cuda")
    assert_close(batch.run(), batch.expected(), exact_weights=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_equals_the_reference(make_batch, make_shape, assert_close, dtype):
    batch = make_batch(TorchKernels(), make_shape(9, 3, 64, 16), LENS["mixed"], dtype, device="cuda")
    assert_close(batch.run(), batch.expected(), exact_weights=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_the_reference_and_read_no_poison(make_expert_batch, dtype):
    kernels = select_expert_kernels(torch.device("cuda"), dtype)
    assert kernels.name == "triton"
    batch = make_expert_batch(dtype=dtype, device="cuda")
    output = batch.run(kernels)
    batch.check(output)
    assert torch.equal(batch.run(kernels), output)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_real_size_equal_plain_torch(expert_batch, dtype):
    kernels = select_expert_kernels(torch.device("cuda"), dtype)
    for num_tokens in (1, 16, 700):
        batch = expert_batch.random(
            num_tokens, 64, 8, hidden=1024, inner=384, elsewhere=64, dtype=dtype, device="cuda"
        )
        # Both round to bfloat16: results of 4 and more may differ by a last bit, 2**-7 of their size.
        rtol, atol = (0, 1e-4) if dtype is torch.float32 else (2**-7, 3e-2)
        torch.testing.assert_close(batch.run(kernels), batch.run(TorchExperts()), rtol=rtol, atol=atol)
