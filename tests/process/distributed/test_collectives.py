"""Ranks that are processes exchange tensors: what each gets is compared with a reference in its own process."""

from __future__ import annotations

import time

import pytest

from tests.support.thorough import amount

SIZES = [(2, 1), (3, 1), (4, 1), (1, 3), (2, 2)]
NUM_CALLS = amount(60, thorough=150)


def check_results(world, tp):
    digests = [answer.get("digest") or pytest.fail(str(answer)) for answer in world.each()]
    stages = [digests[start : start + tp] for start in range(0, len(digests), tp)]
    assert all(len(set(stage)) == 1 for stage in stages)


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_random_calls_give_the_reference_in_the_same_bits_on_all_ranks(start_world, tmp_path, tp, pp):
    world = start_world(tp, pp, seed=10 * tp + pp, num_calls=NUM_CALLS)
    for answer in world.each():
        assert set(answer["joined"]) <= {"ShmCommunicator", "SingleRank", "ShmLink", "SingleGroup"}, answer
    assert world.listening_addresses() == set()
    assert list(tmp_path.iterdir()) == []
    check_results(world, tp)
    world.leave()


def test_gloo_takes_over_where_memory_cannot_be_shared(start_world):
    world = start_world(2, 2, over="gloo", num_calls=60)
    for answer in world.each():
        assert set(answer["joined"]) == {"TorchCommunicator", "TorchLink", "SingleGroup"}
    check_results(world, 2)
    assert world.listening_addresses() == {"127.0.0.1"}
    world.leave()


def test_gloo_does_not_take_over_unless_the_engine_may_listen(start_world, tmp_path):
    world = start_world(2, over="gloo", networked=False)
    for answer in world.each():
        assert answer["error"] == "EngineStartError"
        assert "set data_parallel_address=" in answer["message"]
    assert world.listening_addresses() == set()


def test_a_world_of_one_can_be_joined(start_world):
    world = start_world(1)
    assert world.each() == [{"joined": ["SingleRank", "SingleGroup"]}]
    check_results(world, 1)
    world.leave()


@pytest.mark.parametrize("stopped", [0, 3])
def test_a_rank_that_stops_for_a_while_holds_up_the_others_and_changes_nothing(start_world, stopped):
    world = start_world(2, 2, seed=5 + stopped, num_calls=120)
    world.each()
    for pause in (0.05, 0.3, 0.1):
        world.ranks[stopped].stop()
        time.sleep(pause)
        world.ranks[stopped].resume()
        time.sleep(0.05)
    check_results(world, 2)
    world.leave()
