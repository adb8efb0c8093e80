"""The costs of a simulation: measured with the real classes and sockets on one machine, and kept in a file.

A simulation with recorded costs gives the same figures everywhere.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq

from nbengine.client.routing.load_balancer import LoadBalancer
from nbengine.engine.host.coordinator import DPCoordinator, DPCoordinatorProc
from nbengine.ipc.messages import STATS_TOPIC, EngineCoreOutputs
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats


@dataclass(frozen=True)
class Costs:
    """The times of what is simulated, in seconds of one core."""

    step: float
    """The time of a step without requests."""
    step_request: float
    """The time that each request in a step adds."""
    take_in: float
    """The time in which the coordinator reads an engine core's statistics, one message of many."""
    wake: float
    """The time that it takes more if it has to wait for the message."""
    publish: float
    """The time in which the coordinator makes and sends a snapshot; the next three add to it for each rank,
    client and pair."""
    publish_rank: float
    publish_client: float
    publish_rank_client: float
    deliver: float
    """The time from there to a client, or from a client or an engine core to another process."""
    observe: float
    """The time in which a client takes in a snapshot; the next one adds to it for each rank."""
    observe_rank: float
    choose: float
    """The time in which a client chooses a rank; the next one adds to it for each rank."""
    choose_rank: float
    agree: float
    """The time in which engine cores in lock step agree: a sum of one number over all of them, for each
    doubling of their number."""
    jitter: tuple[float, ...]
    """The times that one and the same step takes: the 1st to the 99th percentile, by the mean."""

    def publication(self, num_ranks: int, num_clients: int) -> float:
        """Return the time of one snapshot."""
        pairs = num_ranks * num_clients
        return (
            self.publish
            + self.publish_rank * num_ranks
            + self.publish_client * num_clients
            + self.publish_rank_client * pairs
        )

    def step_time(self, num_requests: int) -> float:
        """Return the time of one step."""
        return self.step + self.step_request * num_requests


def load(path: Path) -> Costs:
    """Read recorded costs."""
    costs = json.loads(path.read_text())["costs"]
    return Costs(**costs | {"jitter": tuple(costs["jitter"])})


def save(path: Path, costs: Costs, machine: dict[str, object]) -> None:
    """Record costs, with the machine that they belong to."""
    path.write_text(json.dumps({"machine": machine, "costs": asdict(costs)}, indent=1) + "\n")


def measure(step_times: Path, all_reduce: Path) -> Costs:
    """Measure on this machine; steps are those of the default model in `async_scheduling.json`, sums over
    ranks those of `all_reduce.json`."""
    one, sixteen = _step_times(step_times)
    step_request = (sixteen - one) / 15
    few, many = 16, 256
    publications = {(r, c): _publication(r, c) for r in (few, many) for c in (1, 32)}
    encoded = (_encode(many) - _encode(few)) / (many - few)
    each = {r: max(0.0, (publications[r, 32] - publications[r, 1]) / 31) for r in (few, many)}
    rank_client = max(0.0, (each[many] - each[few]) / (many - few))
    client = max(0.0, each[few] - few * rank_client)
    observed = {r: _observe(r) for r in (few, many)}
    chosen = {r: _choose(r) for r in (few, many)}
    observe_rank = (observed[many] - observed[few]) / (many - few)
    take_in = _take_in(pause=0.0, count=100_000)
    choose_rank = max(0.0, (chosen[many] - chosen[few]) / (many - few))
    return Costs(
        step=one - step_request,
        step_request=step_request,
        take_in=take_in,
        wake=max(0.0, _take_in(pause=0.001, count=1000) - take_in),
        publish=max(0.0, publications[few, 1] - client - few * (rank_client + encoded)),
        publish_rank=encoded,
        publish_client=client,
        publish_rank_client=rank_client,
        deliver=_deliver(),
        observe=max(0.0, observed[few] - few * observe_rank),
        observe_rank=observe_rank,
        choose=chosen[few] - few * choose_rank,
        choose_rank=choose_rank,
        agree=_agree(all_reduce),
        jitter=_jitter(),
    )


