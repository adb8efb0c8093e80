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
from process_support.engine_under_test import SUPPORT_PATH, wait_for

RAY = Path(sys.executable).with_name("ray")
START_SECONDS = 60.0
STORE_BYTES = 80_000_000
NODE_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers would have a lower priority than the tests that wait for them.
    "RAY_worker_niceness": "0",
    # None is started before it is needed.
    "RAY_enable_worker_prestart": "0",
}


class RayNode:
    """The processes of one node. `prefix` goes before the command: how to get into its network namespace."""

    def __init__(self, root: Path, name: str, arguments: Sequence[str], prefix: Sequence[str] = ()) -> None:
        self.directory = root / name
        self.directory.mkdir()
        self.runtime_dir = self.directory / "runtime"
        self.runtime_dir.mkdir(mode=0o700)
        self.run_dirs = self.directory / "run"
        self.run_dirs.mkdir(mode=0o700)
        self.log = self.directory / "start.txt"
        environment = (
            os.environ
            | NODE_ENVIRONMENT
            | {
                "PYTHONPATH": SUPPORT_PATH,
                "NBENGINE_RUNTIME_DIR": str(self.runtime_dir),
                "XDG_RUNTIME_DIR": str(self.run_dirs),
            }
        )
        environment.pop("RAY_ADDRESS", None)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    str(RAY),
                    "start",
                    "--block",
                    f"--temp-dir={self.directory}",
                    f"--object-store-memory={STORE_BYTES}",
                    "--include-log-monitor=false",
                    "--disable-usage-stats",
                    "--num-gpus=0",
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                cwd=self.directory,
            )

    def raylet(self) -> psutil.Process:
        return next(p for p in self.processes() if p.name() == "raylet")

    def processes(self) -> list[psutil.Process]:
        """What runs for the node: in its session, or started by Ray for it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class RayCluster:
    """A head node and others; `close` kills all of it and removes its files."""

    def __init__(self, nodes: Sequence[Mapping[str, float]], ips: Sequence[str] = ()) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nbr-", dir="/tmp"))
        self.nodes: list[RayNode] = []
        self.address = ""
        try:
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: Sequence[Mapping[str, float]]) -> None:
        for index, resources in enumerate(nodes):
            self.add(resources)
            if index == 0:
                self.address = self._head_address()

    def add(self, resources: Mapping[str, float]) -> RayNode:
        others = {name: amount for name, amount in resources.items() if name != "CPU"}
        arguments = [f"--num-cpus={resources['CPU']}", f"--resources={json.dumps(others)}"]
        if self.address:
            arguments.append(f"--address={self.address}")
        else:
            arguments += ["--head", "--port=0", "--include-dashboard=false"]
        node = RayNode(self.root, f"n{len(self.nodes)}", arguments)
        self.nodes.append(node)
        return node

    def _head_address(self) -> str:
        path = self.nodes[0].directory / "ray_current_cluster"
        self._wait(lambda: path.exists() and path.read_text(), "the head node")
        return path.read_text().strip()

    def _wait(self, condition, what: str) -> None:
        def check() -> object:
            for node in self.nodes:
                assert node.process.poll() is None, node.log.read_text()
            return condition()

        wait_for(check, what, START_SECONDS)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.root, ignore_errors=True)
