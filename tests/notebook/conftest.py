"""Real kernels and real engines; whatever a test starts is gone afterwards."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("notebook_support")

from notebook_support.kernel import Kernel
from notebook_support.leaks import end_engines, wait_until_clean

StartKernel = Callable[[], Kernel]


@pytest.fixture(scope="session")
def notebook_environment(private_runtime_dir: Path) -> Iterator[dict[str, str]]:
    """Environment of the kernels: directories of their own, and the tests' executor on the path."""
    with tempfile.TemporaryDirectory(prefix="nbk-", dir="/tmp") as directory:
        own = {
            "IPYTHONDIR": f"{directory}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{directory}/jupyter",
            "NBENGINE_RUNTIME_DIR": f"{directory}/engines",
            "XDG_RUNTIME_DIR": directory,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            yield dict(os.environ)
            end_engines()


@pytest.fixture
def start_kernel(notebook_environment: dict[str, str]) -> Iterator[StartKernel]:
    """Start kernels; they and all engines end with the test, and nothing may be left of them."""
    kernels: list[Kernel] = []

    def start() -> Kernel:
        kernels.append(Kernel(notebook_environment))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()
    wait_until_clean(directory_of(notebook_environment))


@pytest.fixture(scope="module")
def kernel(notebook_environment: dict[str, str]) -> Iterator[Kernel]:
    """One kernel for the tests of a module, which leave it without an engine."""
    kernel = Kernel(notebook_environment)
    yield kernel
    kernel.close()
    wait_until_clean(directory_of(notebook_environment))


@pytest.fixture
def clean_afterwards(notebook_environment: dict[str, str]) -> Iterator[None]:
    """Nothing may be left of the engines that the test starts."""
    yield
    wait_until_clean(directory_of(notebook_environment))


def directory_of(environment: dict[str, str]) -> Path:
    """The directory of everything that kernels and engines write."""
    return Path(environment["XDG_RUNTIME_DIR"])
