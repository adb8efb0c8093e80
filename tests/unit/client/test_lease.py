"""A lease is asked for, kept with heartbeats, and asked for under another name when it was lost."""

from __future__ import annotations

import math

import pytest

from nbengine.client.link.lease import LONGEST_HEARTBEAT_INTERVAL, Lease
from nbengine.config import EngineConfig, ModelConfig
from nbengine.ipc.control_messages import Attach
from nbengine.ipc.liveness import this_process
from nbengine.runtime.connection import ConnectionInfo


def make_lease(seconds: float = 4.0) -> Lease:
    process = this_process()
    info = ConnectionInfo(
        name="e",
        run_dir="/nowhere",
        log_path="",
        host_pid=process.pid,
        host_started=process.started,
        config=EngineConfig(ModelConfig("m"), lease=seconds),
    )
    return Lease(info, "s", ("in", "out"), b"secret")


def test_a_lease_is_asked_for_at_once_and_once() -> None:
    lease = make_lease()
    assert lease.due == 0.0
    asked = lease.request()
    assert isinstance(asked, Attach)
    assert (asked.session, asked.input_address, asked.output_address) == ("s", "in", "out")
    assert lease.due == math.inf
    assert not lease.is_held


@pytest.mark.parametrize(
    ("seconds", "interval"), [(4.0, 1.0), (3600.0, LONGEST_HEARTBEAT_INTERVAL), (1.0, 0.25)]
)
def test_heartbeats_come_four_times_a_lease_and_at_least_every_five_seconds(
    seconds: float, interval: float
) -> None:
    lease = make_lease(seconds)
    lease.request()
    lease.granted(1, now=100.0)
    assert lease.due == 100.0 + interval
    assert not lease.heartbeat(100.0 + interval / 2)
    assert lease.heartbeat(100.0 + interval)
    assert not lease.heartbeat(100.0 + interval)
    assert lease.due == 100.0 + 2 * interval
    lease.rest()
    assert not lease.heartbeat(1e9)


def test_a_lost_lease_is_replaced_under_a_name_of_its_own_that_tells_of_the_old_number() -> None:
    lease = make_lease()
    first = lease.request()
    lease.granted(7, now=0.0)
    lease.lost()
    assert (lease.is_held, lease.due, lease.heartbeat(1e9)) == (False, 0.0, False)
    second = lease.request()
    assert second.session != first.session
    assert second.session.startswith("s#")
    assert second == Attach(second.session, first.process, "in", "out", 7, first.protocol, first.secret)
    lease.granted(8, now=0.0)
    lease.lost()
    third = lease.request().session
    assert third not in (first.session, second.session)
    assert third.count("#") == 1
