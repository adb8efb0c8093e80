"""The log files of engines and their workers, which outlive them: this module finds and follows them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from nbengine.errors import InvalidArgumentError, NBEngineError, shown
from nbengine.ipc.private import is_private_directory, opened_own
from nbengine.runtime.connection import (
    ENGINE_NAME,
    LOG_DIR,
    ConnectionInfo,
    connection_file,
    log_dir,
    read_connection,
)
from nbengine.runtime.logs import log_tail

FOLLOW_INTERVAL = 0.2
_OF_WORKER = re.compile(r"(?P<engine>.+)\.rank(?P<rank>[0-9]+)\.log")
"""The name of a worker's log (`nbengine.runtime.logs.worker_log_path`); no engine's log has such a name,
since it ends with the time."""


def find_log(name: str) -> tuple[Path, ConnectionInfo | None]:
    """Find the log of the engine called `name`, or of the last one with that name,
    and its connection if it has one.

    Raises:
        NBEngineError: no engine of that name has left a log.
    """
    if not ENGINE_NAME.fullmatch(name):
        raise NBEngineError(f"no engine can be called {shown(name)}")
    if os.path.isfile(connection_file(name)):
        info = read_connection(connection_file(name))
        return log_of(info), info
    own = re.compile(re.escape(name) + r"-\d{8}-\d{6}-\d+\.log")
    logs = [path for path in log_dir().glob("*.log") if own.fullmatch(path.name)]
    if not logs:
        raise NBEngineError(f"no engine called {name!r} has left a log in {shown(log_dir())}")
    return max(logs, key=lambda path: path.stat(follow_symlinks=False).st_mtime), None


def log_of(info: ConnectionInfo) -> Path:
    """Return the log that a connection names.

    Raises:
        NBEngineError: the log is not in the directory of this user's logs: a connection may come from
            anywhere.
    """
    path = Path(info.log_path)
    try:
        is_log = path.parent.name == LOG_DIR and path.suffix == ".log"
        if is_log and is_private_directory(os.lstat(path.parent)):
            return path
    except (OSError, ValueError):
        pass
    raise NBEngineError(f"engine {info.name} has no log here: {shown(path)} is not in a directory of logs")


def last_words_of(info: ConnectionInfo) -> str:
    """Return the last lines of the log that a connection names; empty if the log is not here."""
    try:
        return log_tail(log_of(info))
    except NBEngineError:
        return ""


def find_worker_log(log_path: str | Path, rank: int) -> Path:
    """Find the log of a worker by its engine's log `log_path`,
    which is that log itself if the only worker is in its core.

    Raises:
        InvalidArgumentError: the engine has no worker of this rank; the message lists its ranks.
    """
    engine_log = Path(log_path)
    logs = _worker_logs(engine_log) or {0: engine_log}
    if rank not in logs:
        ranks = ", ".join(map(str, sorted(logs)))
        raise InvalidArgumentError("rank", rank, f"one of {ranks}" if len(logs) > 1 else ranks)
    return logs[rank]


def engine_log_of(path: Path) -> Path | None:
    """Return the engine's log that belongs to a worker's, None if `path` is not a worker's."""
    match = _OF_WORKER.fullmatch(path.name)
    return None if match is None else path.with_name(f"{match['engine']}.log")


def _worker_logs(engine_log: Path) -> dict[int, Path]:
    matches = (_OF_WORKER.fullmatch(path.name) for path in engine_log.parent.glob("*.log"))
    return {
        int(match["rank"]): engine_log.with_name(match[0])
        for match in matches
        if match is not None and match["engine"] == engine_log.stem
    }


def follow_log(path: Path, info: ConnectionInfo | None, start: int) -> Iterator[str]:
    """Yield what stands behind the first `start` bytes of a log, and what is appended, every
    `FOLLOW_INTERVAL` seconds, until the engine has ended.

    Raises:
        NBEngineError: the log is gone, or is not this user's.
    """
    try:
        with opened_own(path) as (descriptor, _), open(descriptor, errors="replace", closefd=False) as file:
            file.seek(start)
            while True:
                alive = info is not None and info.host_alive
                text = file.read()
                if text:
                    yield text
                elif not alive:
                    return
                time.sleep(FOLLOW_INTERVAL)
    except FileNotFoundError:
        raise NBEngineError(f"the log {shown(path)} is gone") from None
