"""A row's mass shows whether it had anything to sample from, however it and its neighbours are sampled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nbengine.sampling import draw as draw_module
from nbengine.sampling import rows as rows_module
from nbengine.sampling.logits import TokenMask
from nbengine.sampling.metadata import Filters, SamplingMetadata
from nbengine.sampling.rows import ALL_ROWS
from nbengine.sampling.sampler import Sampler, StepConstraints
from tests.unit.worker.planted import spoil

CPU = torch.device("cpu")
NUM_ROWS, VOCAB = 24, 3000
SPOILED = {3: "nan", 8: "inf", 14: "nothing", 23: "nan"}
Drawn = tuple[Tensor, Tensor]


def mixed(seed: int) -> SamplingMetadata:
    choice = np.random.default_rng(seed)
    return SamplingMetadata.build(
        choice.choice([0.0, 0.7, 1.5], NUM_ROWS).astype(np.float32),
        choice.choice([0, 1, 40, 1200], NUM_ROWS).astype(np.int64),
        choice.choice([1.0, 0.3, 0.97], NUM_ROWS),
        choice.choice([0.0, 0.05], NUM_ROWS).astype(np.float32),
        vocab_size=VOCAB,
        device=CPU,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece_rows", [5, 1000])
@pytest.mark.parametrize("path", ["window", "sorted"])
@pytest.mark.parametrize("seed", range(4))
def test_the_masses_of_spoiled_rows_alone_are_not_finite(
    seed: int, path: str, piece_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_CPU_PIECE_BYTES", piece_rows * 4 * VOCAB)
    if path == "sorted":
        # How a GPU draws.
        in_full: Callable[[Tensor, Tensor, Filters], Drawn] = draw_module._draw_from_sorted
        monkeypatch.setattr(draw_module, "_draw_from_window", in_full)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(NUM_ROWS, VOCAB, generator=generator) * 3).to(dtype)
    logits[5, 1:] = -torch.inf
    logits[:, 0].clamp_(min=-80)
    uniform = torch.rand(NUM_ROWS, dtype=torch.float64, generator=generator)
    expected = Sampler()(logits.clone(), mixed(seed), uniform)
    assert expected.masses.isfinite().all()
    for row, kind in SPOILED.items():
        spoil(logits[row], kind)
    found = Sampler()(logits, mixed(seed), uniform)
    others = [row for row in range(NUM_ROWS) if row not in SPOILED]
    assert (~found.masses.isfinite()).nonzero()[:, 0].tolist() == list(SPOILED)
    assert torch.equal(found.token_ids[others], expected.token_ids[others])
    assert ((found.token_ids >= 0) & (found.token_ids < VOCAB)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_and_one_over_infinity_leave_no_mass(temperature: float) -> None:
    metadata = SamplingMetadata.build(
        np.full(3, temperature, np.float32),
        np.zeros(3, np.int64),
        np.ones(3),
        np.zeros(3, np.float32),
        vocab_size=64,
        device=CPU,
    )
    logits = torch.zeros(3, 64)
    logits[1, 40] = torch.inf
    bitmask = torch.tensor([[0, 0], [-1, 0], [1, 0]], dtype=torch.int32)
    step = StepConstraints(grammar=TokenMask(ALL_ROWS, bitmask))
    output = Sampler()(logits, metadata, torch.full((3,), 0.5, dtype=torch.float64), step)
    assert output.masses.isfinite().tolist() == [False, False, True]
    assert output.token_ids[2] == 0
