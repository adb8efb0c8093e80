"""A start reports what `nbengine.fit` has foretold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbengine
from nbengine import LLM
from tests.support.thorough import THOROUGH

AMPLE = 16 << 30
"""Bytes that are free where the default KV cache has its greatest size."""
OF_A_SIZE: dict[str, Any] = {} if THOROUGH else {"kv_cache_memory_bytes": 8 << 20}
"""Two workers divide a cache of this size."""


@pytest.fixture
def ample_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let as much memory as `AMPLE` seem to be free, in this process and, in `make thorough`, in those that it starts,
    which cannot be copies then.

    With little memory the size follows what is free at that moment, which other processes change.
    """
    monkeypatch.setattr("nbengine.worker.memory.budget.available_host_memory", lambda: AMPLE)
    if not THOROUGH:
        return
    (tmp_path / "sitecustomize.py").write_text(
        f"import nbengine.runtime.capacity\nnbengine.runtime.capacity.available_host_memory = lambda: {AMPLE}\n"
    )
    for path in (Path(nbengine.__file__).parent.parent, tmp_path):
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("random-tiny", {"tensor_parallel_size": 2, "max_num_seqs": 8} | OF_A_SIZE),
        ("smollm2-135m", {}),
    ],
    ids=["two workers", "the default model"],
)
@pytest.mark.usefixtures("ample_memory")
def test_a_start_reports_what_was_foretold(model: str, arguments: dict[str, Any]) -> None:
    foretold = nbengine.fit(model, **arguments)
    with LLM(model, multiprocess=bool(arguments), **arguments) as llm:
        ready = llm.llm_engine.ready
    assert foretold.fits, foretold.problem
    assert (foretold.weights_bytes, foretold.dtype) == (ready.weights_bytes, ready.dtype)
    assert (foretold.block_size, foretold.max_model_len) == (ready.block_size, ready.max_model_len)
    assert foretold.num_blocks == ready.num_blocks
    assert foretold.page_bytes * ready.num_blocks == ready.kv_cache_bytes


def test_what_does_not_fit_is_refused_by_the_start_with_the_same_reason() -> None:
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": 100_000, "max_model_len": 1024}
    foretold = nbengine.fit("random-tiny", **arguments)
    assert not foretold.fits
    assert "max_model_len=1024 needs 64 KV blocks" in foretold.problem
    assert foretold.advice.startswith("--max-model-len 192")
    with pytest.raises(nbengine.EngineStartError) as refused:
        LLM("random-tiny", multiprocess=False, **arguments)
    assert foretold.problem in str(refused.value)


def test_the_shell_says_it_too_and_nothing_has_torch() -> None:
    code = "import sys; from nbengine.cli import main; status = main(); print('torch' in sys.modules); sys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", "--tp", "3", "random-tiny"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(
        "random-tiny does not fit, because tensor_parallel_size must be 1, 2 or 4 for this model"
    )
    assert "; try --tp 1 or --tp 2 or --tp 4\n" in done.stdout
    assert done.stdout.endswith("False\n")
