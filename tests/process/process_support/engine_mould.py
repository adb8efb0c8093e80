"""A mould of engines' processes: they are forked from one that has imported torch and the rest, once for all tests.

Most tests are about what an engine does, and a fresh interpreter for each of its processes takes longer than they do.
What a copy does from `main` on is what a fresh one does: it has the command line, the environment, the working
directory, the descriptors, the limits and the parent that `Popen` would have given it. A file whose tests are about the
start of processes has `pytestmark = pytest.mark.fresh_processes`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import psutil
import pytest
import setproctitle
from process_support.engine_under_test import SUPPORT_PATH

from nbengine.runtime import nursery
from nbengine.runtime.processes import SPIN_COUNT, child_environment

MOULDED = ("nbengine.engine", "nbengine.server")
"""The modules whose processes are copies."""
PRELOADED = (
    "nbengine.engine.__main__",
    "nbengine.engine.host.main",
    "nbengine.engine.core.main",
    "nbengine.executor.multiproc",
    "nbengine.executor.worker_proc",
    "nbengine.models.checkpoints.gguf_loader",
    "nbengine.models.checkpoints.safetensors_loader",
    "nbengine.models.families.decoder",
    "nbengine.worker.worker",
    "nbengine.server.process",
    "nbengine.server.app",
    "nbengine.frontend.async_llm",
    "uvicorn.protocols.http.h11_impl",
    "process_support.fake_executor",
    "process_support.lock_step_executor",
)
READ_EARLY = ("ATEN_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TORCH")
"""The beginnings of names of variables that the interpreter, or a library that is imported, reads at its start."""
PID_BYTES = 4
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC)


@dataclass(frozen=True)
class Order:
    """The order to become a process, as `Popen` would make it."""

    module: str
    arguments: tuple[str, ...]
    safe_path: bool
    environment: dict[str, str]
    directory: str
    session: bool
    group: int
    targets: tuple[int, ...]
    """The numbers that the descriptors have in the process, in the order in which they come."""
    mask: frozenset[int]
    affinity: frozenset[int]
    limits: tuple[tuple[int, int], ...]
    priority: int


class CopiedProcess(subprocess.Popen[bytes]):
    """A process that is a copy if it can be one, and a fresh interpreter otherwise."""

    mould: ClassVar[Mould | None] = None
    """The mould to ask; None: this process is a copy itself, and forks."""
    surroundings: ClassVar[Mapping[str, str]] = {}
    """The variables of the mould."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        command = _moulded(args)
        environment = dict(os.environ if env is None else env)
        is_special = (
            shell or executable or preexec_fn or not close_fds or umask >= 0 or restore_signals is False
        )
        is_another_user = not (gid is gids is uid is None)
        if (
            command is None
            or is_special
            or is_another_user
            or _early(environment) != _early(self.surroundings)
        ):
            super()._execute_child(  # type: ignore[misc]
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
                p2cread,
                p2cwrite,
                c2pread,
                c2pwrite,
                errread,
                errwrite,
                restore_signals,
                gid,
                gids,
                uid,
                umask,
                start_new_session,
                process_group,
            )
            return
        module, arguments, safe_path = command
        standard = [
            given if given >= 0 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        order = Order(
            module=module,
            arguments=arguments,
            safe_path=safe_path,
            environment=environment,
            directory=os.fspath(cwd or os.getcwd()),
            session=start_new_session,
            group=process_group,
            targets=(0, 1, 2, *pass_fds),
            mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            affinity=frozenset(os.sched_getaffinity(0)),
            limits=tuple(map(resource.getrlimit, LIMITS)),
            priority=os.getpriority(os.PRIO_PROCESS, 0),
        )
        self.pid = self._copy(order, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _copy(self, order: Order, descriptors: list[int]) -> int:
        if self.mould is not None:
            return self.mould.copy(order, descriptors)
        # A signal to the copy must not meet the handlers of this process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if not pid:
            _become(order, descriptors)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid


def _moulded(args: Any) -> tuple[str, tuple[str, ...], bool] | None:
    """The module, the arguments and whether there is a `-P`, of a command of one of the engine's processes."""
    if not isinstance(args, list) or not args or args[0] != sys.executable:
        return None
    safe_path = args[1:2] == ["-P"]
    rest = args[2:] if safe_path else args[1:]
    if rest[:1] != ["-m"] or rest[1] not in MOULDED:
        return None
    return rest[1], tuple(rest[2:]), safe_path


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that only a fresh process would heed. This folder is on the mould's path, and harms nobody."""
    found = {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}
    path = found.pop("PYTHONPATH", "").split(os.pathsep)
    # What transformers imports of torch sets it in the process that imports it; nothing of an engine reads it.
    found.pop("TORCHINDUCTOR_CACHE_DIR", None)
    rest = [entry for entry in path if entry and entry not in SUPPORT_PATH.split(os.pathsep)]
    # What starts an engine adds this variable where it is missing, and the mould has it.
    return {"GOMP_SPINCOUNT": SPIN_COUNT, **found, "PYTHONPATH": os.pathsep.join(rest)}


class Mould:
    """The process of which copies are made; a copy's parent is the process that has asked for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        self._environment = child_environment() | {"PYTHONPATH": SUPPORT_PATH}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.wait()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have all processes of engines that this one starts within the block copied."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CopiedProcess, "mould", self)
            patch.setattr(CopiedProcess, "surroundings", self._environment)
            patch.setattr(subprocess, "Popen", CopiedProcess)
            yield

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Leave the mould out when tests look at the children of this process."""
        children = psutil.Process.children

        def others(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
            return [child for child in children(process, recursive) if child.pid != self._process.pid]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psutil.Process, "children", others)
            yield

    def copy(self, order: Order, descriptors: list[int]) -> int:
        """Make a copy with these descriptors, which is this process's child, and return its pid."""
        content = os.memfd_create("order")
        try:
            os.write(content, pickle.dumps(order))
            with self._lock, nursery._adoption():
                socket.send_fds(self._line, [b"a copy"], [content, *descriptors])
                answer = self._line.recv(PID_BYTES)
        finally:
            os.close(content)
        assert answer, f"the mould has ended with status {self._process.wait()}"
        return int.from_bytes(answer)


def make_copies(line: socket.socket) -> None:
    """Make copies until the other end of the line is closed."""
    # A copy begins with the signals held back that its order says.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while descriptors := socket.recv_fds(line, 64, 64)[1]:
        pid_reader, pid_writer = os.pipe()
        begin_reader, begin_writer = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(pid_writer, pid.to_bytes(PID_BYTES))
                # Its child gets its next parent.
                os._exit(0)
            os.close(begin_writer)
            os.read(begin_reader, 1)
            content, *descriptors = descriptors
            size = os.fstat(content).st_size
            _become(pickle.loads(os.pread(content, size, 0)), descriptors)
        for end in (pid_writer, begin_reader):
            os.close(end)
        # The copy begins once it has its next parent: a process that ends closes its files before that, and a copy
        # that began then would see its parent change.
        os.waitpid(between, 0)
        os.close(begin_writer)
        line.sendall(os.read(pid_reader, PID_BYTES))
        for descriptor in (pid_reader, *descriptors):
            os.close(descriptor)


def _become(order: Order, descriptors: Sequence[int]) -> NoReturn:
    """Be what the order says, and end."""
    status = 1
    try:
        _take_place(order, descriptors)
        try:
            runpy.run_module(order.module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = _status(end)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - as the interpreter does it at the end of a program
        traceback.print_exc()
    finally:
        # Otherwise it would go on as the process of which it is a copy.
        os._exit(status)


def _status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _take_place(order: Order, descriptors: Sequence[int]) -> None:
    # What the original holds must neither be closed by a destructor here nor looked through.
    gc.freeze()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if callable(signal.getsignal(number)) or signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _place_descriptors(order, descriptors)
    if order.session:
        os.setsid()
    if order.group >= 0:
        os.setpgid(0, order.group)
    os.sched_setaffinity(0, order.affinity)
    os.setpriority(os.PRIO_PROCESS, 0, order.priority)
    for limit, values in zip(LIMITS, order.limits, strict=True):
        resource.setrlimit(limit, values)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    sys.argv[1:] = order.arguments
    if not order.safe_path:
        sys.path.insert(0, order.directory)
    CopiedProcess.mould, CopiedProcess.surroundings = None, order.environment
    subprocess.Popen = CopiedProcess  # type: ignore[misc]
    from nbengine.engine.start_log import begin_now

    begin_now()
    signal.pthread_sigmask(signal.SIG_SETMASK, order.mask)


def _place_descriptors(order: Order, descriptors: Sequence[int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    lowest = max(order.targets) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest) for descriptor in descriptors]
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in aside:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for descriptor, target in zip(aside, order.targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


if __name__ == "__main__":
    # Copies and tests know this module by its name, and run that of the engine as a program of their own.
    from process_support import engine_mould

    # At its first call this looks for the command line where the environment begins, which copies replace.
    setproctitle.setproctitle("mould of engines' processes")
    for module in engine_mould.PRELOADED:
        importlib.import_module(module)
    del sys.modules["nbengine.engine.__main__"]
    gc.freeze()
    engine_mould.make_copies(socket.socket(fileno=int(sys.argv[1])))
