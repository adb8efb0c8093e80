"""Runs `triton_interpreter_cases.py` in a process of its own, where Triton is interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

triton = pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 relies on a conversion that NumPy 2.4 has dropped",
)
def test_triton_kernels_equal_the_reference_in_the_interpreter():
    cases = Path(__file__).with_name("triton_interpreter_cases.py")
    # Tensors this small gain nothing from threads, and lose when other processes want the cores.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        cwd=cases.parents[2],
        env={**os.environ, **one_thread, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
