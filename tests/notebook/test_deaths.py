"""Kernels and engines that are killed or restarted in mid-stream: what the notebook sees, and what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine_processes import kill_all, processes_of
from notebook_support.kernel import Kernel
from notebook_support.lab import DEADLINE_SECONDS
from notebook_support.leaks import shared_memory
from notebook_support.paced import start_line
from stopping import stop

from nbengine.client.engines.processes import session_processes
from nbengine.runtime.connection import ConnectionInfo, connection_file, list_connections

StartKernel = Callable[[], Kernel]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEEP_ALIVE = 1.0
QUESTION = "Why does the moon shine at night, and why does it change its shape from week to week?"


def the_engine() -> ConnectionInfo:
    (info,) = list_connections()
    return info


def remains_of(info: ConnectionInfo) -> list[object]:
    """Processes, socket files, connection file and shared memory of an engine."""
    run_dir = Path(info.run_dir)
    files = [path for path in (run_dir, connection_file(info.name)) if path.exists()]
    return [*session_processes(info), *files, *shared_memory(run_dir.parent)]


def assert_gone(info: ConnectionInfo) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while remains := remains_of(info):
        assert time.monotonic() < end, remains
        time.sleep(0.02)


@pytest.mark.parametrize("victims", [["core"], ["host"], ["core", "host"]], ids="+".join)
def test_a_killed_engine_is_told_with_its_log_and_leaves_nothing(
    kernel: Kernel, clean_afterwards: None, victims: list[str]
) -> None:
    kernel.run(start_line(tokens_per_second=100))
    info = the_engine()
    host, core = session_processes(info)
    pids = {"host": host.pid, "core": core.pid}
    assert shared_memory(Path(info.run_dir).parent)
    cell = kernel.start("%%generate -o answer --max-tokens 3000\nhi\n")
    kernel.wait_for_text(cell, "ABC")
    # The host would end by itself a moment after its core.
    stop(*(pids[victim] for victim in victims))
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    kernel.finish(cell)
    error = cell.outputs[-1]
    assert error["ename"] == "EngineDeadError"
    (shown,) = error["traceback"]
    log, _, cause = shown.partition("\n\nEngineDeadError: ")
    assert log.startswith("last lines of the engine's log:\n")
    assert "ready: engine core 0" in log
    assert "SIGKILL" in cause
    assert any(str(pids[victim]) in cause for victim in victims)
    assert "\n" not in cause
    text, reason = kernel.value("(answer.text, answer.finish_reason)")
    assert reason == "abort"
    assert text
    assert (ALPHABET * 200).startswith(text)
    assert_gone(info)
    assert "no engine is running here" in kernel.run_any("%%generate\nhi\n").text
    kernel.run(start_line(tokens_per_second=1000))
    assert the_engine().name == info.name
    assert "ABC" in kernel.run("%%generate --max-tokens 3\nhi\n").text
    kernel.run("%engine stop")


def test_a_killed_kernel_leaves_nothing_after_the_keep_alive(
    kernel: Kernel, start_kernel: StartKernel
) -> None:
    kernel, observer = start_kernel(), kernel
    kernel.run(start_line(tokens_per_second=100) + f" --keep-alive {KEEP_ALIVE}")
    info = the_engine()
    processes = processes_of(info)
    cell = kernel.start("%%generate --max-tokens 3000\nhi\n")
    kernel.wait_for_text(cell, "ABC")
    killed_at = time.monotonic()
    kernel.kill()
    # The kernel's lease ends with its process, its request with the lease; only then the keep-alive begins.
    psutil.wait_procs(processes, timeout=KEEP_ALIVE + 60)
    assert time.monotonic() - killed_at >= KEEP_ALIVE - 0.1
    assert_gone(info)
    assert "keep_alive" in observer.run(f"%engine logs {info.name}").text


def test_everything_killed_at_once_is_gone_after_a_reap(kernel: Kernel, start_kernel: StartKernel) -> None:
    kernel, other = start_kernel(), kernel
    kernel.run(start_line(tokens_per_second=100))
    info = the_engine()
    cell = kernel.start("%%generate --max-tokens 3000\nhi\n")
    kernel.wait_for_text(cell, "ABC")
    # Neither the kernel nor the engine has a moment in which it could notice, and clean up by itself.
    kernel.stop()
    kill_all(info)
    kernel.kill()
    assert f"cleaned up after engine {info.name!r}" in other.run("%engine reap").text
    assert remains_of(info) == []
    other.run(start_line(tokens_per_second=1000))
    other.run("%engine stop")


def test_a_new_kernel_finds_the_model_warm_and_generates_at_once(start_kernel: StartKernel) -> None:
    kernel = start_kernel()
    kernel.run("%engine start smollm2-135m --num-blocks 512 --max-model-len 2048")
    ask = f"%%generate -o answer --temperature 0 --max-tokens 8\n{QUESTION}\n"
    kernel.run(ask)
    cold = kernel.value("answer.token_ids")
    processes = session_processes(the_engine())
    for is_killed in (False, True):
        unfinished = kernel.run(
            "%%generate -a --max-tokens 1800 --set ignore_eos=True\nCount to a thousand.\n"
        )
        kernel.pump(lambda cell=unfinished: bool(cell.text), "the first words of the background cell")
        kernel.restart(now=is_killed)
        kernel.run("%engine attach")
        kernel.run(ask)
        warm, cached, prompt = kernel.value(
            "(answer.token_ids, answer.num_cached_tokens, answer.num_prompt_tokens)"
        )
        assert warm == cold
        assert prompt - 16 <= cached < prompt
        status = kernel.run("%engine status").text
        assert "0 running, 0 waiting" in status
        assert "0 of 512 in use" in status
        assert session_processes(the_engine()) == processes
    kernel.run("%engine stop")
