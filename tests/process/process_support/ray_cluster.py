"""A Ray cluster of several nodes on this machine, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, wait_for

from nbengine.config import ParallelConfig

START = 60.0
"""Seconds that engine cores may take to be ready: bridge, actors, keepers and cores start one after the other."""
RAY = Path(sys.executable).with_name("ray")
START_SECONDS = 90.0
STORE_BYTES = 80_000_000
NODE_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers would have a lower priority than the tests that wait for them.
    "RAY_worker_niceness": "0",
    # None is started before it is needed.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A node that is gone refuses to be asked and is noticed soon; each question to one that has no processor for a while
    # waits for an answer, 30 s in all.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


class RayNode:
    """The processes of one node, in a session of their own and not children of this process.

    `inside` goes before the command: how to get into the node's network namespace.
    """

    def __init__(self, root: Path, name: str, arguments: Sequence[str], inside: Sequence[str] = ()) -> None:
        self.directory = root / name
        self.runtime_dir = self.directory / "runtime"
        self.run_dirs = self.directory / f"{root.name}-{name}"
        for directory in (self.directory, self.runtime_dir, self.run_dirs):
            directory.mkdir(mode=0o700)
        self.inside = inside
        self._output = self.directory / "start.txt"
        environment = os.environ | NODE_ENVIRONMENT
        environment |= {
            "PYTHONPATH": SUPPORT_PATH,
            "NBENGINE_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_RUNTIME_DIR": str(self.run_dirs),
        }
        command = [
            *inside,
            str(RAY),
            "start",
            f"--temp-dir={self.directory}",
            f"--object-store-memory={STORE_BYTES}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--num-gpus=0",
            *arguments,
        ]
        with open(self._output, "wb") as output:
            self._starter = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                cwd=self.directory,
            )

    def wait_started(self) -> None:
        """Wait until `ray start` has started the node's processes and gone."""
        status = self._starter.wait(START_SECONDS)
        assert status == 0, self._output.read_text()

    def has_failed(self) -> bool:
        return self._starter.poll() not in (None, 0)

    def processes(self) -> list[psutil.Process]:
        """List the processes that run for the node itself, not for engines on it."""
        return [process for process, _ in _living() if _session(process) == self._starter.pid]

    def raylet(self) -> psutil.Process:
        return next(process for process in self.processes() if process.name() == "raylet")

    def actors(self) -> list[psutil.Process]:
        """Ray's processes that have an actor of ours."""
        session = self._starter.pid
        return [p for p, title in _living() if title.startswith("ray::NodeActor") and _session(p) == session]

    def engine_processes(self, title: str = "nbengine: ") -> list[psutil.Process]:
        """Processes of engines that run on the node, with titles that begin so: keepers, cores, workers."""
        return [p for p, name in _living() if name.startswith(title) and self._has_log_of(p)]

    def _has_log_of(self, process: psutil.Process) -> bool:
        try:
            return os.readlink(f"/proc/{process.pid}/fd/2").startswith(f"{self.runtime_dir}/")
        except OSError:
            return False

    def leftovers(self) -> list[str]:
        """List what engines have left on the node: processes, files, shared memory."""
        found = [str(process) for process in [*self.engine_processes(), *self.actors()]]
        found += [str(path) for path in self.run_dirs.iterdir()]
        return found + [path.name for path in Path("/dev/shm").glob(f"nbengine-{self.run_dirs.name}-*")]

    def wait_clean(self) -> None:
        """Wait until engines have left nothing."""
        wait_for(lambda: not self.leftovers(), "the end of what engines have left")

    def close(self) -> None:
        while processes := [*self.processes(), *self.engine_processes()]:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, 5)
        self._starter.wait()


class RayCluster:
    """A head node and others; `close` kills all of it and removes its files.

    `places` are the nodes' network namespaces and addresses, if they have some of their own.
    """

    def __init__(
        self, nodes: Sequence[Mapping[str, float]], places: Sequence[tuple[str, str]] | None = None
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nbr-"))
        self.nodes: list[RayNode] = []
        self.address = ""
        try:
            for resources, place in zip(nodes, places or [None] * len(nodes), strict=True):
                self.add(resources, place)
            for node in self.nodes:
                node.wait_started()
        except BaseException:
            self.close()
            raise

    def add(self, resources: Mapping[str, float], place: tuple[str, str] | None = None) -> RayNode:
        """Start one more node, the first one as the head; `wait_started` tells when it is there."""
        others = {name: amount for name, amount in resources.items() if name != "CPU"}
        wanted = [f"--num-cpus={resources['CPU']}", f"--resources={json.dumps(others)}"]
        inside: Sequence[str] = ()
        if place is not None:
            namespace, address = place
            inside = ["ip", "netns", "exec", namespace]
            wanted.append(f"--node-ip-address={address}")
        if self.address:
            wanted.append(f"--address={self.address}")
        else:
            wanted += ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]
        node = RayNode(self.root, f"n{len(self.nodes)}", wanted, inside)
        self.nodes.append(node)
        if not self.address:
            self.address = self._wait_for_head(node)
        return node

    def _wait_for_head(self, node: RayNode) -> str:
        """The cluster's address, as soon as another node can join it."""
        path = node.directory / "ray_current_cluster"
        wait_for(lambda: path.exists() or node.has_failed(), "the head node", START_SECONDS)
        if node.has_failed():
            node.wait_started()
        return path.read_text().strip()

    def leftovers(self) -> list[str]:
        return [item for node in self.nodes for item in node.leftovers()]

    def wait_clean(self) -> None:
        for node in self.nodes:
            node.wait_clean()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.root, ignore_errors=True)


def on_cluster(cluster: RayCluster, size: int = 2, **options) -> ParallelConfig:
    """Engine cores with the fake executor on the nodes of the cluster."""
    defaults = {
        "data_parallel_size": size,
        "data_parallel_backend": "ray",
        "distributed_executor_backend": FAKE_EXECUTOR,
        "ray_address": cluster.address,
        "ray_timeout": 20.0,
    }
    return ParallelConfig(**defaults | options)


def _living() -> list[tuple[psutil.Process, str]]:
    """All processes but zombies, and their titles."""
    found = []
    for process in psutil.process_iter():
        # What psutil does about names costs ten times as much; a zombie and a thread of the kernel have none.
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            if title:
                found.append((process, title.replace(b"\0", b"").decode(errors="replace")))
    return found


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1
