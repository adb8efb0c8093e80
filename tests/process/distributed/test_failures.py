"""Ranks that cannot join, and ranks that die."""

from __future__ import annotations

import socket
import time

import psutil
import pytest
from process_support.engine_under_test import wait_for

FOREVER = 10**9


@pytest.mark.parametrize(("tp", "pp", "over"), [(3, 1, "memory"), (2, 2, "memory"), (2, 1, "gloo")])
def test_the_others_notice_that_a_rank_was_killed_and_leave_nothing_behind(
    start_world, tmp_path, tp, pp, over
):
    world = start_world(tp, pp, over=over, num_calls=FOREVER)
    world.each()
    *others, victim = world.ranks
    victim.kill()
    start = time.monotonic()
    for rank in others:
        answer = rank.answer()
        # Not all wait for the one that died: those are told that another has left.
        assert answer["error"] in (
            {"PeerDiedError", "QueueClosedError"} if over == "memory" else {"RuntimeError"}
        )
    assert time.monotonic() - start < 60.0
    assert [path.name for path in tmp_path.iterdir()] in ([], ["rendezvous"])


def test_a_rank_that_waits_for_a_stopped_one_sleeps(start_world):
    world = start_world(2, num_calls=FOREVER)
    world.each()
    waiting, stopped = world.ranks
    stopped.stop()
    time.sleep(0.2)
    process = psutil.Process(waiting.pid)
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    # A tenth of what it would take if it spun.
    assert after.user + after.system - before.user - before.system <= 0.1
    for rank in (waiting, stopped):
        rank.kill()


def test_a_port_that_is_taken_is_named(start_world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        method = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (answer,) = start_world(2, only=[0], init_method=method).each()
    assert answer["error"] == "EngineStartError"
    assert f"distributed_init_method='{method}'" in answer["message"]
    assert "Address already in use" in answer["message"]


@pytest.mark.parametrize(("over", "listening"), [("memory", set()), ("gloo", {"127.0.0.1"})])
def test_a_free_port_is_joined_from_this_machine_alone_and_given_up_where_memory_is_shared(
    start_world, port, over, listening
):
    world = start_world(2, over=over, networked=False, init_method=f"tcp://127.0.0.1:{port}")
    world.each()
    wait_for(lambda: world.listening_addresses() == listening, "the end of the meeting")
    assert all("digest" in answer for answer in world.each())
    world.leave()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_rank_that_never_comes_is_named(start_world, tmp_path, port, scheme):
    method = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/rendezvous"
    world = start_world(3, only=[0, 2], init_method=method, timeout=3.0)
    answers = world.each()
    for answer in answers:
        assert answer["error"] == "EngineStartError"
        assert f"distributed_init_method='{method}'" in answer["message"]
    # Rank 0 has the meeting place of tcp, and who came later than it did finds that closed instead.
    waited_in_vain = ["did not come within 3 s" in answer["message"] for answer in answers]
    assert waited_in_vain[0]
    assert waited_in_vain[1] or (scheme == "tcp" and "could not join the 3 workers" in answers[1]["message"])
    assert any("rank 1 did not come" in answer["message"] for answer in answers)


def test_an_address_where_nobody_answers_is_named(start_world, port):
    method = f"tcp://127.0.0.1:{port}"
    (answer,) = start_world(2, only=[1], init_method=method, timeout=1.0).each()
    assert answer["error"] == "EngineStartError"
    assert f"distributed_init_method='{method}'" in answer["message"]


def test_a_server_of_another_kind_is_not_waited_for_without_end(start_world):
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        method = f"tcp://127.0.0.1:{foreign.getsockname()[1]}"
        world = start_world(2, only=[1], init_method=method, timeout=1.5)
        (answer,) = world.each()
    assert answer["error"] == "EngineStartError"
    assert f"distributed_init_method='{method}'" in answer["message"]


def test_a_file_that_cannot_be_made_is_named(start_world, tmp_path):
    method = f"file://{tmp_path}/nowhere/rendezvous"
    (answer,) = start_world(2, only=[0], init_method=method).each()
    assert answer["error"] == "EngineStartError"
    assert f"distributed_init_method='{method}'" in answer["message"]
    assert "No such file or directory" in answer["message"]
