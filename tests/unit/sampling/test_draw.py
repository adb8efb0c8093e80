"""The sampler against transformers' logits warpers, and its draws against exact distributions."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nbengine.sampling import draw as draw_module
from nbengine.sampling import rows as rows_module
from nbengine.sampling.compiled_draws import CompiledDraws
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.random_streams import seeded_stream, uniforms
from nbengine.sampling.sampler import Sampler, StepConstraints
from tests.support.thorough import amount

CPU = torch.device("cpu")


def metadata(
    rows: int,
    *,
    vocab: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
) -> SamplingMetadata:
    def column(value: object, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), rows).copy()

    return SamplingMetadata.build(
        column(temperature, np.float32),
        column(top_k, np.int64),
        column(top_p, np.float64),
        column(min_p, np.float32),
        vocab_size=vocab,
        device=CPU,
    )


def sample(
    logits: Tensor,
    params: SamplingMetadata,
    uniform: Tensor | None = None,
    step: StepConstraints | None = None,
) -> Tensor:
    return Sampler(draws=DRAWS[0])(logits, params, uniform, step).token_ids


DRAWS: list[CompiledDraws | None] = [None]
"""The one that draws, None for torch."""


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def who_draws(request: pytest.FixtureRequest) -> None:
    DRAWS[0] = CompiledDraws() if request.param == "compiled" else None


def warped(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Apply transformers' warpers to one row of logits, in the order temperature, min-p, top-k, top-p."""
    scores = logits[None].double()
    ids = torch.zeros((1, 1), dtype=torch.int64)
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores[0].softmax(-1)


def distribution(logits: Tensor, count: int, **params: float) -> Tensor:
    """Return each token's share of the samples for `count` equidistant random numbers in [0, 1)."""
    vocab = logits.shape[0]
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = sample(logits.repeat(count, 1), metadata(count, vocab=vocab, **params), uniform)
    return torch.bincount(tokens, minlength=vocab) / count


PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 12, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.7, "min_p": 0.01},
]


@pytest.mark.parametrize("vocab", [5, 97, 256, 700])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_distribution_is_that_of_the_warpers(params: dict[str, float], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    count = 2000
    expected = warped(logits, **params)
    found = distribution(logits, count, **params)
    # Equidistant numbers hit an interval of length p between p * count - 1 and p * count + 1 times.
    assert (found - expected).abs().max() <= 1 / count + 1e-6
    assert not found[expected == 0].any()


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.97}, {"min_p": 1e-6}, {"temperature": 4.0, "top_p": 0.9}, {"top_k": 3000, "top_p": 0.99}],
)
def test_a_row_that_keeps_more_than_the_window_is_redone_in_full(params: dict[str, float]) -> None:
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(1))
    expected = warped(logits, **params)
    assert (expected > 0).sum() > draw_module._WINDOW
    found = distribution(logits, 500, **params)
    assert not found[expected == 0].any()
    order = expected.argsort(descending=True, stable=True)
    assert torch.allclose(found[order].cumsum(0), expected[order].float().cumsum(0), atol=2 / 500)


def test_top_p_counts_all_the_mass_that_min_p_leaves_also_outside_the_window() -> None:
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(2))
    params = {"temperature": 4.0, "min_p": 0.1}
    assert (warped(logits, **params) > 0).sum() > draw_module._WINDOW
    expected = warped(logits, **params, top_p=0.1)
    assert 100 < (expected > 0).sum() < draw_module._WINDOW
    found = distribution(logits, 500, **params, top_p=0.1)
    assert (found - expected).abs().max() <= 1 / 500 + 1e-6


def test_top_k_keeps_all_ties_with_the_kth() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, 1.0, 0.5])
    found = distribution(logits, 1000, top_k=3)
    assert found.nonzero()[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_top_k_keeps_ties_beyond_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "_WINDOW", 4)
    logits = torch.zeros(40)
    assert (distribution(logits, 400, top_k=2) > 0).all()


def test_top_p_keeps_the_fewest_tokens_lower_ids_first_among_ties() -> None:
    assert distribution(torch.zeros(10), 1000, top_p=0.5).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    assert (warped(logits, top_p=0.96) > 0).sum() == 4
    assert distribution(logits, 5000, top_p=0.96).nonzero()[:, 0].tolist() == [1, 2, 3, 5]


