"""Entry of the engine's processes: `python -m nbengine.engine host RUN_DIR`, `… core RUN_DIR RANK`, `… worker FD`."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import setproctitle

from nbengine.client.connection import engine_file, read_connection, remove_core_files, remove_engine_files
from nbengine.engine.lifeline import Lifeline
from nbengine.engine.logs import configure_logging
from nbengine.engine.processes import HOST_FD_VARIABLE
from nbengine.engine.supervisor import run_host

if TYPE_CHECKING:
    from nbengine.executor.worker_proc import WorkerSpec


def main() -> int:
    """Run the process that the command line names, and return its exit status."""
    parser = argparse.ArgumentParser(prog="nbengine.engine", description="The processes of an engine.")
    roles = parser.add_subparsers(dest="role", required=True)
    host = roles.add_parser("host", help="start an engine's cores and look after them")
    core = roles.add_parser("core", help="run one engine core (started by the host)")
    for role in (host, core):
        role.add_argument("run_dir")
    core.add_argument("rank", type=int)
    worker = roles.add_parser("worker", help="run one worker (started by an executor)")
    worker.add_argument("fd", type=int, help="socket that says what to do")
    keeper = roles.add_parser(
        "keeper", help="keep one process on a node of a cluster (started by a Ray actor)"
    )
    keeper.add_argument("fd", type=int, help="socket that says what to do")
    for name in ("node", "address", "label"):
        keeper.add_argument(name)
    bridge = roles.add_parser(
        "bridge", help="be a driver of a Ray cluster (started by a host or an executor)"
    )
    bridge.add_argument("fd", type=int, help="socket that says what to do")
    bridge.add_argument("name")
    bridge.add_argument("address", nargs="?")
    bridge.add_argument(
        "--run-dir", help="of the engine whose host the owner is, to be removed when that is gone"
    )
    arguments = parser.parse_args()
    # An interrupt of the notebook is no business of its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if arguments.role == "host":
        return _host(arguments.run_dir)
    if arguments.role == "keeper":
        return _keeper(arguments)
    if arguments.role == "bridge":
        _bridge(arguments)
    if arguments.role == "worker":
        _worker(arguments.fd)
    _core(arguments.run_dir, arguments.rank)


def _host(run_dir: str) -> int:
    info = read_connection(engine_file(run_dir))
    setproctitle.setproctitle(f"nbengine: host {info.name}")
    configure_logging("host")
    return run_host(info)


def _core(run_dir: str, rank: int) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    info = read_connection(engine_file(run_dir))
    setproctitle.setproctitle(f"nbengine: core {rank} {info.name}")
    configure_logging(f"core {rank}")
    lifeline = Lifeline(int(os.environ[HOST_FD_VARIABLE]), lambda: remove_core_files(info))
    lifeline.start()
    # Only now what takes seconds: it imports torch.
    from nbengine.engine.core_main import run_engine_core

    _exit(run_engine_core(info, rank, lifeline))


def _worker(fd: int) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(fd)
    try:
        spec: WorkerSpec = connection.recv()
    except EOFError:
        # The executor's process has ended meanwhile.
        _exit(1)
    setproctitle.setproctitle(f"nbengine: worker {spec.layout} {spec.files.engine}")
    configure_logging(f"worker {spec.rank}")
    lifeline = Lifeline(fd, spec.own_directories.remove)
    lifeline.start()
    from nbengine.executor.worker_proc import run_worker

    status = run_worker(spec, connection)
    if lifeline.parent_is_gone():
        spec.own_directories.remove()
    _exit(status)


def _keeper(arguments: argparse.Namespace) -> int:
    from nbengine.cluster.keeper import run_keeper

    setproctitle.setproctitle(f"nbengine: keeper {arguments.label}")
    return run_keeper(arguments.fd, arguments.node, arguments.address, arguments.label)


def _bridge(arguments: argparse.Namespace) -> NoReturn:
    setproctitle.setproctitle(f"nbengine: bridge {arguments.name}")
    configure_logging("bridge")
    from nbengine.cluster.bridge import run_bridge

    def clean_up() -> None:
        # A host that was killed has removed nothing, and its engine cores may be elsewhere.
        if info is not None:
            remove_engine_files(info)

    info = None if arguments.run_dir is None else read_connection(engine_file(arguments.run_dir))
    run_bridge(arguments.fd, arguments.address, arguments.name, clean_up)
    _exit(0)


def _exit(status: int) -> NoReturn:
    # All of ours is closed. What an interpreter's exit would add is the teardown of large libraries, which takes
    # time, can wait for their threads, and ends the log with their complaints.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
