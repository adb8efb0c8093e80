"""The start of a server for a running engine, in a process of its own, and its end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import msgspec

from nbengine.client.engines.command import host_environment
from nbengine.client.engines.processes import wait_until
from nbengine.errors import EngineStartError, NBEngineError, NotSupportedError
from nbengine.ipc.liveness import is_alive, send_signal
from nbengine.runtime.connection import ConnectionInfo, log_dir
from nbengine.runtime.logs import log_tail
from nbengine.runtime.processes import describe_status, end_signals_held
from nbengine.server.records import ServerOrder, ServerRecord, StartFailure
from nbengine.server.settings import ServerSettings

START_TIMEOUT = 60.0
"""Seconds in which a server must answer: it loads a tokenizer."""
KILL_GRACE = 5.0
"""Seconds beyond its drain timeout that a server gets to end."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""The servers that this process has started, by pid."""


def check_installed() -> None:
    """Raise `NotSupportedError` if the packages of the extra `server` are not here."""
    import importlib.util

    missing = [
        name
        for name in ("prometheus_client", "starlette", "uvicorn")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise NotSupportedError(f"a server needs {' and '.join(missing)}: pip install 'nbengine[server]'")


def start_server(
    info: ConnectionInfo,
    settings: ServerSettings,
    *,
    connection: str | Path | None = None,
    timeout: float = START_TIMEOUT,
) -> ServerRecord:
    """Start a server for a running engine, and wait until it answers.

    It is a client of the engine like others, and ends with it. It outlives this process.

    Args:
        info: the engine.
        settings: where the server listens, and for whom; keys go through a pipe, and are seen nowhere.
        connection: the engine's connection file, where it is not found by the engine's name.

    Raises:
        NotSupportedError: the packages that it needs are not installed.
        EngineStartError: it did not start; the message has the reason.
    """
    check_installed()
    reap_servers()
    reader, writer = os.pipe()
    log_path = _new_log(info.name)
    try:
        order = ServerOrder(info.name, str(connection or info.name), settings, writer)
        child = _spawn(order, log_path)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    _children[child.pid] = child
    try:
        news = _news_of(reader, timeout)
    except BaseException:
        child.kill()
        child.wait()
        del _children[child.pid]
        raise
    finally:
        os.close(reader)
    if isinstance(news, ServerRecord):
        return news
    if news is None and child.poll() is None:
        child.kill()
    how = describe_status(child.wait())
    del _children[child.pid]
    reason = f"the server's process {how}" if news is None else news.message
    raise EngineStartError(reason, "" if news else log_tail(log_path))


def stop_server(record: ServerRecord, *, drain_timeout: float = 30.0) -> None:
    """End a server, after the requests that it is answering, and wait until it is gone."""
    send_signal(record.process, signal.SIGTERM)
    if not wait_until(lambda: not is_alive(record.process), drain_timeout + KILL_GRACE):
        send_signal(record.process, signal.SIGKILL)
        if not wait_until(lambda: not is_alive(record.process), KILL_GRACE):
            raise NBEngineError(f"the server (pid {record.pid}) does not end")
    child = _children.pop(record.pid, None)
    if child is not None:
        # It has ended, and must not stay a zombie.
        child.wait()


def reap_servers() -> None:
    """Take note of the end of every server of this process that has ended."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def _spawn(order: ServerOrder, log_path: Path) -> subprocess.Popen[bytes]:
    with open(log_path, "ab") as log, end_signals_held():
        try:
            child = subprocess.Popen(
                # -P: a file beside the notebook must not shadow a module of ours.
                [sys.executable, "-P", "-m", "nbengine.server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=host_environment(),
                start_new_session=True,
                close_fds=True,
                pass_fds=(order.ready_fd,),
            )
        except OSError as error:
            raise EngineStartError(f"the server's process cannot be started: {error}") from error
    assert child.stdin is not None
    try:
        with child.stdin as pipe:
            pipe.write(msgspec.json.encode(order))
    except BrokenPipeError:
        # It has ended already; its status and its log say why.
        pass
    return child


def _news_of(reader: int, timeout: float) -> ServerRecord | StartFailure | None:
    """Wait for what a server tells; None: it has ended without a word.

    Raises:
        EngineStartError: it says nothing within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    told = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(reader, 1 << 16)
            if not part:
                return msgspec.json.decode(told, type=ServerRecord | StartFailure) if told else None
            told += part
    raise EngineStartError(f"the server does not answer after {timeout:g} s")


def _new_log(engine: str) -> Path:
    path = log_dir() / f"{engine}.server-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path
