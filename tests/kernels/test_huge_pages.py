"""Memory in huge pages on the CPU."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from nbengine.kernels.cpu import huge_pages
from nbengine.kernels.cpu.huge_pages import (
    HUGE_PAGE,
    ask_for_huge_pages,
    ask_for_small_pages,
    can_take_pages,
    take_huge_pages,
    zeros_in_huge_pages,
)

_MIB = 2**20
has_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)


@pytest.fixture
def a_huge_page() -> None:
    """Skip where a mapping that asks for huge pages, as any program may, gets none."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/proc/self/smaps").exists() or not can_take_pages():
        pytest.skip("the system has no huge pages, or takes none ahead of their use")
    memory = mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    if not huge_bytes(tensor):
        pytest.skip("huge pages are switched off, or memory is in pieces")


needs_a_huge_page = pytest.mark.usefixtures("a_huge_page")


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


@needs_a_huge_page
@pytest.mark.parametrize("written", [0, 1, HUGE_PAGE], ids=["unused", "one", "all"])
def test_what_is_taken_becomes_a_huge_page_and_keeps_what_was_written_before(written):
    tensor = zeros_in_huge_pages((4 * HUGE_PAGE,), torch.uint8)
    [page] = whole_pages(tensor, 1)
    ask_for_small_pages(page.data_ptr(), HUGE_PAGE)
    page[:written] = 7
    assert huge_bytes(tensor) == 0
    assert take_huge_pages(page.data_ptr(), HUGE_PAGE)
    assert huge_bytes(tensor) == HUGE_PAGE
    assert int((page == 7).sum()) == written
    assert int(page.count_nonzero()) == written


@needs_a_huge_page
def test_without_collapsing_only_what_is_unused_becomes_huge_pages(monkeypatch):
    """Linux has no MADV_COLLAPSE before 6.1."""
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 12345)
    tensor = zeros_in_huge_pages((5 * HUGE_PAGE,), torch.uint8)
    used, unused = whole_pages(tensor, 2)
    ask_for_small_pages(used.data_ptr(), 2 * HUGE_PAGE)
    used[5] = 7
    assert take_huge_pages(used.data_ptr(), HUGE_PAGE)
    assert huge_bytes(tensor) == 0
    assert take_huge_pages(unused.data_ptr(), HUGE_PAGE)
    assert huge_bytes(tensor) == HUGE_PAGE
    assert int(used[5]) == 7


@pytest.mark.parametrize("size", [0, 100, _MIB])
def test_a_small_storage_is_left_as_it_is(size):
    tensor = torch.ones(size, dtype=torch.uint8)
    ask_for_huge_pages(tensor.untyped_storage())
    assert int(tensor.sum()) == size


def whole_pages(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return memory inside a tensor as huge pages; the system may join its ends with mappings beside it."""
    first = -tensor.data_ptr() % HUGE_PAGE + HUGE_PAGE
    return tensor[first:][: count * HUGE_PAGE].split(HUGE_PAGE)


def flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address of this process."""
    [flags] = facts_of(address, address + 1, "VmFlags:")
    return flags


def huge_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the huge pages in the mappings that a tensor is in."""
    facts = facts_of(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, "AnonHugePages:")
    return sum(int(fact[0]) << 10 for fact in facts)


def facts_of(first: int, stop: int, name: str) -> list[list[str]]:
    """Return what the kernel says under a name of the mappings of this process that hold addresses of a range."""
    found, is_inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if "-" in word and not word.endswith(":"):
            start, end = (int(part, 16) for part in word.split("-"))
            is_inside = start < stop and end > first
        elif is_inside and word == name:
            found.append(rest.split())
    return found
