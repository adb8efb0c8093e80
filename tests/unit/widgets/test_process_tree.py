"""The process tree as data and as text."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from nbengine.config import EngineArgs
from nbengine.ipc.control_messages import EngineReady, WorkerInfo
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.processes.tree import read_own_process_tree, read_process_tree
from tests.unit.widgets.trees import FIRST_CORE, HOST, OWN, make_tree

TWO_BY_TWO = """\
engine tiny: model tiny, TP 2 × PP 2, 6 processes
frontend (this process)  pid 900   resident 100 MiB  CPU 1.2 s  12 threads
host, coordinator        pid 1000  resident 100 MiB  CPU 1.2 s  12 threads
└─ engine core 0         pid 1001  resident 100 MiB  CPU 1.2 s  12 threads
   ├─ worker 0: TP0 PP0  pid 1002  resident 100 MiB  CPU 1.2 s  12 threads  cpu, layers 0–14, weights 500 MiB, KV 2 GiB
   ├─ worker 1: TP1 PP0  pid 1003  resident 100 MiB  CPU 1.2 s  12 threads  cpu, layers 0–14, weights 500 MiB, KV 2 GiB
   ├─ worker 2: TP0 PP1  pid 1004  resident 100 MiB  CPU 1.2 s  12 threads  cpu, layers 15–29, weights 500 MiB, KV 2 GiB
   └─ worker 3: TP1 PP1  pid 1005  resident 100 MiB  CPU 1.2 s  12 threads  cpu, layers 15–29, weights 500 MiB, KV 2 GiB

