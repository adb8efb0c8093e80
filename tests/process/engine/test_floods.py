"""One peer cannot harm the others of an engine, whatever it sends and under whatever name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import zmq
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.raw_client import RawClient

from nbengine.config import SchedulerConfig
from nbengine.ipc.control_messages import EngineDead, Hello
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.messages import ENGINE_CORE_DEAD, encode_incarnation, engine_identity

StartEngine = Callable[..., EngineUnderTest]
FLOOD_SECONDS = 2.0
MOST_GROWTH = 64 << 20
"""Bytes that the host may grow by: a fraction of what is sent to it, and more than its allocator may round up to."""
MOST_LINES = 100
GREEDY_REQUESTS = 4000
_FLOOD = """
import os, sys, threading, time
import zmq
host, stats = sys.argv[1:]
context = zmq.Context()
def send(kind, address, message, pause):
    socket = context.socket(kind)
    socket.linger, socket.sndhwm = 0, 1000
    socket.connect(address)
    while True:
        socket.send(message())
        time.sleep(pause)
heartbeat = bytes.fromhex("81a474797065a9686561727462656174")
jobs = [
    (zmq.DEALER, host, lambda: heartbeat, 0),
    (zmq.DEALER, host, lambda: b"rubbish" * 5000, 0),
    (zmq.XSUB, stats, lambda: b"\\1" + os.urandom(500_000), 0.01),
    (zmq.XSUB, stats, lambda: b"\\1" + os.urandom(20), 0),
    (zmq.XSUB, stats, lambda: b"\\1trace", 0),
]
for job in jobs:
    threading.Thread(target=send, args=job, daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def flood(engine: EngineUnderTest) -> Iterator[None]:
    addresses = [engine.info.address(name) for name in ("host.sock", "stats.sock")]
    process = subprocess.Popen(
        [sys.executable, "-c", _FLOOD, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            yield
        finally:
            process.kill()


def test_a_flood_of_one_peer_keeps_nobody_from_the_host_and_does_not_swell_it(
    start_engine: StartEngine,
) -> None:
    engine = start_engine()
    engine.wait_ready()
    client = engine.client().attach()
    host = psutil.Process(engine.host.pid)
    before, number = host.memory_info().rss, 0
    with flood(engine):
        end = time.monotonic() + FLOOD_SECONDS
        while time.monotonic() < end:
            newcomer = engine.client().attach()
            name = f"r{number}"
            newcomer.add(name, [1])
            newcomer.wait_finished(name)
            stats = newcomer.subscribe()
            newcomer.read_stats(stats)
            newcomer.leave()
            number += 1
        grown = host.memory_info().rss - before
    assert number > 0
    assert grown < MOST_GROWTH, f"{grown / 1e6:.0f} MB"
    client.add("last", [1])
    client.wait_finished("last")
    assert len(engine.log().splitlines()) < MOST_LINES + 20 * number
    assert max(map(len, engine.log().splitlines())) < 1000


def test_a_client_that_asks_for_thousands_at_once_gives_another_the_next_free_place(
    start_engine: StartEngine,
) -> None:
    engine = start_engine({"step_seconds": 0.005}, scheduler=SchedulerConfig(max_num_seqs=4))
    greedy, other = engine.client().attach(), engine.client().attach()
    for number in range(GREEDY_REQUESTS):
        # They take minutes: much longer than this process takes to ask for them on any machine.
        greedy.add(f"g{number}", [1], max_tokens=64)
    greedy.read_until(lambda: greedy.tokens("g0"))
    other.add("r", [1])
    other.wait_finished("r")
    error, answer = other.call("stats")
    assert error is None
    num_running, num_waiting = answer[1:3]
    # Most of what was asked for before has not even begun.
    assert num_running + num_waiting > GREEDY_REQUESTS // 2
    greedy.leave()


def impostors(client: RawClient) -> list[zmq.Socket[bytes]]:
    """Sockets that claim to be engine core 0, at the host and at the client."""
    context = client.context
    found = []
    for address in (client.info.address("core.sock"), client.input_address):
        socket = context.socket(zmq.DEALER)
        socket.linger = 1000
        socket.routing_id = engine_identity(0)
        socket.connect(address)
        client.sockets.append(socket)
        found.append(socket)
    return found


def test_nobody_takes_the_place_of_an_engine_core(start_engine: StartEngine) -> None:
    engine = start_engine()
    client = engine.client().attach()
    at_host, at_client = impostors(client)
    for message in (Hello(0, 1), EngineDead("a lie")):
        at_host.send(encode_control(message))
    at_client.send(encode_incarnation(0))
    assert client.input.poll(60_000)
    # The client of the package drops it: it does not know the client's secret.
    assert client.input.recv_multipart() == [engine_identity(0), encode_incarnation(0)]
    other = engine.client().attach()
    for one in (client, other):
        one.add("r", [1])
        one.wait_finished("r")
    assert not at_host.poll(0)
    assert not at_client.poll(0)
    wait_for(lambda: "no engine core has this identity" in engine.log(), "the log")
    assert engine.host.poll() is None
    assert ENGINE_CORE_DEAD.decode() not in engine.log()
