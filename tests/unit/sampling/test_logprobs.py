"""Log probabilities against torch's log_softmax and a full sort."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.sampling import logprobs as logprobs_module
from nbengine.sampling import rows as rows_module
from nbengine.sampling.logprobs import compute_logprobs
from tests.support.thorough import amount


@settings(max_examples=amount(20, thorough=1600), deadline=None)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(1, 300),
    top=st.integers(0, 20),
    levels=st.integers(1, 400),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_values_ids_and_ranks_are_those_of_a_full_sort(
    rows: int, vocab: int, top: int, levels: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = ((torch.randint(levels, (rows, vocab), generator=generator) - levels // 2) / 7).to(dtype)
    tokens = torch.randint(vocab, (rows,), generator=generator)
    top = min(top, vocab)
    with mock.patch.object(rows_module, "_CPU_PIECE_BYTES", 3 * 4 * vocab):
        found = compute_logprobs(logits, tokens, top)
    expected = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(found.token_ids, torch.cat([tokens[:, None], order], 1))
    values = expected.gather(1, found.token_ids)
    torch.testing.assert_close(found.logprobs.double(), values, rtol=0, atol=1e-5)
    assert found.ranks.tolist() == (logits >= logits.gather(1, tokens[:, None])).sum(1).tolist()
    assert torch.equal(logprobs_module._top_by_key(logits.float(), top), order)


def test_forbidden_and_extreme_logits_have_log_probabilities_too() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [1e30, -1e30, 0.0]])
    found = compute_logprobs(logits, torch.tensor([1, 2]), 2)
    assert found.token_ids.tolist() == [[1, 1, 0], [2, 0, 2]]
    assert found.logprobs[0].tolist() == [0, 0, -torch.inf]
    assert found.logprobs[1, 1] == 0
    assert found.ranks.tolist() == [1, 2]


@pytest.mark.parametrize("counts", [[0, 3], [5, 1]])
def test_each_position_gets_as_many_as_it_asked_for(counts: list[int]) -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    lists = compute_logprobs(logits, torch.tensor([4, 5]), max(counts)).to_lists(counts)
    for count, token, part in zip(counts, (4, 5), lists, strict=True):
        assert [len(row) for row in (*part.logprob_token_ids, *part.logprobs)] == [count + 1, count + 1]
        assert part.logprob_token_ids[0][0] == token
        assert len(part.sampled_token_ranks) == 1
