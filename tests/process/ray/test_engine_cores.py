"""Engine cores on the nodes of a Ray cluster: they compute there, and end with whatever keeps them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from process_support.raw_client import RawClient
from process_support.ray_cluster import START, on_cluster

from nbengine.client.engines.directory import reap
from nbengine.ipc.control_messages import EngineDead, EngineLost, EngineReady, RanksChanged
from nbengine.ipc.messages import encode_announcement


@pytest.fixture(scope="module", autouse=True)
def clean_nodes(cluster, no_leftovers_of_module: None) -> Iterator[None]:
    """Check that what the tests share, and the last of them ends, leaves nothing on the nodes."""
    yield
    cluster.wait_clean()


@pytest.fixture(scope="module")
def engine(cluster, start_shared_engine):
    """An engine for all tests of this file up to the one that kills it."""
    return start_shared_engine(parallel=on_cluster(cluster), lease=600.0)


@pytest.fixture
def client(engine) -> Iterator[RawClient]:
    client = engine.client().attach(START)
    yield client
    client.close()


def hosts_of(cluster, name: str) -> dict[int, str]:
    """Find the node on which each engine core runs, by rank."""
    return {
        rank: node.directory.name
        for rank in (0, 1)
        for node in cluster.nodes
        if node.engine_processes(f"nbengine: core {rank} {name}")
    }


def core(cluster, engine, rank: int):
    """The process of an engine core, and its node."""
    for node in cluster.nodes:
        for process in node.engine_processes(f"nbengine: core {rank} {engine.name}"):
            return process, node
    raise AssertionError(f"no engine core {rank}")


def generate(client, rank: int, name: str) -> list[int]:
    client.add(name, [1, 2, 3], rank=rank)
    client.wait_finished(name)
    return client.tokens(name)


def test_each_rank_answers_on_a_node_of_its_own(cluster, engine, client) -> None:
    assert sorted(hosts_of(cluster, engine.name).values()) == ["n0", "n1"]
    for rank in (0, 1):
        assert generate(client, rank, f"to {rank}") == [4, 5, 6, 7, 8, 9, 10, 11]
    assert client.info.address("core.sock").startswith("tcp://")
    # On a node nothing but keepers tells cores of a living engine from orphans.
    cores = {core(cluster, engine, rank)[0].pid for rank in (0, 1)}
    assert cores.isdisjoint(reap().killed_pids)
    assert generate(client, 1, "after reaping") == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_rank_that_loses_a_process_is_started_again(cluster, engine, client) -> None:
    for rank, incarnation, choose, cause in (
        (
            1,
            1,
            lambda process, node: process,
            r"was killed by signal 9 \(SIGKILL\); .* and Ray those of a node",
        ),
        (0, 1, lambda process, node: process.parent(), r"was lost on \S+ \(\S+\): its keeper has ended"),
        (1, 2, lambda process, node: node.actors()[0], r"was lost on \S+ \(\S+\): .*died"),
    ):
        process, node = core(cluster, engine, rank)
        choose(process, node).kill()
        lost = client.hear(EngineLost)
        assert (lost.rank, lost.restarting) == (rank, True)
        assert re.search(rf"engine core {rank} \(pid {process.pid}\) {cause}", lost.cause)
        assert generate(client, 1 - rank, f"meanwhile {incarnation} {rank}") == [4, 5, 6, 7, 8, 9, 10, 11]
        again = client.hear(EngineReady, START)
        assert (again.rank, again.incarnation) == (rank, incarnation)
        assert client.hear(RanksChanged).engine_ranks == [0, 1]
        assert client.input.recv_multipart()[1:] == [encode_announcement(client.client_index, incarnation)]
        assert generate(client, rank, f"again {incarnation} {rank}") == [4, 5, 6, 7, 8, 9, 10, 11]


def test_nothing_outlives_a_killed_host(cluster, engine, client) -> None:
    assert cluster.leftovers()
    os.kill(engine.host.pid, signal.SIGKILL)
    cluster.wait_clean()
    client.wait_dead()


def test_a_core_that_fails_is_explained_by_its_own_log(cluster, start_engine) -> None:
    engine = start_engine({"fail_load": "out of luck"}, parallel=on_cluster(cluster, 1))
    client = engine.client()
    client.tell(client.attach_message())
    dead = client.hear(EngineDead, START)
    assert "RuntimeError: out of luck; caused by ValueError: the root of it" in dead.cause
    assert "ValueError: the root of it" in dead.log_tail
    cluster.wait_clean()
