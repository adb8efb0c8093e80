"""The experts in plain torch against the reference, which is itself held against a loop over experts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import reference
from nbengine.kernels.dispatch import select_expert_kernels
from nbengine.kernels.torch import experts as experts_torch
from nbengine.kernels.torch.experts import TorchExperts

CPU = torch.device("cpu")
KERNELS = TorchExperts()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_equal_the_reference_and_read_no_poison(make_expert_batch, dtype):
    batch = make_expert_batch(dtype=dtype)
    batch.check(batch.run(KERNELS))


def test_the_reference_is_the_weighted_sum_of_gated_blocks(expert_batch):
    batch = expert_batch.random(12, 4, 2, elsewhere=2, dtype=torch.float32)
    expected = torch.zeros_like(batch.x)
    for expert in range(4):
        gate, up = F.linear(batch.x, batch.gate_up[expert]).chunk(2, dim=-1)
        block = F.linear(F.silu(gate) * up, batch.down[expert])
        weight = (batch.weights * (batch.experts == expert)).sum(1, keepdim=True)
        expected += torch.where(weight > 0, weight * block, 0)
    actual = reference.experts(batch.x, batch.gate_up, batch.down, batch.weights, batch.experts)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_whose_experts_are_all_elsewhere_get_nothing(expert_batch, dtype):
    batch = expert_batch.random(6, 2, 2, dtype=dtype)
    batch.experts[1:3] = 2
    output = batch.run(KERNELS)
    assert torch.equal(output[1:3], torch.zeros_like(output[1:3]))
    assert output[[0, 3, 4, 5]].abs().min(dim=1).values.gt(0).all()


def test_the_parts_of_all_workers_add_up_to_the_whole(expert_batch):
    batch = expert_batch.random(30, 6, 2)
    parts = []
    for first, stop in ((0, 2), (2, 5), (5, 6)):
        here = (batch.experts >= first) & (batch.experts < stop)
        own = torch.where(here, batch.experts - first, stop - first)
        weights = (batch.gate_up[first:stop], batch.down[first:stop])
        parts.append(KERNELS.experts(batch.x, *weights, batch.weights, own))
    torch.testing.assert_close(sum(parts), batch.run(KERNELS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bit_types_a_token_alone_gets_what_it_gets_in_company(expert_batch, dtype):
    batch = expert_batch.random(24, 4, 2, hidden=96, inner=80, dtype=dtype)
    kernels = select_expert_kernels(CPU, dtype)
    together = batch.run(kernels)
    for token in range(24):
        one = slice(token, token + 1)
        alone = kernels.experts(
            batch.x[one], batch.gate_up, batch.down, batch.weights[one], batch.experts[one]
        )
        assert torch.equal(alone, together[one])


def test_the_cpu_gets_plain_torch_without_a_warning_and_cuda_with_one(monkeypatch, caplog):
    assert isinstance(select_expert_kernels(CPU, torch.float32), TorchExperts)
    assert not caplog.records
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    assert isinstance(select_expert_kernels(torch.device("cuda"), torch.float32), TorchExperts)
    assert "triton is not installed" in caplog.text


def test_other_types_are_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="dtype must be float32, bfloat16 or float16"):
        select_expert_kernels(CPU, torch.float64)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 90])
def test_few_rows_of_large_weights_equal_the_reference(expert_batch, num_tokens):
    batch = expert_batch.random(num_tokens, 2, 1, hidden=512, inner=264)
    assert min(batch.gate_up[0].numel(), batch.down[0].numel()) >= experts_torch._LARGE_WEIGHT
    batch.check(batch.run(KERNELS))
