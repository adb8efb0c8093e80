"""Processes that stand still for a while, whichever they are, cost time and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq
from process_support.engine_under_test import wait_for
from process_support.raw_client import DEADLINE
from process_support.wave_client import WaveClient
from stopping import stop

from nbengine.engine.host.coordinator import FRONT_HWM, DPCoordinatorProc
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.ipc.serial import MsgpackDecoder
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats

if TYPE_CHECKING:
    from conftest import LockStepEngine, StartLockStep

NUM_REQUESTS = 60
PATIENCE = DEADLINE
LONGEST_STOP = 0.03
FOLLOWER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.rcvhwm = 10
socket.subscribe(b"stats")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
    print("read", flush=True)
"""


@contextlib.contextmanager
def stopping_at_random(processes: list[psutil.Process], seed: int) -> Iterator[None]:
    """Stop one process or more at random moments, for a random time."""
    rng, is_over = random.Random(seed), threading.Event()

    def harass() -> None:
        while not is_over.wait(rng.uniform(0, LONGEST_STOP)):
            chosen = rng.sample(processes, rng.randint(1, len(processes) - 1))
            for process in chosen:
                process.send_signal(signal.SIGSTOP)
            is_over.wait(rng.uniform(0, LONGEST_STOP))
            for process in chosen:
                process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=harass)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def keep_asking(clients: list[WaveClient], num_ranks: int, seed: int) -> dict[str, int]:
    """Send requests one by one or together, now and then not before all have ended; returns their lengths."""
    rng, lengths = random.Random(seed), {}
    for number in range(NUM_REQUESTS):
        client = rng.choice(clients)
        name = f"{clients.index(client)}-{number}"
        lengths[name] = rng.randint(1, 40)
        client.request(name, rng.randrange(num_ranks), max_tokens=lengths[name])
        if rng.random() < 0.3:
            wait_for_all(clients, lengths)
        if rng.random() < 0.1:
            wait_for(lambda: at_rest(clients[0], num_ranks), "a rest", PATIENCE)
    wait_for_all(clients, lengths)
    return lengths


def wait_for_all(clients: list[WaveClient], lengths: dict[str, int]) -> None:
    for number, client in enumerate(clients):
        mine = [name for name in lengths if name.startswith(f"{number}-")]
        client.client.wait_finished(*mine, deadline=PATIENCE)
        client.follow()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_finished_whatever_stops_meanwhile(start: StartLockStep, seed: int) -> None:
    engine = start(3)
    clients = [WaveClient(engine.attached()) for _ in range(2)]
    processes = [psutil.Process(engine.host.pid), *engine.cores()]
    with stopping_at_random(processes, seed):
        lengths = keep_asking(clients, 3, seed)
    for name, length in lengths.items():
        tokens = clients[int(name[0])].client.tokens(name)
        assert tokens == list(range(2, 2 + length)), name
    # What a client has told the coordinator may begin another wave, for nobody.
    wait_for(lambda: all_agree(engine, clients), "a rest of which all know", PATIENCE)
    for client in clients:
        assert client.seen[-1][0] > 3
        assert all(earlier <= later for earlier, later in itertools.pairwise(client.seen))
    assert "Traceback" not in engine.log()


def all_agree(engine: LockStepEngine, clients: list[WaveClient]) -> bool:
    for client in clients:
        client.follow()
    waves = {clients[0].core_stats(rank).current_wave for rank in range(engine.num_ranks)}
    waves |= {client.stats.current_wave for client in clients}
    return len(waves) == 1 and len(set(engine.num_batches())) == 1 and at_rest(clients[0], engine.num_ranks)


def at_rest(client: WaveClient, num_ranks: int) -> bool:
    cores = [client.core_stats(rank) for rank in range(num_ranks)]
    return len({core.current_wave for core in cores}) == 1 and not any(core.engines_running for core in cores)


def test_a_subscriber_that_stands_still_is_dropped_and_nobody_waits_for_it(
    no_leftovers: None, tmp_path: Path
) -> None:
    context = zmq.Context()
    front = f"ipc://{tmp_path}/front"
    coordinator = DPCoordinatorProc(context, 64, front, f"ipc://{tmp_path}/back", f"ipc://{tmp_path}/publish")
    reader = make_socket(context, front, zmq.SUB, bind=False, options={zmq.SUBSCRIBE: b"stats"})
    try:
        take_subscription(coordinator)
        with stopped_follower(coordinator, front):
            # One for each of the two newcomers.
            assert [reader.recv_multipart()[0] for _ in range(2)] == [b"stats"] * 2
            memory = psutil.Process().memory_info().rss
            for number in range(10 * FRONT_HWM):
                stats = SchedulerStats(num_running_reqs=1, step_counter=number)
                coordinator.state.observe(EngineCoreOutputs(scheduler_stats=stats), float(number))
                coordinator.publish_if_due(float(number))
                assert reader.poll(int(DEADLINE * 1000))
                assert MsgpackDecoder(EngineStats).decode(reader.recv_multipart()[1:]).engines[0] == stats
            # As many as may wait, of 64 engines each; all would be ten times as many.
            assert psutil.Process().memory_info().rss - memory < 20 << 20
    finally:
        reader.close()
        coordinator.close()
        context.term()


def take_subscription(coordinator: DPCoordinatorProc) -> None:
    assert coordinator.publish_front.poll(int(DEADLINE * 1000))
    coordinator.process_input_socket(coordinator.publish_front, 0.0)


@contextlib.contextmanager
def stopped_follower(coordinator: DPCoordinatorProc, address: str) -> Iterator[None]:
    """A process that has read the first statistics and then stands still."""
    command = [sys.executable, "-c", FOLLOWER, address]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        take_subscription(coordinator)
        assert follower.stdout is not None
        assert follower.stdout.readline() == "read\n"
        stop(follower.pid)
        yield
    finally:
        follower.kill()
        follower.communicate()
