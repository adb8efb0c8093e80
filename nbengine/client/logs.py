"""Reading an engine's log file, which outlives the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from nbengine.client.connection import ConnectionInfo, connection_file, log_dir, read_connection
from nbengine.errors import NBEngineError

FOLLOW_INTERVAL = 0.2


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


def follow_log(path: Path, info: ConnectionInfo | None) -> Iterator[str]:
    """Yield what is appended to a log from now on, until the engine has ended."""
    with path.open(errors="replace") as file:
        file.seek(0, 2)
        while True:
            alive = info is not None and info.host_alive
            text = file.read()
            if text:
                yield text
            elif not alive:
                return
            else:
                time.sleep(FOLLOW_INTERVAL)
