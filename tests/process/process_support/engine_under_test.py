"""An engine started for a test, with what the test needs to watch it and to harm it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from process_support.looks import looks
from process_support.raw_client import DEADLINE, RawClient

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.liveness import machine_id
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    engine_file,
    log_dir,
    read_connection,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.processes import PARENT_FD_VARIABLE

SUPPORT_PATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
)
"""PYTHONPATH of the engines' processes: this folder's parent, and what is there already."""
FAKE_EXECUTOR = "process_support.fake_executor:FakeExecutor"
ASYNC_FAKE_EXECUTOR = "process_support.fake_executor:AsyncFakeExecutor"


def fake_config(knobs: dict | None = None, *, max_model_len: int | None = None, **engine) -> EngineConfig:
    """A configuration with the fake executor; unbound and quick to give clients up unless told otherwise."""
    defaults = {
        "model": ModelConfig(model="fake", hf_overrides=knobs or {}, max_model_len=max_model_len),
        "bound": False,
        "cache": CacheConfig(num_gpu_blocks_override=64),
        "parallel": ParallelConfig(distributed_executor_backend=FAKE_EXECUTOR),
    }
    return EngineConfig(**defaults | engine)


def wait_for(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Wait for something that nothing announces."""
    for passed in looks():
        if condition():
            return
        assert passed < deadline, f"{what}: not within {deadline} s"


class EngineUnderTest:
    """A host process and its cores, started as a launcher would."""

    def __init__(
        self, config: EngineConfig, name: str | None = None, *, prefix: Sequence[str] = (), **popen
    ) -> None:
        self.name = name or f"t-{uuid.uuid4().hex[:8]}"
        directories = EngineDirectories.make()
        self.run_dir = Path(directories.run_dir)
        self.log_path = log_dir() / f"{self.name}.log"
        self.info = ConnectionInfo(
            name=self.name,
            run_dir=str(self.run_dir),
            log_path=str(self.log_path),
            host_pid=0,
            host_started=0,
            config=config,
            tensor_dir=directories.tensor_dir,
            marker=directories.marker,
            machine=machine_id(),
            keys=make_curve_keys() if config.parallel.networked else None,
        )
        write_engine_file(self.info)
        self.clients: list[RawClient] = []
        popen.setdefault("env", {})
        environment = os.environ | {"PYTHONPATH": SUPPORT_PATH} | popen.pop("env")
        with open(self.log_path, "ab") as log:
            self.host = subprocess.Popen(
                [*prefix, sys.executable, "-m", "nbengine.engine", "host", str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
                **popen,
            )
        if self.info.keys is not None:
            self._wait_for_addresses()

    def _wait_for_addresses(self) -> None:
        """Wait until the host has said where on the network it listens."""
        path = engine_file(self.run_dir)
        wait_for(lambda: read_connection(path).addresses, "where the host listens", DEADLINE)
        self.info = read_connection(path)

    @classmethod
    def with_parent_pipe(cls, config: EngineConfig) -> tuple[EngineUnderTest, int]:
        """A bound engine, and the end of its parent's pipe."""
        theirs, ours = os.pipe()
        engine = cls(config, env={PARENT_FD_VARIABLE: str(theirs)}, pass_fds=(theirs,))
        os.close(theirs)
        return engine, ours

    def client(self, **kwargs) -> RawClient:
        """A client that is not attached yet."""
        client = RawClient(self.info, **kwargs)
        self.clients.append(client)
        return client

    def wait_ready(self, deadline: float = DEADLINE) -> None:
        """Wait until the connection file says that the engine takes requests."""
        path = connection_file(self.name)
        wait_for(lambda: path.exists() and self.read_connection().ready, "readiness", deadline)

    def core(self) -> psutil.Process:
        """The process of engine core 0, once it is there."""
        host = psutil.Process(self.host.pid)
        wait_for(host.children, "an engine core")
        return host.children()[0]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_gone(self, deadline: float = DEADLINE) -> None:
        """Wait for the end of every process and file of the engine."""
        try:
            self.host.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the host is still there; its log:\n{self.log()}") from None
        wait_for(lambda: not self.processes(), "the end of all processes", deadline)
        wait_for(lambda: not self.run_dir.exists(), "the end of the run directory", deadline)
        tensor_dir = Path(self.info.tensor_dir)
        wait_for(lambda: not tensor_dir.exists(), "the end of the tensor directory", deadline)
        wait_for(lambda: not connection_file(self.name).exists(), "the end of the connection file", deadline)

    def processes(self) -> list[psutil.Process]:
        """List the processes that run in the session of the host."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                # Most are of others: what tells that comes before what costs more.
                if os.getsid(pid) == self.host.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def read_connection(self) -> ConnectionInfo:
        return read_connection(connection_file(self.name))

    def close(self) -> None:
        if self.host.poll() is None:
            self.host.terminate()
        try:
            self.wait_gone()
        finally:
            for process in self.processes():
                process.kill()
            self.host.wait()
            for client in self.clients:
                client.close()