def test_min_p_counts_before_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    # min-p leaves 0.5 and 0.2, whose renormalised shares 0.71 and 0.29 top-p then sees.
    assert distribution(logits, 100, min_p=0.35, top_p=0.69).nonzero()[:, 0].tolist() == [0]
    assert distribution(logits, 100, top_p=0.69).nonzero()[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equally_likely_tokens(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0, 7] = logits[0, 30] = 4
    logits[2, 49] = 1
    assert sample(logits, metadata(3, vocab=50, temperature=0)).tolist() == [7, 0, 49]


@pytest.mark.parametrize("piece_rows", [7, 1000])
def test_every_row_of_a_mixed_batch_gets_what_it_gets_alone(
    piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_CPU_PIECE_BYTES", piece_rows * 4 * 3000)
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 64, 3000
    logits = torch.randn(rows, vocab, generator=generator) * 3
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    choice = np.random.default_rng(0)
    params = {
        "temperature": choice.choice([0.0, 0.5, 1.0, 2.0], rows).tolist(),
        "top_k": choice.choice([0, 1, 40, 900, 3000, 10**6], rows).tolist(),
        "top_p": choice.choice([1.0, 0.2, 0.95], rows).tolist(),
        "min_p": choice.choice([0.0, 0.001, 0.1], rows).tolist(),
    }
    together = sample(logits, metadata(rows, vocab=vocab, **params), uniform)
    for row in range(rows):
        alone = metadata(1, vocab=vocab, **{name: column[row] for name, column in params.items()})
        assert sample(logits[row : row + 1], alone, uniform[row : row + 1]) == together[row]
    order = torch.randperm(rows, generator=generator)
    permuted = {name: [column[i] for i in order] for name, column in params.items()}
    again = sample(logits[order], metadata(rows, vocab=vocab, **permuted), uniform[order])
    assert torch.equal(again, together[order])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"min_p": 0.02}], ids=str
)
def test_draws_of_seeded_requests_follow_the_exact_distribution(params: dict[str, float]) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    expected = warped(logits, **params).numpy()
    count = 20_000
    for streams, positions in (
        (np.full(count, seeded_stream(11), np.uint64), np.arange(count)),
        (np.array([seeded_stream(seed) for seed in range(count)], np.uint64), np.zeros(count, np.int64)),
    ):
        uniform = torch.from_numpy(uniforms(streams, positions))
        tokens = sample(logits.repeat(count, 1), metadata(count, vocab=300, **params), uniform)
        observed = np.bincount(tokens.numpy(), minlength=300)
        assert not observed[expected == 0].any()
        frequent = expected * count >= 5
        rare = expected[~frequent].sum() * count
        cells = [observed[frequent], [observed[~frequent].sum()] if rare >= 5 else []]
        means = [expected[frequent] * count, [rare] if rare >= 5 else []]
        observed_cells, expected_cells = np.concatenate(cells), np.concatenate(means)
        expected_cells *= observed_cells.sum() / expected_cells.sum()
        assert chisquare(observed_cells, expected_cells).pvalue > 1e-4


def test_banned_tokens_are_never_sampled_and_others_are_unaffected() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    second = logits.topk(2).indices[:, 1]
    step = StepConstraints(banned=torch.tensor([best[0], 2 * 20 + best[2]]))
    tokens = sample(logits.clone(), metadata(3, vocab=20, temperature=0), step=step)
    assert tokens.tolist() == [second[0], best[1], second[2]]


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_a_row_without_numbers_does_not_disturb_the_others(params: dict[str, float]) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    expected = sample(logits, metadata(3, vocab=600, **params), uniform)
    logits[1] = torch.nan
    found = sample(logits, metadata(3, vocab=600, **params), uniform)
    assert found[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= found[1] < 600


def test_extreme_logits_and_numbers_stay_inside_the_vocabulary() -> None:
    vocab = 513
    logits = torch.full((4, vocab), -torch.inf)
    logits[:, vocab - 1] = 0
    logits[1, 0] = 90
    logits[2, 256] = 0
    for params in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.5}):
        for uniform, expected in ((0.0, [512, 0, 256, 512]), (1 - 2.0**-52, [512, 0, 512, 512])):
            numbers = torch.full((4,), uniform, dtype=torch.float64)
            tokens = sample(logits.clone(), metadata(4, vocab=vocab, **params), numbers)
            assert tokens.tolist() == expected


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(
    vocab=st.integers(1, 700),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 30),
    top_k=st.integers(0, 750),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    levels=st.integers(1, 40),
)
def test_window_and_full_sort_agree(
    vocab: int, seed: int, spread: float, top_k: int, top_p: float, min_p: float, levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (8, vocab), generator=generator) / levels * spread
    uniform = torch.rand(8, dtype=torch.float64, generator=generator)
    params = metadata(8, vocab=vocab, top_k=top_k, top_p=top_p, min_p=min_p)
    if params.random[0].filters is None:
        return
    filters = params.random[0].filters
    expected = draw_module._draw_from_sorted(logits, uniform, filters)
    for window in (3, 1024):
        with mock.patch.object(draw_module, "_WINDOW", window):
            found = draw_module._draw_from_window(logits, uniform, filters)
            assert all(map(torch.equal, found, expected))
