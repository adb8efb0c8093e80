"""How the host starts engine cores: on this machine, or as the configuration says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

from nbengine.client.connection import ConnectionInfo
from nbengine.engine.logs import log_tail
from nbengine.engine.processes import (
    HOST_FD_VARIABLE,
    CoreHandle,
    CoreLauncher,
    child_environment,
    describe_status,
    engine_command,
)
from nbengine.errors import EngineStartError


class LocalCore:
    """An engine core that is a child of this process, in its session and at the head of a process group.

    It sees the end of this process as EOF on a pipe. What it has started dies with it.
    """

    def __init__(
        self, rank: int, incarnation: int, process: subprocess.Popen[bytes], lifeline: int, log_path: str
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._process = process
        self._lifeline = lifeline
        self._log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        if self._process.returncode is None and self._has_ended():
            # As long as its status is not taken, no other process or group can have its number.
            self._kill_group()
        return self._process.poll()

    def describe_end(self) -> str:
        return describe_status(self._process.wait(0))

    def log_tail(self) -> str:
        return log_tail(self._log_path)

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"engine core {self.rank} has not ended within {timeout:g} s") from error

    def close(self) -> None:
        if self.poll() is None:
            self._kill_group()
        os.close(self._lifeline)


class LocalLauncher:
    """Starts engine cores as children of this process, their output going where its own goes.

    Their ends are announced by SIGCHLD.
    """

    def __init__(self, info: ConnectionInfo) -> None:
        self._run_dir = info.run_dir
        self._log_path = info.log_path

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                engine_command("core", self._run_dir, str(rank)),
                stdin=subprocess.DEVNULL,
                env=child_environment() | {HOST_FD_VARIABLE: str(theirs)},
                pass_fds=(theirs,),
                process_group=0,
            )
        except OSError as error:
            os.close(ours)
            raise EngineStartError(f"engine core {rank} cannot be started: {error}") from error
        finally:
            os.close(theirs)
        return LocalCore(rank, incarnation, process, ours, self._log_path)

    def close(self) -> None:
        """Nothing was reserved."""


def core_launcher(info: ConnectionInfo, on_exit: Callable[[], None]) -> CoreLauncher:
    """Return what starts the cores of an engine, which `data_parallel_backend` says.

    A launcher of remote cores calls `on_exit`, on any of its threads, when `CoreHandle.poll` may have something new.

    Raises:
        EngineStartError: what that needs is not installed.
    """
    if info.config.parallel.data_parallel_backend == "ray":
        from nbengine.engine.ray_launcher import RayLauncher

        return RayLauncher(info, on_exit)
    return LocalLauncher(info)
