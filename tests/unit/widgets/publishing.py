"""The coordinator's publish socket, played from a test, and who listens to a feed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from nbengine.config import EngineArgs
from nbengine.ipc.liveness import this_process
from nbengine.ipc.messages import STATS_TOPIC, TRACE_TOPIC
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.metrics.trace import (
    BlocksCached,
    RequestTrace,
    TraceBatch,
    TraceEvent,
    TraceMessage,
    TraceSnapshot,
)
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed

DEADLINE = 60.0

Follow = Callable[..., EngineFeed]
"""Has a listener, with an owner or without, follow the engine."""


def make_info(directory: Path, name: str = "dense", **arguments: object) -> ConnectionInfo:
    """An engine whose host is this process."""
    directory.mkdir(exist_ok=True)
    return ConnectionInfo(
        name=name,
        run_dir=str(directory),
        log_path=f"/logs/{name}.log",
        host_pid=os.getpid(),
        host_started=this_process().started,
        config=EngineArgs.from_kwargs({"model": "random-tiny", **arguments}).create_engine_config(
            bound=False
        ),
    )


class Publisher:
    """Answers each subscription as an engine does: with the statistics, and a snapshot of each engine core."""

    def __init__(self, info: ConnectionInfo, num_blocks: int = 8) -> None:
        self.stats = EngineStats([SchedulerStats(0, num_blocks=num_blocks, num_free_blocks=num_blocks)])
        self.time = 1000.0
        self.seq = 0
        self.incarnation = 0
        self.topics: list[bytes] = []
        """The topics that were subscribed to (\\x01) and left (\\x00), in order."""
        self.requests: list[RequestTrace] = []
        """Those that a snapshot has."""
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, info.address("stats.sock"), zmq.XPUB, bind=True)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish_stats(self, *engines: SchedulerStats) -> None:
        with self._lock:
            self.time += 0.01
            self.stats = EngineStats(list(engines) or self.stats.engines, timestamp=self.time)
            self._send(STATS_TOPIC, self.stats)

    def publish(self, *events: TraceEvent, rank: int = 0, skip: int = 0, **stats: object) -> None:
        """A batch of an engine core, whose statistics change by `stats`."""
        with self._lock:
            self.time += 0.01
            self.seq += 1 + skip
            known = self.stats.engines[rank]
            now = SchedulerStats(**{name: getattr(known, name) for name in known.__struct_fields__} | stats)
            self.stats.engines[rank] = now
            batch = TraceBatch(rank, self.seq, self.time, list(events), now, self.incarnation)
            self._send(TRACE_TOPIC, batch)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(10):
                continue
            with self._lock:
                message = self._socket.recv()
                self.topics.append(message)
                if message == b"\x01" + STATS_TOPIC:
                    self.stats.timestamp = self.time
                    self._send(STATS_TOPIC, self.stats)
                elif message == b"\x01" + TRACE_TOPIC:
                    for engine in self.stats.engines:
                        self._send(TRACE_TOPIC, self._snapshot(engine))

    def _snapshot(self, engine: SchedulerStats) -> TraceSnapshot:
        return TraceSnapshot(
            engine.engine_index,
            self.seq,
            self.time,
            4,
            64,
            8,
            self.requests,
            BlocksCached([], []),
            engine,
            self.incarnation,
        )

    def _send(self, topic: bytes, message: TraceMessage | EngineStats) -> None:
        self._socket.send_multipart([topic, msgspec.msgpack.encode(message)])


class Deaf:
    """A source that nothing comes from."""

    num_losses = 0

    def __init__(self) -> None:
        self.num_polls = 0

    def poll(self, timeout: float | None = None) -> object:
        self.num_polls += 1
        threading.Event().wait(timeout)
        return None


class Listener:
    """Keeps what it is told, as far as the test asks for it."""

    def __init__(self) -> None:
        self.follows = True
        self.states: list[DashboardState] = []
        self.steps: list[list[int]] = []
        self.fails = False
        self._changed = threading.Condition()

    def on_state(self, state: DashboardState) -> None:
        if self.fails:
            raise RuntimeError("this dashboard cannot draw")
        with self._changed:
            self.states.append(state)
            self.steps = [[step.step for step in mirror.steps] for mirror in state.mirrors.values()]
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[DashboardState], bool]) -> DashboardState:
        """Wait for the first state, from now on, for which the condition holds."""
        with self._changed:
            found = self._changed.wait_for(lambda: bool(self.states) and condition(self.states[-1]), DEADLINE)
            assert found, f"never came; last: {self.states[-1:]}"
            return self.states[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    """Look until it holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
