"""Fixtures for the folders whose tests compile kernels: what one process has compiled, no other compiles again.

A kernel is kept under a digest of the sources that make it, so one that is changed is compiled. That a worker keeps its
kernels is tested in `tests/unit/worker/test_kernel_store.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbengine.kernels.cpu import jit
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.worker import worker
from nbengine.worker.kernel_store import KernelStore

OF_THEIR_OWN_TESTS = 16384
"""The most kernels that the tests of kernels keep: of every shape, type and instruction set. An engine's start would
keep a thousand in the same directory, so they have one of their own."""


@pytest.fixture(scope="package", autouse=True)
def kernels_are_compiled_once() -> Iterator[None]:
    """Take compiled kernels from the cache directory of all tests, also where models lie in a test's own."""
    store = KernelStore(cache_dir() / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_store", store)
        patch.setattr(worker, "keep_kernels", lambda: None)
        yield


@pytest.fixture(scope="package", autouse=True)
def many_kernels_are_compiled_once() -> Iterator[None]:
    """Take what the tests of kernels compile from a directory of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_store", KernelStore(cache_dir() / "kernels-alone", OF_THEIR_OWN_TESTS))
        yield
