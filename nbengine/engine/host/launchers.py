"""The launchers with which the host starts engine cores, on this machine or as the configuration says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

from nbengine.errors import EngineStartError
from nbengine.ipc.liveness import ProcessState
from nbengine.ipc.messages import new_secret
from nbengine.ipc.process_state import what_holds
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.logs import log_tail
from nbengine.runtime.processes import (
    HOST_FD_VARIABLE,
    CoreHandle,
    CoreLauncher,
    child_environment,
    describe_status,
    engine_command,
)
from nbengine.runtime.spare import CoreOrder, SpareProcess


class LocalCore:
    """An engine core that is a child of this process, in its session and at the head of a process group.

    It sees the end of this process as EOF on a pipe. The processes that it has started die with it.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        secret: bytes,
        process: subprocess.Popen[bytes],
        lifeline: int,
        log_path: str,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.secret = secret
        self._process = process
        self._lifeline = lifeline
        self._log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def group(self) -> int | None:
        return self.pid

    def state(self) -> ProcessState:
        return what_holds(self.pid)

    def poll(self) -> int | None:
        if self._process.returncode is None and self._has_ended():
            # While its status has not been taken, no other process or group can have its number.
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


def start_spare_core() -> SpareProcess:
    """Start a process that may become the first engine core.

    Raises:
        OSError: there is no room for another process.
    """
    return SpareProcess(engine_command("spare-core"), child_environment(), HOST_FD_VARIABLE, process_group=0)


class LocalLauncher:
    """A launcher that starts engine cores as children of this process, with the same output; the first one may be
    a spare core.

    SIGCHLD announces their ends.
    """

    def __init__(self, info: ConnectionInfo, spare: SpareProcess | None = None) -> None:
        self._run_dir = info.run_dir
        self._log_path = info.log_path
        self._spare = spare

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        spare, self._spare = self._spare, None
        secret = new_secret()
        if spare is not None and spare.give(CoreOrder(self._run_dir, self._log_path, rank, secret)):
            return LocalCore(rank, incarnation, secret, spare.process, spare.line, self._log_path)
        try:
            theirs, ours = os.pipe()
        except OSError as error:
            raise _cannot_start(rank, error) from error
        # The empty pipe has room for a secret, so the write does not block; nobody else can read it there.
        os.write(ours, secret)
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
            raise _cannot_start(rank, error) from error
        finally:
            os.close(theirs)
        return LocalCore(rank, incarnation, secret, process, ours, self._log_path)

    def close(self) -> None:
        """End a spare core that no engine core has needed."""
        if self._spare is not None:
            self._spare.close()


def _cannot_start(rank: int, error: OSError) -> EngineStartError:
    return EngineStartError(f"engine core {rank} cannot be started: {error}")


def core_launcher(
    info: ConnectionInfo, on_exit: Callable[[], None], spare: SpareProcess | None = None
) -> CoreLauncher:
    """Return the launcher of an engine's cores that `data_parallel_backend` names; a spare core is taken or ended.

    A launcher of remote cores calls `on_exit`, on any of its threads, when `CoreHandle.poll` may have
    something new.

    Raises:
        EngineStartError: the launcher needs a package that is not installed.
    """
    if info.config.parallel.data_parallel_backend == "ray":
        from nbengine.engine.host.ray_launcher import RayLauncher

        if spare is not None:
            spare.close()
        return RayLauncher(info, on_exit)
    return LocalLauncher(info, spare)
