"""Memory for the KV cache on the CPU."""

from __future__ import annotations

import mmap

import pytest
import torch

from nbengine.kernels.huge_pages import zeros_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_zero_writable_and_outlives_the_tensor_it_was_made_for(dtype):
    tensor = zeros_in_huge_pages((2, 300, 3, 16, 64), dtype)
    assert tensor.shape == (2, 300, 3, 16, 64)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert int(tensor.count_nonzero()) == 0
    tensor[1, 299] = 3
    half = tensor[1]
    del tensor
    assert float(half.sum()) == 3 * 3 * 16 * 64


def test_a_system_that_refuses_huge_pages_gives_ordinary_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert zeros_in_huge_pages((4, 4), torch.float32).tolist() == [[0.0] * 4] * 4


def test_an_empty_tensor_needs_no_memory():
    assert zeros_in_huge_pages((0, 4), torch.float32).shape == (0, 4)
