"""Measure what the coordinator costs the host: its share of a core while engines push their statistics.

    python benchmarks/bench_coordinator.py [--json PATH] [--engines N ...] [--seconds S]

The host is a real one, poll loop and sockets, but starts no engine cores: this process pushes in their place,
200 reports a second for each of them, as an engine with two workers does that finishes no request; it also
reads as the subscribers. The CPU time is that of the whole host process, threads of ZMQ included, above what
it takes when nobody pushes. "together": all engines push at the same moments, as those in lock step do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from common import parser, report

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.engine.host import main as host_main
from nbengine.engine.host import supervisor
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats
from nbengine.runtime.connection import (
    ConnectionInfo,
    read_connection,
    remove_engine_files,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.processes import CoreHandle

RATE = 200.0
"""The reports of one engine a second."""
NUM_SUBSCRIBERS = 4
LIMIT = 0.03
"""The most that the coordinator may take, as a share of a core, at 8 engines."""


class NoCore:
    """A stand-in for an engine core that never says anything to the host."""

    pid = 0

    def __init__(self, rank: int, incarnation: int) -> None:
        self.rank, self.incarnation = rank, incarnation

    def poll(self) -> int | None:
        """Return None, so that it seems to run."""
        return None

    def describe_end(self) -> str:
        """Return nothing: it does not end."""
        return ""

    log_tail = describe_end

    def send_signal(self, number: int) -> None:
        """End this process: the benchmark ends the host with a signal."""
        del number
        os._exit(0)

    def wait(self, timeout: float) -> None:
        """Return at once: nothing runs."""
        del timeout

    def close(self) -> None:
        """Do nothing: nothing is held."""


class NoLauncher:
    """A launcher that starts nothing."""

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        """Return an engine core in name only."""
        return NoCore(rank, incarnation)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def host(run_dir: str) -> int:
    """Run the host process."""
    supervisor.core_launcher = lambda info, wake, spare: NoLauncher()  # type: ignore[assignment]
    return host_main.run_host(read_connection(Path(run_dir) / "engine.json"))


@contextlib.contextmanager
def running_host(num_engines: int, *, lock_step: bool) -> Iterator[tuple[psutil.Process, ConnectionInfo]]:
    """Run a host of `num_engines` engines in a process."""
    directories = EngineDirectories.make()
    run_dir = Path(directories.run_dir)
    config = EngineConfig(
        model=ModelConfig(model="none", is_moe=lock_step),
        parallel=ParallelConfig(data_parallel_size=num_engines),
        bound=False,
    )
    info = ConnectionInfo(
        name=f"bench-{os.getpid()}",
        run_dir=directories.run_dir,
        tensor_dir=directories.tensor_dir,
        marker=directories.marker,
        log_path=str(run_dir / "log"),
        host_pid=0,
        host_started=0,
        config=config,
    )
    write_engine_file(info)
    process = subprocess.Popen([sys.executable, __file__, "--host", str(run_dir)], start_new_session=True)
    try:
        address = Path(run_dir) / "stats.sock"
        while not address.exists():
            time.sleep(0.01)
        yield psutil.Process(process.pid), info
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        remove_engine_files(info)


class Peers:
    """The engines and the subscribers of a host."""

    def __init__(self, info: ConnectionInfo, num_engines: int, *, together: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engines = [self._context.socket(zmq.PUSH) for _ in range(num_engines)]
        self._subscribers = [self._context.socket(zmq.SUB) for _ in range(NUM_SUBSCRIBERS)]
        for engine in self._engines:
            engine.connect(info.address("back-out.sock"))
        for subscriber in self._subscribers:
            subscriber.connect(info.address("stats.sock"))
            subscriber.subscribe(b"stats")
        self._encoder = MsgpackEncoder()
        self._decoder = msgspec.msgpack.Decoder(EngineStats)
        self._together = together
        self._step = 0
        self.num_read = 0
        self.last: EngineStats | None = None

    def push(self, seconds: float) -> None:
        """Push for `seconds` seconds, or only wait if there is nobody to push."""
        ticks = 1 if self._together else max(1, len(self._engines))
        start = time.perf_counter()
        for tick in range(round(seconds * RATE) * ticks):
            time.sleep(max(0.0, start + tick / (RATE * ticks) - time.perf_counter()))
            if tick % ticks == 0:
                self._step += 1
            for rank in range(len(self._engines)) if self._together else [tick % ticks]:
                self._engines[rank].send_multipart(self._encoder.encode(self._report(rank)))
            if tick % (10 * ticks) == 0:
                self.read()

    def read(self) -> None:
        """Read the snapshots that have been published."""
        for subscriber in self._subscribers:
            while subscriber.poll(0):
                self.last = self._decoder.decode(subscriber.recv_multipart()[1])
                self.num_read += 1

    def _report(self, rank: int) -> EngineCoreOutputs:
        step = self._step
        workers = [
            WorkerStats(rank=worker, memory_bytes=1 << 30, num_steps=step, step_seconds=0.005)
            for worker in (0, 1)
        ]
        stats = SchedulerStats(
            rank,
            32,
            8,
            20_000,
            11_000,
            15_000,
            1_000_000,
            700_000,
            12,
            step,
            workers=workers,
            engines_running=True,
        )
        return EngineCoreOutputs(rank, scheduler_stats=stats, timestamp=time.monotonic())

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process has taken so far."""
    times = process.cpu_times()
    return times.user + times.system


def measure(num_engines: int, seconds: float, rounds: int, *, together: bool) -> dict[str, Any]:
    """Measure one row."""
    with running_host(num_engines, lock_step=together) as (process, info):
        silent, peers = Peers(info, 0, together=together), Peers(info, num_engines, together=together)
        peers.push(0.5)
        shares, idle = [], []
        for _ in range(rounds):
            for which, into in ((silent, idle), (peers, shares)):
                begin, start = cpu_seconds(process), time.perf_counter()
                if which is silent:
                    time.sleep(seconds)
                else:
                    which.push(seconds)
                into.append((cpu_seconds(process) - begin) / (time.perf_counter() - start))
        peers.read()
        if peers.last is None or len(peers.last.engines) != num_engines:
            raise SystemExit(f"the coordinator published {peers.last}")
        published = peers.num_read / NUM_SUBSCRIBERS / (rounds * seconds)
        silent.close()
        peers.close()
    return {
        "engines": num_engines,
        "pushing": "together" if together else "in turn",
        "reports/s": num_engines * RATE,
        "published/s": round(published, 1),
        "% of a core": 100 * (statistics.median(shares) - statistics.median(idle)),
        "idle %": 100 * statistics.median(idle),
        "limit %": 100 * LIMIT if num_engines == 8 else "",
    }


def main() -> int:
    """Measure one row for each number of engines and each way of pushing."""
    if sys.argv[1:2] == ["--host"]:
        return host(sys.argv[2])
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--seconds", type=float, default=3.0)
    arguments = options.parse_args()
    rows = [
        measure(count, arguments.seconds, arguments.rounds, together=together)
        for count in arguments.engines
        for together in (False, True)
    ]
    report("coordinator", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
