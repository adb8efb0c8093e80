"""Sleeping, pausing, resetting and profiling a real engine from a real kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from notebook_support.comm import Browser, model_of, subshell_of
from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

from nbengine.client.engines.processes import session_processes, wait_until
from nbengine.runtime.connection import list_connections

StartKernel = Callable[[], Kernel]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPT = "%%generate -o {name} {flags} --temperature 0 --max-tokens 8 --raw\nthe quick brown fox jumps over the dog\n"


def ask(name: str, flags: str = "") -> str:
    return PROMPT.format(name=name, flags=flags)


def test_an_answer_that_is_paused_in_its_middle_says_so_and_the_dashboard_lets_it_go_on(
    kernel: Kernel, start_kernel: StartKernel
) -> None:
    other = start_kernel()
    kernel.run(start_line(tokens_per_second=100))
    other.run("%engine attach")
    shown = kernel.run("%dashboard")
    browser = Browser(kernel, model_of(shown.outputs[0]), subshell_of(kernel))
    browser.say(kind="hello")
    browser.wait_for(lambda: browser.num_resets == 1)
    cell = kernel.start("%%generate --raw --max-tokens 3000 -o answer\nhi\n")
    kernel.wait_for_text(cell, "ABC")
    other.run("%engine pause --mode keep")
    kernel.wait_for_text(cell, "is paused: `%engine resume random-tiny` lets it go on")
    assert browser.subshell_id is not None
    at_pause = len(cell.text)
    browser.say(kind="go_on")
    kernel.pump(lambda: len(cell.text) > at_pause + 60, "the rest of the answer")
    browser.wait_for(lambda: bool(browser.answers))
    kernel.interrupt()
    kernel.finish(cell)
    text = kernel.value("answer.text")
    assert len(text) > 60
    assert (ALPHABET * 116).startswith(text)
    assert browser.answers == [{"kind": "goes_on", "error": None}]
    kernel.run("%dashboard --close")
    kernel.run("%engine stop")


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
    assert wait_until(lambda: not session_processes(info), 60)
    assert "SIGKILL" in kernel.run_any("%engine wake").text
