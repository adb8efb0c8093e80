"""What things cost: measured with the real classes and sockets on one machine, and kept in a file.

A simulation with recorded costs gives the same figures everywhere.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import zmq

from nbengine.client.load_balancer import LoadBalancer
from nbengine.engine.coordinator import DPCoordinatorProc
from nbengine.ipc.messages import STATS_TOPIC, EngineCoreOutputs
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats


@dataclass(frozen=True)
class Costs:
    """Seconds, of one core."""

    step: float
    """A step without requests."""
    step_request: float
    """What each request in it adds."""
    take_in: float
    """The coordinator reads an engine core's statistics."""
    publish: float
    """The coordinator makes and sends a snapshot, and for each …"""
    publish_rank: float
    publish_client: float
    publish_rank_client: float
    deliver: float
    """From there to a client, or from a client or an engine core to another process."""
    observe: float
    """A client takes in a snapshot, and for each …"""
    observe_rank: float
    choose: float
    """A client chooses a rank, and for each …"""
    choose_rank: float

    def publication(self, num_ranks: int, num_clients: int) -> float:
        """Of one snapshot."""
        pairs = num_ranks * num_clients
        return (
            self.publish
            + self.publish_rank * num_ranks
            + self.publish_client * num_clients
            + self.publish_rank_client * pairs
        )

    def step_time(self, num_requests: int) -> float:
        """Of one step."""
        return self.step + self.step_request * num_requests


def load(path: Path) -> Costs:
    """Read recorded costs."""
    return Costs(**json.loads(path.read_text())["costs"])


def save(path: Path, costs: Costs, machine: dict[str, object]) -> None:
    """Record costs, with the machine that they belong to."""
    path.write_text(json.dumps({"machine": machine, "costs": asdict(costs)}, indent=1) + "\n")


def measure(step_times: Path) -> Costs:
    """Measure on this machine; steps are those of the default model in `async_scheduling.json`."""
    one, sixteen = _step_times(step_times)
    step_request = (sixteen - one) / 15
    few, many = 16, 256
    publications = {(r, c): _publication(r, c) for r in (few, many) for c in (1, 32)}
    slopes = {c: (publications[many, c] - publications[few, c]) / (many - few) for c in (1, 32)}
    bases = {c: publications[few, c] - few * slopes[c] for c in (1, 32)}
    rank_client = max(0.0, (slopes[32] - slopes[1]) / 31)
    client = max(0.0, (bases[32] - bases[1]) / 31)
    observed = {r: _observe(r) for r in (few, many)}
    chosen = {r: _choose(r) for r in (few, many)}
    observe_rank = (observed[many] - observed[few]) / (many - few)
    choose_rank = max(0.0, (chosen[many] - chosen[few]) / (many - few))
    return Costs(
        step=one - step_request,
        step_request=step_request,
        take_in=_take_in(),
        publish=max(0.0, bases[1] - client),
        publish_rank=max(0.0, slopes[1] - rank_client),
        publish_client=client,
        publish_rank_client=rank_client,
        deliver=_deliver(),
        observe=max(0.0, observed[few] - few * observe_rank),
        observe_rank=observe_rank,
        choose=chosen[few] - few * choose_rank,
        choose_rank=choose_rank,
    )


def _step_times(path: Path) -> tuple[float, float]:
    rows = {row["ms a step"]: row["sync"] / 1000 for row in json.loads(path.read_text())["rows"]}
    return rows["model, 1 requests"], rows["model, 16 requests"]


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
    """The coordinator's sockets, in this process, and subscribers of it."""

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

    def drain(self) -> None:
        """Read what the subscribers have been sent."""
        for subscriber in self.subscribers:
            while subscriber.poll(0):
                subscriber.recv_multipart()

    def push(self, messages: list[list[bytes]]) -> None:
        """Send, and wait until all can be read."""
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


def _take_in() -> float:
    """CPU time of all threads, the one that moves bytes included."""

    def use(coordinator: _Coordinator) -> float:
        per_message = []
        for round_number in range(8):
            messages = _messages(64, range(1 + round_number * 10, 11 + round_number * 10))
            coordinator.push(messages)
            began = time.process_time()
            coordinator.process.process_input_socket(coordinator.process.output_back, time.monotonic())
            per_message.append((time.process_time() - began) / len(messages))
        return statistics.median(per_message)

    return _with_coordinator(64, 0, use)


def _publication(num_ranks: int, num_clients: int) -> float:
    """CPU time of all threads."""

    def use(coordinator: _Coordinator) -> float:
        coordinator.push(_messages(num_ranks, range(1, 2)))
        coordinator.process.process_input_socket(coordinator.process.output_back, time.monotonic())
        times = []
        for step in range(2, 42):
            coordinator.push(_messages(1, range(step, step + 1)))
            coordinator.process.process_input_socket(coordinator.process.output_back, time.monotonic())
            began = time.process_time()
            coordinator.process.publish_if_due(time.monotonic() + 1.0)
            times.append(time.process_time() - began)
            coordinator.drain()
        return statistics.median(times)

    return _with_coordinator(num_ranks, num_clients, use)


def _deliver() -> float:
    def use(coordinator: _Coordinator) -> float:
        times = []
        (subscriber,) = coordinator.subscribers
        for step in range(1, 200):
            (message,) = _messages(1, range(step, step + 1))
            began = time.perf_counter()
            coordinator.pusher.send_multipart(message)
            coordinator.process.output_back.poll()
            coordinator.process.process_input_socket(coordinator.process.output_back, time.monotonic())
            coordinator.process.publish_if_due(time.monotonic() + 1.0)
            subscriber.poll()
            subscriber.recv_multipart()
            times.append((time.perf_counter() - began) / 2)
        return statistics.median(times)

    return _with_coordinator(4, 1, use)


def _observe(num_ranks: int) -> float:
    """Decoding included."""
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