frontend ↔ host              host.sock: DEALER ↔ ROUTER; stats.sock: SUB (on demand) ← XPUB
frontend ↔ engine core 0     c-<id>.in: ROUTER → DEALER; c-<id>.out: PULL ← PUSH
host ↔ engine core 0         core.sock: ROUTER ↔ DEALER; back-out.sock: PULL ← PUSH; pipe: each sees the other's end
engine core 0 ↔ workers 0–3  rpc_broadcast_mq: shared-memory ring, 1 writer → 4; worker_response_mq: a ring each
workers 0, 1                 all-reduce by ShmCommunicator: shared memory
workers 2, 3                 all-reduce by ShmCommunicator: shared memory
worker 0 → worker 2          ShmLink: shared memory
worker 1 → worker 3          ShmLink: shared memory"""
SERVERS = ("nbengine: server tiny", "nbengine: serve")
"""The titles of a server that joined an engine, and of `nbengine serve`."""


def test_the_text_has_each_process_below_its_parent_and_every_link() -> None:
    assert str(make_tree(2, 2)) == TWO_BY_TWO


def test_a_server_is_named_among_the_frontends() -> None:
    tree = make_tree(frontends=3)
    own, *others = tree.frontends
    named = [
        dataclasses.replace(process, title=title) for process, title in zip(others, SERVERS, strict=True)
    ]
    text = str(dataclasses.replace(tree, frontends=(own, *named)))
    assert [line.split("  ")[0] for line in text.splitlines()[1:4]] == [
        "frontend (this process)",
        "frontend (server)",
        "frontend (server)",
    ]
    assert "3 frontends ↔ host" in text


def test_several_engine_cores_have_the_statistics_always_and_those_in_lock_step_their_waves() -> None:
    alone, two = make_tree(1, 1), make_tree(1, 1, dp=2)
    together = dataclasses.replace(two, lock_step=True)
    channels = [{link.kind: link.channels for link in tree.links} for tree in (alone, two, together)]
    assert [c["host"][1] for c in channels] == [
        "stats.sock: SUB (on demand) ← XPUB",
        "stats.sock: XSUB ↔ XPUB",
        "stats.sock: XSUB ↔ XPUB",
    ]
    assert ["back-pub.sock: XPUB → SUB" in c["control"] for c in channels] == [False, False, True]


def test_a_process_that_is_gone_is_shown_as_gone_and_its_links_are_not() -> None:
    tree = make_tree(2, 1, gone={FIRST_CORE + 1})
    lines = str(tree).splitlines()
    assert lines[0].endswith("3 processes, 1 gone")
    (line,) = (line for line in lines if "pid 1002" in line)
    assert line.endswith("✗ gone")
    # Two are no group without the other; the engine core still has the queues of one.
    assert not any(line.startswith("workers 0, 1  ") for line in lines)
    assert any(line.startswith("engine core 0 ↔ workers 0, 1  ") for line in lines)
    everything = {HOST, FIRST_CORE, FIRST_CORE + 1, FIRST_CORE + 2}
    ended = make_tree(2, 1, gone=everything)
    assert {process.pid for process in ended.processes if not process.is_running} == everything
    assert not any(link.is_intact for link in ended.links)
    assert str(ended).count("✗ gone") == 4
    assert "sock" not in str(ended)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 3, 1), (4, 2, 1), (2, 2, 2)])
def test_every_worker_is_linked_to_its_core_its_neighbours_and_the_next_stage(
    tp: int, pp: int, dp: int
) -> None:
    tree = make_tree(tp, pp, dp)
    links = [(link.kind, link.sources, link.targets) for link in tree.links]
    for core in tree.cores:
        pids = [worker.process.pid for worker in core.workers]
        assert ("queues", (core.process.pid,), tuple(pids)) in links
        assert ("control", (HOST,), (core.process.pid,)) in links
        assert ("requests", (OWN,), (core.process.pid,)) in links
        for rank, pid in enumerate(pids):
            if rank + tp < tp * pp:
                assert ("pipeline", (pid,), (pids[rank + tp],)) in links
            group = tuple(pids[rank - rank % tp : rank - rank % tp + tp])
            assert (("tensor", group, group) in links) == (tp > 1)
    kinds = [kind for kind, _, _ in links]
    assert kinds.count("pipeline") == dp * tp * (pp - 1)
    assert kinds.count("tensor") == (dp * pp if tp > 1 else 0)
    assert kinds.count("host") == 1


def test_a_gpu_is_reached_through_nccl() -> None:
    channels = {channel for link in make_tree(2, 2, device="cuda").links for channel in link.channels}
    assert {"all-reduce by TorchCommunicator: NCCL", "TorchLink: NCCL"} <= channels


def test_a_worker_inside_its_core_has_no_process_and_no_queue() -> None:
    tree = make_tree(inside=True)
    assert len(tree.processes) == 3
    assert [link.kind for link in tree.links] == ["host", "requests", "control"]
    assert "engine core 0, worker" in str(tree)
    assert "weights 500 MiB" in str(tree)


def test_an_engine_in_the_frontends_process_is_one_process() -> None:
    tree = make_tree(inside=True, alone=True)
    assert [process.pid for process in tree.processes] == [OWN]
    assert tree.links == ()
    assert "1 process" in str(tree).splitlines()[0]


def ready(pid: int, workers: list[WorkerInfo]) -> EngineReady:
    return EngineReady(0, 8, 16, 64, 1 << 20, 1 << 20, "cpu", "float32", ["generate"], pid, workers)


def worker(rank: int, pid: int) -> WorkerInfo:
    return WorkerInfo(rank, rank, 0, pid, "cpu", 1, 1, 0, 2)


def test_what_is_read_is_this_process_and_those_that_are_gone(tmp_path: Path) -> None:
    missing = max(psutil.pids()) + 100_000
    info = ConnectionInfo(
        name="\x1b[31mred",
        run_dir=str(tmp_path),
        log_path="",
        host_pid=missing,
        host_started=1,
        config=EngineArgs("random-tiny", tensor_parallel_size=2).create_engine_config(bound=False),
        ready=[ready(missing + 1, [worker(0, missing + 2), worker(1, missing + 3)])],
    )
    tree = read_process_tree(info)
    assert tree.engine == "\N{REPLACEMENT CHARACTER}[31mred"
    assert [process.pid for process in tree.frontends] == [os.getpid()]
    assert tree.frontends[0].is_running
    assert [p.pid for p in tree.engine_processes] == [missing, missing + 1, missing + 2, missing + 3]
    assert not any(process.is_running for process in tree.engine_processes)
    assert read_process_tree(info, attached=False).frontends == ()


def test_an_engine_core_in_this_process_is_read_as_that(tmp_path: Path) -> None:
    missing = max(psutil.pids()) + 100_000
    config = EngineArgs("random-tiny", tensor_parallel_size=2).create_engine_config(bound=False)
    tree = read_own_process_tree(config, ready(os.getpid(), [worker(0, missing), worker(1, missing + 1)]))
    assert tree.host is None
    assert tree.cores[0].process.is_running
    assert [node.process.is_running for node in tree.cores[0].outside] == [False, False]
