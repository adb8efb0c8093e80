"""The file of the run store: one SQLite file that several processes write and read.

Every call opens the file and closes it. So no connection is open when a process forks, a file that somebody has removed is
made again, and whatever has failed once may succeed the next time. A write is one transaction in SQLite's write-ahead
log, which a process that is killed cannot leave half done.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from nbengine.errors import NBEngineError, shown
from nbengine.frontend.runs.place import REMEDY, make_store_file
from nbengine.frontend.runs.schema import STEPS, Steps, bring_up_to_date
from nbengine.ipc.private import reason_of

Done = TypeVar("Done")

BUSY_SECONDS = 30.0
"""Seconds to wait for other processes that are writing."""
_RETRY_SECONDS = 0.02
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_READ_ONLY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


class StoreFile:
    """The file `path`, for what errors call `contents`; it is made when the first thing is kept. Safe on any thread."""

    def __init__(self, path: Path, contents: str, steps: Steps = STEPS) -> None:
        self.path = path
        self._contents = contents
        self._steps = steps

    def do(
        self,
        purpose: str,
        action: Callable[[sqlite3.Connection], Done],
        *,
        makes_file: bool = False,
        only_reads: bool = False,
    ) -> Done:
        """Carry out an action on the file, again where other processes are in the way; it ends with its commit.

        Raises:
            NBEngineError: it cannot be carried out; the message says that the contents cannot be `purpose`.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        mode = "mode=rw"
        while True:
            try:
                if makes_file:
                    make_store_file(self.path)
                with closing(self._connect(mode)) as connection:
                    bring_up_to_date(connection, self._steps)
                    return action(connection)
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in _BUSY and time.monotonic() < deadline:
                    time.sleep(_RETRY_SECONDS)
                elif only_reads and code in _READ_ONLY and mode == "mode=rw":
                    # The files beside the store, which readers share, cannot be made: then nobody writes, either.
                    mode = "mode=ro&immutable=1"
                else:
                    is_closed = code in _READ_ONLY and not os.access(self.path.parent, os.W_OK)
                    reason = "its directory cannot be written" if is_closed else str(error)
                    raise self._error(purpose, reason) from error
            except OSError as error:
                raise self._error(purpose, reason_of(error)) from error
            except NBEngineError as error:
                raise self._error(purpose, str(error)) from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}", timeout=BUSY_SECONDS, isolation_level=None, uri=True
        )
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _error(self, purpose: str, reason: str) -> NBEngineError:
        remedy = "" if reason.endswith(REMEDY) else f"; {REMEDY}"
        return NBEngineError(
            f"the {self._contents} in {shown(self.path)} cannot be {purpose}: {reason}{remedy}"
        )


def give_back(connection: sqlite3.Connection) -> None:
    """Give the room of what was removed back to the disk."""
    connection.execute("PRAGMA incremental_vacuum").fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
