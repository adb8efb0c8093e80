"""Workers of several engine cores exchange rows: what each gets is compared with a reference in its own process."""

from __future__ import annotations

import time

import psutil
import pytest
from ports import reserved_port

from nbengine.errors import NBEngineError
from nbengine.ipc.transport import own_address
from tests.support.thorough import amount

FOREVER = 10**9
NUM_CALLS = amount(50, thorough=100)
SIZES = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)]


def check_results(world):
    for answer in world.each():
        assert "digest" in answer, answer


@pytest.mark.parametrize(("dp", "tp", "pp"), SIZES)
def test_rows_of_any_number_arrive_and_are_summed_as_in_the_reference(start_world, tmp_path, dp, tp, pp):
    world = start_world(tp, pp, dp=dp, seed=dp + 10 * tp + 100 * pp, num_calls=NUM_CALLS)
    for answer in world.each():
        assert "DataParallelEnd" in answer["joined"], answer
    check_results(world)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tensors-")]
    world.leave()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_gloo_takes_over_where_memory_cannot_be_shared(start_world, tmp_path, port, scheme):
    place = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/cores"
    world = start_world(2, dp=2, over="gloo", num_calls=60, cores_meet_at=place)
    for answer in world.each():
        assert "TorchCommunicator" in answer["joined"], answer
    check_results(world)
    assert world.listening_addresses() == {"127.0.0.1"}
    world.leave()


def test_engine_cores_meet_over_the_network_by_the_address_that_leads_to_the_first(start_world):
    """Of which nobody can know that it is this machine's: memory is not shared."""
    try:
        address = own_address()
    except NBEngineError as error:
        pytest.skip(str(error))
    with reserved_port(address) as port:
        world = start_world(1, dp=3, over="network", num_calls=60, cores_meet_at=f"tcp://{address}:{port}")
        world.each()
    assert address in world.listening_addresses()
    check_results(world)
    world.leave()


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_stops_for_a_while_holds_up_the_others_and_changes_nothing(start_world, stopped):
    world = start_world(1, dp=3, seed=5 + stopped, num_calls=120)
    world.each()
    for pause in (0.05, 0.3, 0.1):
        world.ranks[stopped].stop()
        time.sleep(pause)
        world.ranks[stopped].resume()
        time.sleep(0.05)
    check_results(world)
    world.leave()


def test_a_rank_that_waits_for_a_stopped_one_sleeps(start_world):
    world = start_world(1, dp=2, num_calls=FOREVER)
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


def test_the_others_learn_which_engine_core_has_lost_its_worker(start_world):
    world = start_world(1, dp=3, num_calls=FOREVER)
    world.each()
    *others, victim = world.ranks
    victim.kill()
    start = time.monotonic()
    answers = [rank.answer() for rank in others]
    assert time.monotonic() - start < 60.0
    # Not all wait for the one that died: those are told that another has left.
    assert {answer["error"] for answer in answers} <= {"PeerDiedError", "QueueClosedError"}
    named = [answer["message"] for answer in answers if answer["error"] == "PeerDiedError"]
    assert named
    assert all("the worker of rank 0 of engine core 2 is gone" in message for message in named)


def test_an_engine_core_that_never_comes_is_named(start_world, tmp_path):
    world = start_world(1, dp=3, only=[0, 2], timeout=3.0)
    for answer in world.each():
        assert answer["error"] == "EngineStartError"
        assert f"data_parallel_init_method='file://{tmp_path}/cores-pp0-tp0'" in answer["message"]
        assert "did not come within 3 s" in answer["message"]
