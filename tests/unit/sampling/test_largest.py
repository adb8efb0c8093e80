"""A sampler takes largest logits that are known already, and only where they decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nbengine.sampling.logits import LogitBias
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.sampler import Sampler, StepConstraints

LOGITS = torch.tensor([[0.0, 3.0, 1.0], [5.0, 2.0, 4.0]])
PLANTED = torch.tensor([2, 2]), torch.tensor([1.0, 4.0])
"""Places that are not those of the largest logits, so that one sees who uses them."""


def metadata(*temperatures: float) -> SamplingMetadata:
    return SamplingMetadata.build(
        temperature=np.array(temperatures, np.float32),
        top_k=np.ones(2, np.int64),
        top_p=np.ones(2),
        min_p=np.zeros(2, np.float32),
        vocab_size=3,
        device=torch.device("cpu"),
    )


def test_they_are_taken_where_all_rows_are_greedy_and_nothing_changes_logits() -> None:
    output = Sampler()(LOGITS.clone(), metadata(0, 0), largest=PLANTED)
    assert output.token_ids.tolist() == [2, 2]
    assert output.masses.tolist() == [1.0, 4.0]


def test_rows_that_are_drawn_do_not_take_them() -> None:
    uniform = torch.zeros(2, dtype=torch.float64)
    assert Sampler()(LOGITS.clone(), metadata(0, 1), uniform, largest=PLANTED).token_ids.tolist() == [1, 0]


@pytest.mark.parametrize("place", ["request", "step"])
def test_changed_logits_do_not_take_them(place: str) -> None:
    greedy, step = metadata(0, 0), None
    if place == "request":
        greedy = replace(greedy, bias=LogitBias(torch.tensor([0]), torch.tensor([9.0])))
    else:
        step = StepConstraints(banned=torch.tensor([1, 2]))
    assert Sampler()(LOGITS.clone(), greedy, None, step, PLANTED).token_ids.tolist() == [0, 0]
