"""Contexts are split in decode only where that pays, and the merges are compiled at the start."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.triton import latent_attention, paged_attention, splits
from nbengine.kernels.triton.splits import MAX_SPLITS, choose_splits


@pytest.mark.parametrize("programs", [1, 3, 40, 1000])
@pytest.mark.parametrize("max_seq_len", [1, 128, 129, 5000, 131_072])
def test_splits_cover_the_context_and_none_is_empty(programs, max_seq_len):
    count, tokens = choose_splits(programs, max_seq_len, processors=132)
    assert 1 <= count <= MAX_SPLITS
    assert (count - 1) * tokens < max_seq_len <= count * tokens
    if programs >= 264:
        assert count == 1


def test_a_short_context_is_split_only_where_processors_would_be_idle():
    def count(requests: int, seq_len: int) -> int:
        return choose_splits(requests * 4, seq_len, processors=132)[0]

    assert count(1, 512) == 4
    assert count(32, 512) == 2
    assert count(33, 512) == count(64, 512) == count(64, 1024) == 1
    assert count(64, 8192) == 2


def test_a_warm_up_compiles_the_merge_of_every_number_of_splits(monkeypatch):
    compiled = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **options: compiled.append((options["HEAD_DIM"], options["SPLITS"]))

    monkeypatch.setattr(splits, "merge_kernel", Kernel())
    paged_attention.warm_up_merges(torch.zeros(1, 6, 40), 2, AttentionOptions(1.0, window=50))
    latent_attention.warm_up_merges(torch.zeros(1, 6, 40), 32)
    lengths = range(1, 10_000, 50)
    counts = {choose_splits(programs, n, processors=132)[0] for programs in range(1, 300, 3) for n in lengths}
    chosen = {triton.next_power_of_2(count) for count in counts - {1}}
    assert set(compiled) == {(size, count) for size in (40, 32) for count in chosen}
