"""An engine of two real workers in a notebook: sizes that cannot be, the same tokens, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from notebook_support.kernel import Kernel

from nbengine.client.engines.processes import session_processes
from nbengine.runtime.connection import ConnectionInfo, connection_file, list_connections
from tests.support.thorough import amount

START = "%engine start random-tiny --name pair --dtype float32 --num-blocks 256 -o llm"
ASK = "%%generate -o answer --temperature 0 --max-tokens 12 --set ignore_eos=True\nhello\n"
ENDLESS = "%%generate --format text --max-tokens 1900 --set ignore_eos=True\nhello\n"
DEADLINE = 60.0

pytestmark = pytest.mark.timeout(180)


def remains_of(info: ConnectionInfo) -> list[object]:
    files = [path for path in (Path(info.run_dir), connection_file(info.name)) if path.exists()]
    return [*session_processes(info), *files]


def test_a_killed_worker_is_named_and_the_engine_can_be_started_again(
    kernel: Kernel, clean_afterwards: None
) -> None:
    refused = kernel.run_any("%engine start smollm2-135m --tp 2")
    assert "tensor_parallel_size must be 1 or 3 for this model" in refused.text
    assert list_connections() == []
    kernel.run(START)
    kernel.run(ASK)
    expected = kernel.value("answer.token_ids")
    kernel.run("%engine stop")
    # `tests/process/parallel/test_worker_death.py` kills either.
    for rank in amount((1,), thorough=(1, 0)):
        kernel.run(f"{START} --tp 2")
        kernel.run(ASK)
        assert kernel.value("answer.token_ids") == expected
        (info,) = list_connections()
        victim = kernel.value("[worker.pid for worker in llm.ready.workers]")[rank]
        cell = kernel.start(ENDLESS)
        kernel.pump(lambda cell=cell: bool(cell.text), "the first words of the cell")
        os.kill(victim, signal.SIGKILL)
        kernel.finish(cell, DEADLINE)
        assert cell.outputs[-1]["ename"] == "EngineDeadError"
        (shown,) = cell.outputs[-1]["traceback"]
        assert f"worker {rank} (TP{rank})" in shown
        assert "SIGKILL" in shown
        end = time.monotonic() + DEADLINE
        while remains := remains_of(info):
            assert time.monotonic() < end, remains
            time.sleep(0.02)
