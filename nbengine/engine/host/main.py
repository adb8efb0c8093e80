"""The main function of the host process: its files, its `Supervisor`, and its last message."""

from __future__ import annotations

import logging

from nbengine.engine.host.supervisor import Supervisor
from nbengine.engine.start_log import log_beginning
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.ipc.control_messages import EngineDead
from nbengine.ipc.liveness import this_process
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    read_connection,
    remove_engine_files,
    start_error,
    write_connection,
    write_engine_file,
)
from nbengine.runtime.logs import describe_exception, log_tail
from nbengine.runtime.other_protocols import other_engine
from nbengine.runtime.spare import SpareProcess

logger = logging.getLogger(__name__)


def run_host(info: ConnectionInfo, spare: SpareProcess | None = None) -> int:
    """Run an engine's host to its end, and return the process's exit status.

    Args:
        info: the description that the launcher has written; the host fills in its own process.
        spare: a process that waits to be an engine core.
    """
    log_beginning(info.name, info.config.model)
    host = this_process()
    info.host_pid, info.host_started = host.pid, host.started
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(info, spare)
        write_files(info)
        notice = supervisor.run()
        if not (notice.expected or notice.explained or notice.log_tail):
            notice.log_tail = log_tail(info.log_path)
    except Exception as error:
        logger.exception("the host failed")
        cause = f"the host (pid {info.host_pid}) failed: {describe_exception(error)}"
        notice = EngineDead(cause, log_tail(info.log_path), started=bool(info.ready))
    if supervisor is not None:
        supervisor.close(notice)
    remove_engine_files(info)
    logger.info("ended: %s", notice.cause)
    return 0 if notice.expected else 1


def write_files(info: ConnectionInfo) -> None:
    """Write the files with which clients and engine cores find the host, before either is told of it.

    Raises:
        EngineStartError: a file cannot be written, or a living engine has the name.
    """
    try:
        claim_name(info)
        # Engine cores read the addresses of the host's sockets from it.
        write_engine_file(info)
    except OSError as error:
        raise start_error(error) from None


def claim_name(info: ConnectionInfo) -> None:
    """Write the connection file, unless a living engine has the same name.

    Raises:
        EngineStartError: a living engine has the name.
        OSError: the file cannot be written.
    """
    stranger = other_engine(connection_file(info.name))
    if stranger is not None and stranger.may_live:
        raise EngineStartError(f"an engine named {info.name!r} is running: {stranger.note}")
    try:
        other: ConnectionInfo | None = read_connection(connection_file(info.name))
    except NBEngineError:
        # There is no file, or one that nobody can use.
        other = None
    if other is not None and other.run_dir != info.run_dir and other.host_alive:
        raise EngineStartError(f"an engine named {info.name!r} is running (pid {other.host_pid})")
    write_connection(info)