def _step_times(path: Path) -> tuple[float, float]:
    rows = {row["ms a step"]: row["sync"] / 1000 for row in json.loads(path.read_text())["rows"]}
    return rows["model, 1 requests"], rows["model, 16 requests"]


def _agree(path: Path) -> float:
    rows = json.loads(path.read_text())["rows"]
    return min(row["shared memory µs"] for row in rows if row["ranks"] == 2) / 1e6


def _jitter(steps: int = 400) -> tuple[float, ...]:
    """Measure a computation on one core, by its CPU time: what other programs do on that core does not
    count."""
    values = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    times = []
    for _ in range(steps):
        began = time.thread_time()
        np.tanh(values)
        times.append(time.thread_time() - began)
    mean = statistics.fmean(times)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return tuple(round(cut / mean, 4) for cut in cuts)


def _stats(rank: int, step: int) -> SchedulerStats:
    return SchedulerStats(
        engine_index=rank,
        num_running_reqs=20 + step % 7,
        num_waiting_reqs=step % 3,
        num_blocks=4096,
        num_free_blocks=1000 + step % 1000,
        num_cached_blocks=2000,
        prefix_cache_queries=10_000 + step,
        prefix_cache_hits=5_000 + step,
        step_counter=step,
        engines_running=True,
        workers=[WorkerStats(0, 1 << 30, step, 0.02)],
    )


