"""The compiled draw takes the token whose part of the distribution has the random number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nbengine.kernels.cpu.draw import MOST_KEPT
from nbengine.kernels.draw_parameters import DRAW_ROW, UNDECIDED
from nbengine.sampling.compiled_draws import CompiledDraws
from tests.support.thorough import amount


def parameters(
    uniform: Any, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.void]:
    rows = np.zeros(len(uniform), DRAW_ROW)
    rows["inverse"], rows["top_p"], rows["top_k"] = 1 / np.float32(temperature), top_p, top_k
    rows["log_min_p"], rows["uniform"] = np.log(min_p) if min_p else -np.inf, uniform
    return rows


def drawn(logits: NDArray[np.float32], rows: NDArray[np.void]) -> tuple[list[int], list[float]]:
    tokens, masses = CompiledDraws()(torch.from_numpy(logits), rows)
    return tokens.tolist(), masses.tolist()


def order_and_shares(
    logits: NDArray[np.float32], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, in the order in which they are walked, and how likely each is."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    likeliest = np.lexsort((np.arange(len(logits)), -logits))
    if not (top_k or top_p < 1 or min_p):
        return np.arange(len(logits)), weights / weights.sum()
    kept = likeliest[weights[likeliest] >= min_p * (1 - 1e-9)]
    if top_k:
        kth = np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
        kept = kept[logits[kept] >= kth]
    if top_p < 1:
        before = np.cumsum(weights[kept]) - weights[kept]
        kept = kept[before < top_p * weights[kept].sum()]
    return kept, weights[kept] / weights[kept].sum()


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 40]),
        "top_p": st.sampled_from([1.0, 1.0, 0.1, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 1.0]),
    }
)


@settings(max_examples=amount(200, thorough=10_000))
@given(
    width=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 700, 3000]),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    spread=st.sampled_from([0.1, 2.0, 12.0]),
    forbidden=st.booleans(),
    filters=FILTERS,
    seed=st.integers(0, 10**9),
)
def test_a_token_is_drawn_as_often_as_it_is_likely(
    width: int, levels: int, spread: float, forbidden: bool, filters: dict[str, Any], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    logits = (np.round(chance.normal(size=width) * levels) / levels * spread).astype(np.float32)
    if forbidden and width > 3:
        logits[chance.integers(0, width, width // 3)] = -np.inf
    if not np.isfinite(logits.max()):
        logits[0] = 1.0
    uniform = np.concatenate([chance.random(12), [0.0, 1 - 2.0**-52]])
    tokens, masses = drawn(np.tile(logits, (len(uniform), 1)), parameters(uniform, **filters))
    kept, shares = order_and_shares(logits, **filters)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / filters["temperature"])
    assert masses == pytest.approx([weights.sum()] * len(uniform), rel=1e-4)
    ends = np.cumsum(shares)
    if width <= MOST_KEPT or (filters["min_p"] and (weights > filters["min_p"] / 2).sum() < MOST_KEPT):
        assert UNDECIDED not in tokens
    places = {token: place for place, token in enumerate(kept.tolist())}
    for token, number in zip(tokens, uniform, strict=True):
        if token == UNDECIDED:
            continue
        # A token at the border of a filter may be on its other side, by rounding.
        if token in places:
            place = places[token]
            assert ends[place] - shares[place] - 2e-4 <= number <= ends[place] + 2e-4
            assert logits[token] > -np.inf
        else:
            assert filters["top_p"] < 1 or filters["min_p"]
            assert number > 1 - 1e-3


def test_the_order_of_equals_is_that_of_their_ids() -> None:
    logits = np.array([[1.0, 5.0, 2.0, 5.0, 2.0, 0.0]], np.float32)
    uniform = np.linspace(0, 1, 200, endpoint=False)
    tokens, _ = drawn(np.repeat(logits, 200, 0), parameters(uniform, top_k=3))
    # The two with the third largest logit are kept both.
    assert list(dict.fromkeys(tokens)) == [1, 3, 2, 4]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_without_a_distribution_is_told(filters: dict[str, Any]) -> None:
    rows = np.zeros((5, 40), np.float32)
    rows[1, 20], rows[2, 7], rows[3, :] = np.nan, np.inf, -np.inf
    rows[4, :39] = -np.inf
    tokens, masses = drawn(rows, parameters([0.99] * 5, **filters))
    assert np.isfinite([masses[0], masses[4]]).all()
    assert np.isnan(masses[1])
    assert np.isnan(masses[2])
    assert masses[3] == -np.inf
    assert tokens[4] == 39


def test_a_filter_that_keeps_too_many_leaves_its_row_to_others() -> None:
    logits = np.zeros((3, 5 * MOST_KEPT), np.float32)
    logits[1, 7] = 9.0
    rows = parameters([0.1, 0.1, 0.1], top_p=0.5)
    rows["top_k"][2] = 2
    tokens, masses = drawn(logits, rows)
    assert tokens[0] == tokens[2] == UNDECIDED
    assert tokens[1] == 7
    assert np.isfinite(masses).all()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_drawn_alike_alone_and_in_company(num_threads: int) -> None:
    chance = np.random.default_rng(5)
    logits = (chance.normal(size=(9, 2000)) * 3).astype(np.float32)
    rows = parameters(chance.random(9), temperature=0.8)
    rows["top_k"][3:], rows["top_p"][5:] = 20, 0.9
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = drawn(logits, rows)
        for place in range(9):
            alone = drawn(logits[place : place + 1], rows[place : place + 1].copy())
            assert alone == ([together[0][place]], [together[1][place]])
    finally:
        torch.set_num_threads(before)
