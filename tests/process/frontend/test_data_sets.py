"""A comparison of many rows that loses its kernel, then its engine, ends with one answer for each row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbengine import LLM, SamplingParams
from nbengine.client.engines.directory import list_engines, stop_engine
from nbengine.frontend.runs.run import RunFilter
from nbengine.frontend.runs.store import RunStore
from tests.support.thorough import amount

SHELL = Path(__file__).parents[1] / "process_support" / "comparing_shell.py"
ROWS = amount(300, thorough=10_000)
AFTER = ROWS // 5


@pytest.fixture
def place(no_leftovers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of IPython, in which the runs are kept; no engine runs in the end."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    yield tmp_path / "ipython"
    for engine in list_engines():
        stop_engine(engine.info)


def compare(killed: str) -> tuple[int, dict[str, Any]]:
    """Compare in a kernel of its own; return its status and what it says in the end."""
    command = [sys.executable, str(SHELL), str(ROWS), killed, str(AFTER)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    said = done.stdout.splitlines()[-1] if done.returncode == 0 else "{}"
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, json.loads(said)


@pytest.mark.timeout(3600 if ROWS > 1000 else 300)
def test_each_row_has_one_answer_after_a_kill_of_the_kernel_and_of_the_engine(place: Path) -> None:
    assert compare("itself")[0] == -signal.SIGKILL
    assert len(list_engines()) == 1
    status, said = compare("engine")
    assert status == 0
    assert "is gone" in said["error"]
    assert 0 < said["failed"] < ROWS - AFTER
    status, said = compare("nothing")
    assert (status, said["error"], said["failed"]) == (0, "", 0)
    texts = [row["text"] for row in said["rows"]]
    prompts = [f"Say number {row}" for row in range(ROWS)]
    with LLM("random-tiny", multiprocess=False) as llm:
        alone = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert texts == [output.outputs[0].text for output in alone]
    [path] = place.rglob("*.sqlite")
    answered = Counter(row["prompt"] for row in RunStore(path).select(RunFilter()) if row["error"] == "")
    assert answered == Counter(prompts)
