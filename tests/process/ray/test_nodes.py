"""Nodes of a Ray cluster that are lost, and nodes that join it."""

from __future__ import annotations

import re

import pytest
from process_support.ray_cluster import START, on_cluster

from nbengine.ipc.control_messages import EngineDead, EngineLost, EngineReady, RanksChanged
from nbengine.ipc.messages import encode_announcement


@pytest.mark.breaks_the_cluster
def test_a_rank_whose_node_is_lost_comes_back_on_another_one(cluster, start_engine) -> None:
    engine = start_engine(parallel=on_cluster(cluster, ray_timeout=START), lease=600.0)
    client = engine.client().attach(START)
    head, other = cluster.nodes
    [there] = other.engine_processes("nbengine: core ")
    rank = int(there.cmdline()[0].split()[2])
    other.raylet().kill()
    lost = client.hear(EngineLost, START)
    assert lost.rank == rank
    assert "was lost on" in lost.cause
    client.add("meanwhile", [1, 2, 3], rank=1 - rank)
    client.wait_finished("meanwhile")
    other.wait_clean()
    new = cluster.add({"CPU": 1})
    new.wait_started()
    again = client.hear(EngineReady, START)
    assert again.rank == rank
    assert client.hear(RanksChanged).engine_ranks == [0, 1]
    assert new.engine_processes(f"nbengine: core {rank} ")
    assert client.input.recv_multipart()[1:] == [encode_announcement(client.client_index, again.incarnation)]
    client.add("again", [1, 2, 3], rank=rank)
    client.wait_finished("again")
    # The node that the host itself belongs to. Ray ends all that was started from there, and actors cannot be reached or
    # have died: any of that may be seen first.
    head.raylet().kill()
    dead = client.hear(EngineDead, START)
    assert re.search(
        "this machine's node of the Ray cluster is gone"
        "|was lost on .*: The actor (died|.* is unavailable)"
        r"|was killed by signal 9 \(SIGKILL\); .* and Ray those of a node that goes down",
        dead.cause,
    )
    engine.wait_gone()
