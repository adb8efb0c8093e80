"""Engines that a cluster cannot have: one clear error each, and nothing stays behind."""

from __future__ import annotations

import pytest
from process_support.ray_cluster import START, on_cluster

from nbengine.ipc.control_messages import EngineDead


def refusal(engine) -> str:
    client = engine.client()
    client.tell(client.attach_message())
    dead = client.hear(EngineDead, START)
    assert not dead.started
    engine.wait_gone()
    return dead.cause


def test_an_engine_that_is_too_large_says_what_it_wants_and_what_there_is(cluster, start_engine) -> None:
    parallel = on_cluster(cluster, 1, tensor_parallel_size=3, ray_timeout=0.5)
    cause = refusal(start_engine(parallel=parallel))
    assert "could not be started: the Ray cluster had no room for 1 x 3 CPU within 0.5 s" in cause
    assert cause.count("has 1 CPU free of 1 CPU") == 2


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "Connection refused"), ("nowhere.invalid:6379", "Name or service not known")],
)
def test_a_wrong_address_is_named_with_what_to_do(cluster, start_engine, address: str, reason: str) -> None:
    cause = refusal(start_engine(parallel=on_cluster(cluster, 1, ray_address=address)))
    assert f"no Ray cluster was found at {address}" in cause
    assert reason in cause
    assert "`ray start --head`" in cause
