"""A fixture for the folders whose tests run models: what one process has compiled, no other compiles again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbengine.kernels.cpu import jit
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.worker import worker
from nbengine.worker.kernel_store import KernelStore


@pytest.fixture(scope="package", autouse=True)
def kernels_are_compiled_once() -> Iterator[None]:
    """Take compiled kernels from the cache directory of all tests, also where models lie in a test's own.

    A kernel is kept under a digest of all sources of kernels, so a kernel that is changed is compiled. That a worker
    keeps its kernels is tested in `tests/unit/worker/test_kernel_store.py`, and `tests/kernels` compiles always.
    """
    store = KernelStore(cache_dir() / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_store", store)
        patch.setattr(worker, "keep_kernels", lambda: None)
        yield
