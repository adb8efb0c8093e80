"""Sleeping, pausing, resetting and profiling a real engine from a real kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from notebook_support.kernel import Kernel

from nbengine.client.engines.processes import session_processes, wait_until
from nbengine.runtime.connection import list_connections

StartKernel = Callable[[], Kernel]
PROMPT = "%%generate -o {name} {flags} --temperature 0 --max-tokens 8 --raw\nthe quick brown fox jumps over the dog\n"


def ask(name: str, flags: str = "") -> str:
    return PROMPT.format(name=name, flags=flags)


def test_an_engine_is_put_to_sleep_woken_profiled_and_killed_asleep(
    kernel: Kernel, clean_afterwards: None, tmp_path: Path
) -> None:
    kernel.run("%engine start random-tiny --num-blocks 4096 --dtype float32")
    kernel.run(ask("first"))
    slept = kernel.run("%engine sleep --level 2")
    assert "engine 'random-tiny' sleeps: " in slept.text
    assert "MiB of memory came back" in slept.text
    assert "asleep, level 2" in kernel.run("%engine status").text
    woken = kernel.run(ask("second"))
    assert "engine 'random-tiny' sleeps and is woken" in woken.text
    assert kernel.value("second.token_ids == first.token_ids")
    kernel.run("%engine sleep --hold")
    assert "is kept asleep" in kernel.run_any(ask("refused")).text
    assert "is awake after" in kernel.run("%engine wake").text
    assert "is paused" in kernel.run("%engine pause").text
    # The cell does not wait for its answer: the next ones run.
    cell = kernel.run(ask("third"))
    assert "the answer comes after `%engine resume random-tiny`" in cell.text
    assert "paused" in kernel.run("%engine status").text
    assert "goes on" in kernel.run("%engine resume").text
    assert kernel.value("third.result().token_ids == first.token_ids")
    assert "is empty" in kernel.run("%engine reset").text
    kernel.run(f"%engine profile start --dir {tmp_path}")
    kernel.run(ask("fourth"))
    profiled = kernel.run("%engine profile stop").text
    assert "8 steps in" in profiled
    assert "aten::" in profiled
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 1
    kernel.run("%engine sleep")
    (info,) = list_connections()
    os.kill(info.ready[0].pid, signal.SIGKILL)
    assert wait_until(lambda: not session_processes(info), 10)
    assert "SIGKILL" in kernel.run_any("%engine wake").text
