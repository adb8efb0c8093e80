"""The record that a host keeps in the connection file while the engine runs."""

from __future__ import annotations

import dataclasses
import logging

from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.shortage import is_shortage
from nbengine.runtime.connection import ConnectionInfo, write_connection

logger = logging.getLogger(__name__)


class ConnectionRecord:
    """A writer of the connection file, which writes it again at each change.

    Clients hear of a change from the host, too, so a file that cannot be written ends nothing; the log says
    it once until it can be written again.

    The methods return whether the file is written.

    Raises:
        OSError, NBEngineError: the file is not written for a shortage that may be over in a moment, as of
            file descriptors.
    """

    def __init__(self, info: ConnectionInfo) -> None:
        self._info = info
        self._is_current = True

    def note_ready(self, engines: list[EngineReady], size: int) -> bool:
        """Note the engine cores that take requests, and `size`, the number that there are or are to be."""
        info = self._info
        if engines != info.ready:
            blocks = (f"engine core {e.rank}: {e.num_blocks} blocks" for e in engines)
            logger.info("ready: %s", ", ".join(blocks))
        parallel = dataclasses.replace(info.config.parallel, data_parallel_size=size)
        info.config = dataclasses.replace(info.config, parallel=parallel)
        info.ready = engines
        return self._write()

    def note_stalled(self, ranks: list[int]) -> bool:
        """Note the engine cores that make no progress."""
        level = logging.WARNING if ranks else logging.INFO
        logger.log(level, "engine cores without progress: %s", ranks or "none")
        self._info.stalled = ranks
        return self._write()

    def _write(self) -> bool:
        try:
            write_connection(self._info)
        except (OSError, NBEngineError) as error:
            if is_shortage(error):
                raise
            if self._is_current:
                logger.warning("the connection file is not up to date, and is tried again: %s", error)
            self._is_current = False
        else:
            if not self._is_current:
                logger.info("the connection file is up to date again")
            self._is_current = True
        return self._is_current
