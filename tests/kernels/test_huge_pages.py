"""Memory in huge pages on the CPU."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from nbengine.kernels.cpu.huge_pages import ask_for_huge_pages, zeros_in_huge_pages

_MIB = 2**20
has_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)


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


@has_huge_pages
def test_the_system_is_asked_for_huge_pages_for_a_large_storage():
    # A mapping of its own: what malloc gives may be memory that was asked for and freed before.
    memory = mmap.mmap(-1, 64 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    middle = storage.data_ptr() + 32 * _MIB
    assert "hg" not in flags_of(middle)
    ask_for_huge_pages(storage)
    assert "hg" in flags_of(middle)


@has_huge_pages
def test_zeros_lie_in_memory_of_this_process_alone_which_may_have_huge_pages():
    """Shared memory ("sh") has none unless the system is set up so, whatever is asked for."""
    tensor = zeros_in_huge_pages((8 * _MIB,), torch.uint8)
    flags = flags_of(tensor.data_ptr() + 4 * _MIB)
    assert "hg" in flags
    assert "sh" not in flags


@pytest.mark.parametrize("size", [0, 100, _MIB])
def test_a_small_storage_is_left_as_it_is(size):
    tensor = torch.ones(size, dtype=torch.uint8)
    ask_for_huge_pages(tensor.untyped_storage())
    assert int(tensor.sum()) == size


def flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address of this process."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError(f"no mapping holds {address:#x}")
