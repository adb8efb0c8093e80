"""Reading the log files of engines and their workers, which outlive them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from nbengine.client.connection import ConnectionInfo, connection_file, log_dir, read_connection
from nbengine.errors import InvalidArgumentError, NBEngineError

FOLLOW_INTERVAL = 0.2
_OF_WORKER = re.compile(r"(?P<engine>.+)\.rank(?P<rank>[0-9]+)\.log")
"""See `nbengine.engine.logs.worker_log_path`; no engine's log is called so, since those end with the time."""


def find_log(name: str) -> tuple[Path, ConnectionInfo | None]:
    """The log of the engine called `name`, else of the last one that was; with the connection if it has one.

    Raises:
        NBEngineError: no engine of that name has left a log.
    """
    if connection_file(name).is_file():
        info = read_connection(connection_file(name))
        return Path(info.log_path), info
    own = re.compile(re.escape(name) + r"-\d{8}-\d{6}-\d+\.log")
    logs = [path for path in log_dir().glob("*.log") if own.fullmatch(path.name)]
    if not logs:
        raise NBEngineError(f"no engine called {name!r} has left a log in {log_dir()}")
    return max(logs, key=lambda path: path.stat().st_mtime), None


def find_worker_log(log_path: str | Path, rank: int) -> Path:
    """The log of a worker of the engine whose log is `log_path`: that log itself if its only worker is in its core.

    Raises:
        InvalidArgumentError: there is no worker of this rank; the message lists those there are.
    """
    engine_log = Path(log_path)
    logs = _worker_logs(engine_log) or {0: engine_log}
    if rank not in logs:
        ranks = ", ".join(map(str, sorted(logs)))
        raise InvalidArgumentError("rank", rank, f"one of {ranks}" if len(logs) > 1 else ranks)
    return logs[rank]


def engine_log_of(path: Path) -> Path | None:
    """The engine's log that belongs to a worker's, None if `path` is not a worker's."""
    match = _OF_WORKER.fullmatch(path.name)
    return None if match is None else path.with_name(f"{match['engine']}.log")


def _worker_logs(engine_log: Path) -> dict[int, Path]:
    matches = (_OF_WORKER.fullmatch(path.name) for path in engine_log.parent.glob("*.log"))
    return {
        int(match["rank"]): engine_log.with_name(match[0])
        for match in matches
        if match is not None and match["engine"] == engine_log.stem
    }


def follow_log(path: Path, info: ConnectionInfo | None) -> Iterator[str]:
    """Yield what is appended to a log from now on, every `FOLLOW_INTERVAL` seconds, until the engine has ended."""
    with path.open(errors="replace") as file:
        file.seek(0, 2)
        while True:
            alive = info is not None and info.host_alive
            text = file.read()
            if text:
                yield text
            elif not alive:
                return
            time.sleep(FOLLOW_INTERVAL)
