"""The process tree of real engines, beside what the system says."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import psutil
import pytest
from process_support.engine_under_test import wait_for
from process_support.fake_worker import FAKE_WORKERS_EXECUTOR

from nbengine import LLM, AsyncLLM
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.processes.tree import read_process_tree

pytestmark = pytest.mark.fresh_processes

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]
Script = Callable[[str], "subprocess.Popen[str]"]

TWO_BY_TWO = {
    "distributed_executor_backend": FAKE_WORKERS_EXECUTOR,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    # Told so, the workers need not look for a device, which takes the import of torch.
    "async_scheduling": False,
}
ATTACH = """
from nbengine import AsyncLLM
llm = AsyncLLM.attach({name!r})
print("attached")
input()
llm.detach()
"""


def test_the_tree_has_the_processes_that_the_system_has(start_llm: StartLLM) -> None:
    llm = start_llm()
    tree = llm.process_tree()
    assert tree.host is not None
    (core,) = tree.cores
    engine = {process.pid for process in psutil.Process(tree.host.pid).children(recursive=True)}
    assert {process.pid for process in tree.engine_processes} == {tree.host.pid, *engine}
    assert tree.host.pid in [child.pid for child in psutil.Process().children()]
    assert core.process.pid == llm.llm_engine.ready.pid
    assert [process.pid for process in tree.frontends] == [os.getpid()]
    assert all(process.is_running and process.memory_bytes for process in tree.processes)
    assert tree.host.title == f"nbengine: host {tree.engine}"
    assert core.process.title == f"nbengine: core 0 {tree.engine}"


def test_other_frontends_are_in_it_while_they_are_attached(start_async: StartAsync, script: Script) -> None:
    llm = start_async(name="shared")
    other = script(ATTACH.format(name="shared"))
    assert other.stdout is not None
    assert other.stdout.readline() == "attached\n"
    assert {process.pid for process in llm.process_tree().frontends} == {os.getpid(), other.pid}
    assert llm.process_tree().frontends[0].pid == os.getpid()
    other.communicate("\n", timeout=100)
    wait_for(lambda: len(llm.process_tree().frontends) == 1, "the end of the other frontend's sockets")


def test_after_a_death_all_is_shown_as_gone(start_async: StartAsync) -> None:
    llm = start_async()
    info: ConnectionInfo = llm.connection
    before = llm.process_tree()
    os.kill(before.cores[0].process.pid, signal.SIGKILL)
    wait_for(lambda: not any(p.is_running for p in llm.process_tree().engine_processes), "the engine's end")
    after = llm.process_tree()
    assert [process.pid for process in after.processes] == [process.pid for process in before.processes]
    assert str(after).count("✗ gone") == 2
    assert [process.is_running for process in after.frontends] == [True]
    wait_for(lambda: not read_process_tree(info, attached=False).frontends, "the end of the sockets")


def test_an_engine_in_this_process_is_shown_as_this_process(start_llm: StartLLM) -> None:
    tree = start_llm(multiprocess=False).process_tree()
    assert tree.host is None
    assert [process.pid for process in tree.processes] == [os.getpid()]


@pytest.mark.parametrize("multiprocess", [True, False])
def test_workers_are_the_children_of_their_engine_core(start_llm: StartLLM, multiprocess: bool) -> None:
    tree = start_llm(multiprocess=multiprocess, **TWO_BY_TWO).process_tree()
    (core,) = tree.cores
    assert (core.process.pid == os.getpid()) is not multiprocess
    children = {child.pid for child in psutil.Process(core.process.pid).children(recursive=True)}
    assert {worker.process.pid for worker in core.outside} == children
    assert [worker.info.rank for worker in core.outside] == [0, 1, 2, 3]
    assert all(worker.process.is_running for worker in core.outside)
    assert [[worker.info.rank for worker in stage] for stage in core.stages] == [[0, 1], [2, 3]]


def test_after_the_death_of_a_worker_all_are_shown_as_gone(start_async: StartAsync) -> None:
    llm = start_async(**TWO_BY_TWO)
    before = llm.process_tree()
    os.kill(before.workers[2].process.pid, signal.SIGKILL)
    wait_for(lambda: not any(p.is_running for p in llm.process_tree().engine_processes), "the engine's end")
    after = llm.process_tree()
    assert [worker.info for worker in after.workers] == [worker.info for worker in before.workers]
    assert str(after).count("✗ gone") == 6
