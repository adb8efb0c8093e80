"""Masks, bans and biases against transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

from nbengine.sampling import rows as rows_module
from nbengine.sampling.logits import LogitBias, TokenMask, add_bias, apply_mask, ban
from nbengine.sampling.rows import ALL_ROWS

NO_IDS = torch.zeros((1, 1), dtype=torch.int64)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97, 256])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [3], [4, 0, 2]])
def test_a_mask_leaves_the_tokens_whose_bits_are_set(
    vocab: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_CPU_PIECE_BYTES", 2 * 4 * vocab)
    logits = random_logits(5, vocab)
    words = -(-vocab // 32)
    bitmask = np.random.default_rng(vocab).integers(-(2**31), 2**31, (len(chosen), words)).astype(np.int32)
    expected = logits.clone()
    for row, bits in zip(chosen, bitmask.tolist(), strict=True):
        forbidden = [t for t in range(vocab) if not bits[t // 32] >> (t % 32) & 1]
        if forbidden:
            expected[row] = SuppressTokensLogitsProcessor(forbidden)(NO_IDS, logits[row : row + 1])[0]
    rows = ALL_ROWS if len(chosen) == 5 else torch.tensor(chosen)
    apply_mask(logits, TokenMask(rows, torch.from_numpy(bitmask)))
    assert torch.equal(logits, expected)


def test_a_ban_is_that_of_suppressed_tokens_and_a_bias_that_of_a_sequence_of_one() -> None:
    logits = random_logits(3, 50)
    expected = logits.clone()
    expected[1] = SuppressTokensLogitsProcessor([7, 49])(NO_IDS, logits[1:2])[0]
    expected[2] = SequenceBiasLogitsProcessor([[[3], 2.5], [[0], -100.0]])(NO_IDS, logits[2:3])[0]
    ban(logits, torch.tensor([50 + 7, 50 + 49, 50 + 7]))
    add_bias(logits, LogitBias(torch.tensor([103, 100]), torch.tensor([2.5, -100.0])))
    assert torch.equal(logits, expected)
