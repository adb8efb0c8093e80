"""The compiled choice of experts and the sum of their outcomes, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nbengine.kernels.cpu.expert_steps import CpuCombine
from nbengine.kernels.cpu.routing import CpuRouting


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("experts", [1, 5, 16, 60, 128])
@pytest.mark.parametrize("tokens", [1, 3, 4, 11])
def test_scores_are_the_product_with_the_weight(tokens: int, experts: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 64), random(experts, 64, seed=1).to(dtype)
    scores = CpuRouting(experts, 1, renormalize=False).scores(x, weight)
    torch.testing.assert_close(scores[:, :experts], x @ weight.float().T)
    alone = [CpuRouting(experts, 1, renormalize=False).scores(row[None], weight)[0] for row in x]
    assert torch.equal(scores[:, :experts], torch.stack(alone)[:, :experts])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (5, 3), (16, 16), (60, 4), (128, 8)])
def test_the_likeliest_experts_are_chosen_with_their_probabilities(
    experts: int, per_token: int, renormalize: bool
) -> None:
    scores = random(33, experts) * 5
    weights, chosen = CpuRouting(experts, per_token, renormalize=renormalize).choose(scores.clone())
    expected, places = scores.softmax(-1).topk(per_token)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(chosen, places)
    torch.testing.assert_close(weights, expected)


def test_of_equal_scores_the_first_come_first() -> None:
    weights, chosen = CpuRouting(20, 3, renormalize=True).choose(torch.zeros(2, 20))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_choose_experts_that_exist_and_poison_their_row_alone(
    value: float,
) -> None:
    scores = random(3, 20)
    scores[1] = value
    weights, chosen = CpuRouting(20, 4, renormalize=True).choose(scores)
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < 20


def test_outcomes_are_added_in_order() -> None:
    outputs, weights = random(50, 48), random(7, 3, seed=1)
    places = torch.randint(0, 50, (7, 3), generator=torch.Generator().manual_seed(2))
    sums = CpuCombine(48)(weights, outputs, places)
    expected = (weights.double()[..., None] * outputs.double()[places]).sum(1)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums[3], CpuCombine(48)(weights[3:4], outputs, places[3:4])[0])
