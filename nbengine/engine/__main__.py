"""The entry point of the engine's processes: `python -m nbengine.engine host RUN_DIR`, `… core RUN_DIR RANK`,
`… spare-host`, `… spare-core`, `… worker FD`."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import setproctitle

from nbengine.engine.lossy_output import lose_what_cannot_be_written
from nbengine.errors import ProtocolMismatchError
from nbengine.ipc.messages import SECRET_BYTES
from nbengine.ipc.shortage import raise_file_limit
from nbengine.runtime.connection import (
    ConnectionInfo,
    read_engine_file,
    remove_core_files,
    remove_engine_files,
)
from nbengine.runtime.directories import EngineDirectories, finish_removals, note_place
from nbengine.runtime.imports import imports_that_stay
from nbengine.runtime.lifeline import Lifeline
from nbengine.runtime.logs import configure_logging
from nbengine.runtime.nursery import NurseryOrder, be_nursery
from nbengine.runtime.processes import HOST_FD_VARIABLE
from nbengine.runtime.stack_dumps import write_stacks_on_signal

if TYPE_CHECKING:
    from nbengine.executor.worker_proc import WorkerSpec
    from nbengine.runtime.spare import SpareProcess


def main() -> int:
    """Run the process that the command line names, and return its exit status."""
    parser = argparse.ArgumentParser(prog="nbengine.engine", description="The processes of an engine.")
    roles = parser.add_subparsers(dest="role", required=True)
    host = roles.add_parser("host", help="start an engine's cores and look after them")
    core = roles.add_parser("core", help="run one engine core (started by the host)")
    for role in (host, core):
        role.add_argument("run_dir")
    core.add_argument("rank", type=int)
    roles.add_parser("spare-host", help="wait to be a host (started by a notebook)")
    roles.add_parser("spare-core", help="wait to be an engine core (started by a spare host)")
    worker = roles.add_parser("worker", help="run one worker (started by an executor)")
    worker.add_argument("fd", type=int, help="socket that brings its orders")
    keeper = roles.add_parser(
        "keeper", help="keep one process on a node of a cluster (started by a Ray actor)"
    )
    keeper.add_argument("fd", type=int, help="socket that brings its orders")
    for name in ("node", "address", "label"):
        keeper.add_argument(name)
    bridge = roles.add_parser(
        "bridge", help="be a driver of a Ray cluster (started by a host or an executor)"
    )
    bridge.add_argument("fd", type=int, help="socket that brings its orders")
    bridge.add_argument("name")
    bridge.add_argument("address", nargs="?")
    bridge.add_argument(
        "--run-dir",
        help="run directory of the engine whose host started this, to be removed when the host is gone",
    )
    arguments = parser.parse_args()
    # An interrupt is meant for the notebook, not for its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lose_what_cannot_be_written()
    faulthandler.enable()
    raise_file_limit()
    write_stacks_on_signal()
    try:
        return _run(arguments)
    except ProtocolMismatchError as error:
        # Clients show the end of the log, so the error must be there.
        print(error, file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.role == "host":
        return _host(arguments.run_dir)
    if arguments.role == "spare-host":
        return _spare_host()
    if arguments.role == "spare-core":
        _spare_core()
    if arguments.role == "keeper":
        return _keeper(arguments)
    if arguments.role == "bridge":
        _bridge(arguments)
    if arguments.role == "worker":
        _worker(arguments.fd)
    _core(arguments.run_dir, arguments.rank)


def _host(run_dir: str, spare: SpareProcess | None = None) -> int:
    # Imported only now: no other process of an engine needs it.
    from nbengine.engine.host.main import run_host

    note_place(run_dir)
    info = read_engine_file(run_dir)
    setproctitle.setproctitle(f"nbengine: host {info.name}")
    configure_logging("host")
    return run_host(info, spare)


def _spare_host() -> int:
    from nbengine.engine.spare import wait_as_host

    ordered = wait_as_host()
    if ordered is None:
        return 0
    order, spare = ordered
    return _host(order.run_dir, spare)


def _core(run_dir: str, rank: int) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    info = _as_core(run_dir, rank)
    line = int(os.environ[HOST_FD_VARIABLE])
    # The host wrote the secret before it started this process; a host of another version writes none.
    ready = select.poll()
    ready.register(line, select.POLLIN)
    secret = os.read(line, SECRET_BYTES) if ready.poll(0) else b""
    lifeline = Lifeline(line, lambda: remove_core_files(info))
    lifeline.start()
    _run_core(info, rank, lifeline, secret)


def _spare_core() -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    line = int(os.environ[HOST_FD_VARIABLE])
    info: ConnectionInfo | None = None

    def clean_up() -> None:
        if info is not None:
            remove_core_files(info)

    lifeline = Lifeline(line, clean_up)
    lifeline.start()
    from nbengine.engine.spare import wait_as_core

    order = wait_as_core(line)
    if order is None:
        _exit(0)
    info = _as_core(order.run_dir, order.rank)
    _run_core(info, order.rank, lifeline, order.secret)


def _as_core(run_dir: str, rank: int) -> ConnectionInfo:
    """Make this process known as an engine core, and return its engine."""
    note_place(run_dir)
    info = read_engine_file(run_dir)
    setproctitle.setproctitle(f"nbengine: core {rank} {info.name}")
    configure_logging(f"core {rank}")
    return info


def _run_core(info: ConnectionInfo, rank: int, lifeline: Lifeline, secret: bytes) -> NoReturn:
    # Imported only now: torch takes seconds, and by now the lifeline watches the host.
    from nbengine.engine.core.main import run_engine_core

    status = run_engine_core(info, rank, lifeline, secret)
    if lifeline.parent_is_gone():
        # The host may have ended since the core looked last: then nobody else removes the files.
        remove_core_files(info)
    _exit(status)


def _worker(fd: int) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(fd)
    try:
        order: NurseryOrder | WorkerSpec = connection.recv()
    except EOFError:
        # The executor's process has ended in the meantime.
        _exit(1)
    if isinstance(order, NurseryOrder):
        configure_logging("workers")
        _worker(be_nursery(order, connection, _remover_of(order.directories)))
    spec = order
    setproctitle.setproctitle(f"nbengine: worker {spec.layout} {spec.files.engine}")
    configure_logging(f"worker {spec.rank}")
    clean_up = _remover_of(spec.own_directories)
    lifeline = Lifeline(fd, clean_up)
    lifeline.start()
    from nbengine.executor.worker_proc import EXECUTOR_GONE, run_worker

    status = run_worker(spec, connection)
    # A process that has several threads can be known to have ended a moment before its line ends.
    if status == EXECUTOR_GONE or lifeline.parent_is_gone():
        clean_up()
    _exit(status)


def _remover_of(directories: EngineDirectories | None) -> Callable[[], None]:
    if directories is None:
        return lambda: None
    note_place(directories.run_dir)
    return directories.remove


def _keeper(arguments: argparse.Namespace) -> int:
    from nbengine.cluster.keeper import run_keeper

    setproctitle.setproctitle(f"nbengine: keeper {arguments.label}")
    return run_keeper(arguments.fd, arguments.node, arguments.address, arguments.label)


def _bridge(arguments: argparse.Namespace) -> NoReturn:
    setproctitle.setproctitle(f"nbengine: bridge {arguments.name}")
    configure_logging("bridge")
    # Ray imports jsonschema, which does without this where it is not installed: where it is, as beside Jupyter,
    # each import builds the grammar of international addresses, a second of computing.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    with imports_that_stay():
        from nbengine.cluster.bridge import run_bridge

    def clean_up() -> None:
        # A host that was killed has removed nothing, and its engine cores may be on other machines.
        if info is not None:
            remove_engine_files(info)

    info = None
    if arguments.run_dir is not None:
        note_place(arguments.run_dir)
        info = read_engine_file(arguments.run_dir)
    run_bridge(arguments.fd, arguments.address, arguments.name, clean_up)
    _exit(0)


def _exit(status: int) -> NoReturn:
    # Everything of this engine is closed. An interpreter's exit would only tear down large libraries, which
    # takes time, can wait for their threads, and ends the log with their complaints.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    finish_removals()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
