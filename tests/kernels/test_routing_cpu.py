"""The compiled choice of experts and the sum of their outcomes, against torch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from nbengine.kernels.cpu.expert_steps import CpuCombine
from nbengine.kernels.cpu.grouped_routing import CpuGroupedRouting
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
    factors = random(experts)
    routing = CpuRouting(experts, per_token, renormalize=renormalize, factors=factors)
    multiplied, same = routing.choose(scores.clone())
    assert torch.equal(same, chosen)
    assert torch.equal(multiplied, weights * factors[chosen])


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


def chosen_by_hand(
    logits: list[float],
    per_token: int,
    *,
    is_sigmoid: bool,
    correction: list[float] | None,
    groups: int,
    chosen_groups: int,
) -> tuple[list[int], list[float]]:
    """Choose by sorting, in double precision; return the experts and their scores."""
    whole = sum(math.exp(logit) for logit in logits)
    scores = [1 / (1 + math.exp(-logit)) if is_sigmoid else math.exp(logit) / whole for logit in logits]
    ranks = logits
    if correction is not None:
        ranks = [score + number for score, number in zip(scores, correction, strict=True)]
    size = len(logits) // groups

    def of_group(group: int) -> float:
        own = sorted(ranks[group * size : (group + 1) * size], reverse=True)
        return own[0] if correction is None else sum(own[:2])

    best = sorted(range(groups), key=of_group, reverse=True)[:chosen_groups]
    allowed = [expert for expert in range(len(logits)) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: ranks[expert], reverse=True)[:per_token]
    return chosen, [scores[expert] for expert in chosen]


@pytest.mark.parametrize(("is_sigmoid", "has_correction"), list(product([False, True], repeat=2)))
@pytest.mark.parametrize(
    ("experts", "per_token", "groups", "chosen_groups"),
    [(1, 1, 1, 1), (5, 3, 1, 1), (32, 4, 4, 2), (60, 6, 3, 2), (64, 6, 1, 1), (20, 4, 20, 7), (256, 8, 8, 4)],
)
def test_experts_of_the_best_groups_are_chosen(
    experts: int, per_token: int, groups: int, chosen_groups: int, is_sigmoid: bool, has_correction: bool
) -> None:
    logits = random(33, experts) * 3
    correction = random(experts, seed=1) / 2 if has_correction else None
    rule = {"is_sigmoid": is_sigmoid, "groups": groups, "chosen_groups": chosen_groups}

    def choose(rows: Tensor, factor: float, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        routing = CpuGroupedRouting(
            experts, per_token, renormalize=renormalize, correction=correction, factor=factor, **rule
        )
        return routing.choose(rows.clone())

    stated = None if correction is None else correction.tolist()
    rows = [chosen_by_hand(row, per_token, correction=stated, **rule) for row in logits.tolist()]
    expected = torch.tensor([scores for _, scores in rows])
    weights, chosen = choose(logits, 1.0, renormalize=False)
    assert chosen.tolist() == [numbers for numbers, _ in rows]
    torch.testing.assert_close(weights, expected)
    weights, again = choose(logits, 2.5, renormalize=True)
    assert torch.equal(again, chosen)
    torch.testing.assert_close(weights, 2.5 * expected / expected.sum(-1, keepdim=True))
    for row in (0, 32):
        alone, number = choose(logits[row : row + 1], 2.5, renormalize=True)
        assert torch.equal(alone[0], weights[row])
        assert torch.equal(number[0], chosen[row])


def test_of_equal_groups_and_experts_the_first_come_first() -> None:
    routing = CpuGroupedRouting(
        24, 5, renormalize=True, is_sigmoid=True, correction=torch.zeros(24), groups=6, chosen_groups=2
    )
    weights, chosen = routing.choose(torch.zeros(2, 24))
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(weights, torch.full((2, 5), 0.2))


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_in_groups_what_is_no_number_chooses_experts_that_exist_and_poisons_its_row_alone(
    is_sigmoid: bool,
) -> None:
    scores = random(3, 24)
    scores[1] = torch.nan
    routing = CpuGroupedRouting(
        24, 4, renormalize=True, is_sigmoid=is_sigmoid, correction=random(24), groups=6, chosen_groups=2
    )
    weights, chosen = routing.choose(scores)
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < 24


def test_outcomes_are_added_in_order() -> None:
    outputs, weights = random(50, 48), random(7, 3, seed=1)
    places = torch.randint(0, 50, (7, 3), generator=torch.Generator().manual_seed(2))
    sums = CpuCombine(48)(weights, outputs, places)
    expected = (weights.double()[..., None] * outputs.double()[places]).sum(1)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums[3], CpuCombine(48)(weights[3:4], outputs, places[3:4])[0])