class _Coordinator:
    """The coordinator's sockets, in this process, and its subscribers."""

    def __init__(self, num_ranks: int, num_clients: int, directory: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        front, output, back = (f"ipc://{directory}/{name}" for name in ("front", "output", "back"))
        self.process = DPCoordinatorProc(self.context, num_ranks, front, output, back)
        self.pusher = self.context.socket(zmq.PUSH)
        self.pusher.set_hwm(0)
        self.pusher.connect(output)
        self.subscribers = [self.context.socket(zmq.SUB) for _ in range(num_clients)]
        for subscriber in self.subscribers:
            subscriber.subscribe(STATS_TOPIC)
            subscriber.connect(front)
        for subscriber in self.subscribers:
            while not subscriber.poll(10):
                self.process.process_input_socket(self.process.publish_front, time.monotonic())
        self.drain()
        self.now = time.monotonic()

    def take_in(self) -> None:
        """Read what the engine cores have pushed."""
        self.process.process_input_socket(self.process.output_back, self.now)

    def publish(self) -> None:
        """Let time pass until a snapshot is due, and publish it."""
        self.now += 1.0
        self.process.publish_if_due(self.now)

    def drain(self) -> None:
        """Read what the subscribers have been sent."""
        for subscriber in self.subscribers:
            while subscriber.poll(0):
                subscriber.recv_multipart()

    def push(self, messages: list[list[bytes]]) -> None:
        """Send messages, and wait until all can be read."""
        for frames in messages:
            self.pusher.send_multipart(frames)
        time.sleep(0.05)

    def close(self) -> None:
        """Close all sockets."""
        self.process.close()
        for socket in (self.pusher, *self.subscribers):
            socket.close(linger=0)
        self.context.term()


def _with_coordinator(num_ranks: int, num_clients: int, use: Callable[[_Coordinator], float]) -> float:
    with tempfile.TemporaryDirectory(prefix="nbs-") as directory:
        coordinator = _Coordinator(num_ranks, num_clients, directory)
        try:
            return use(coordinator)
        finally:
            coordinator.close()


def _messages(num_ranks: int, steps: range) -> list[list[bytes]]:
    encoder = MsgpackEncoder()
    outputs = [
        EngineCoreOutputs(rank, scheduler_stats=_stats(rank, step))
        for step in steps
        for rank in range(num_ranks)
    ]
    return [[bytes(frame) for frame in encoder.encode(output)] for output in outputs]


_PUSH = """
import sys, time, zmq
address, count, pause, *frames = sys.argv[1:]
context = zmq.Context()
socket = context.socket(zmq.PUSH)
socket.set_hwm(0)
socket.connect(address)
messages = [bytes.fromhex(frame) for frame in frames]
socket.send(b"")
for number in range(int(count)):
    socket.send(messages[number % len(messages)])
    if float(pause):
        time.sleep(float(pause))
socket.close(linger=-1)
context.term()
"""


def _take_in(*, pause: float, count: int) -> float:
    """Return the CPU time a message, of all threads of this process; another process sends `count` messages,
    `pause` seconds apart."""

    def use(coordinator: _Coordinator) -> float:
        # The messages are newer than anything before only once: what is dropped as stale costs as much, but
        # for the entry.
        messages = [frame.hex() for (frame,) in _messages(64, range(1, 2))]
        socket = coordinator.process.output_back
        command = [
            sys.executable,
            "-c",
            _PUSH,
            socket.last_endpoint.decode().rstrip("\0"),
            str(count),
            str(pause),
        ]
        with subprocess.Popen([*command, *messages]) as sender:
            socket.recv()
            began, seen = time.process_time(), 0
            observe = coordinator.process.state.observe

            def counted(outputs: EngineCoreOutputs, now: float) -> object:
                nonlocal seen
                seen += 1
                return observe(outputs, now)

            coordinator.process.state.observe = counted  # type: ignore[method-assign,assignment]
            while seen < count:
                socket.poll(1000)
                coordinator.take_in()
            took = time.process_time() - began
            sender.wait()
        return took / count

    return _with_coordinator(64, 0, use)


def _publication(num_ranks: int, num_clients: int) -> float:
    """Return the CPU time of a publication, of all threads."""

    def use(coordinator: _Coordinator) -> float:
        coordinator.push(_messages(num_ranks, range(1, 2)))
        coordinator.take_in()
        times = []
        for step in range(2, 42):
            coordinator.push(_messages(1, range(step, step + 1)))
            coordinator.take_in()
            began = time.process_time()
            coordinator.publish()
            times.append(time.process_time() - began)
            coordinator.drain()
        return statistics.median(times)

    return _with_coordinator(num_ranks, num_clients, use)


def _encode(num_ranks: int) -> float:
    """Return the time of copying and encoding a snapshot."""
    state, encoder = DPCoordinator(num_ranks), MsgpackEncoder()
    for rank in range(num_ranks):
        state.observe(EngineCoreOutputs(rank, scheduler_stats=_stats(rank, 1)), 0.0)
    return _median_time([lambda: encoder.encode(state.publish(0.0, 0.0))] * 100)


def _deliver() -> float:
    def use(coordinator: _Coordinator) -> float:
        times = []
        (subscriber,) = coordinator.subscribers
        for step in range(1, 200):
            (message,) = _messages(1, range(step, step + 1))
            began = time.perf_counter()
            coordinator.pusher.send_multipart(message)
            coordinator.process.output_back.poll()
            coordinator.take_in()
            coordinator.publish()
            subscriber.poll()
            subscriber.recv_multipart()
            times.append((time.perf_counter() - began) / 2)
        return statistics.median(times)

    return _with_coordinator(4, 1, use)


def _observe(num_ranks: int) -> float:
    """Return the time in which a client takes in a snapshot, decoding included."""
    balancer = LoadBalancer()
    balancer.set_ranks(range(num_ranks))
    decoder = msgspec.msgpack.Decoder(EngineStats)
    frames = [
        msgspec.msgpack.encode(EngineStats([_stats(rank, step) for rank in range(num_ranks)]))
        for step in range(60)
    ]
    return _median_time([lambda frame=frame: balancer.observe(decoder.decode(frame)) for frame in frames])


def _choose(num_ranks: int) -> float:
    balancer = LoadBalancer()
    balancer.set_ranks(range(num_ranks))
    balancer.observe(EngineStats([_stats(rank, 9 + rank) for rank in range(num_ranks)]))

    def choose_many() -> None:
        for _ in range(100):
            balancer.add(balancer.pick())

    return _median_time([choose_many] * 30) / 100


def _median_time(calls: list[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
