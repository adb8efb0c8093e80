"""UNIX sockets that nobody can connect to while this process has no descriptors to spare.

libzmq ends the whole process when it cannot accept a connection to a UNIX socket because there is no
descriptor left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

from nbengine.ipc.shortage import check_room, is_shortage
from nbengine.ipc.sockets import IPC_PREFIX

logger = logging.getLogger(__name__)

_SHUT = ".shut"


class Doorkeeper:
    """A keeper that takes the names of bound `ipc://` sockets away in a shortage,
    and puts them back after it.

    A process that wants to connect finds no file, and tries again every tenth of a second. Existing
    connections are not touched. TCP needs none of this: libzmq leaves a connection that it cannot accept
    where it is.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._paths = [a.removeprefix(IPC_PREFIX) for a in addresses if a.startswith(IPC_PREFIX)]
        self._is_open = True

    def look(self) -> bool:
        """Shut or open the sockets, depending on the descriptors that are left;
        return whether they are open."""
        if not self._paths:
            return True
        try:
            check_room()
        except OSError as error:
            if not is_shortage(error):
                raise
            if self._is_open:
                logger.warning("nobody can connect to this process for a while: %s", error)
            self._turn(open_now=False)
        else:
            self._turn(open_now=True)
        return self._is_open

    def close(self) -> None:
        """Put the names back, for the process that removes the files."""
        self._turn(open_now=True)

    def _turn(self, *, open_now: bool) -> None:
        if open_now is self._is_open:
            return
        self._is_open = open_now
        for path in self._paths:
            names = (path + _SHUT, path) if open_now else (path, path + _SHUT)
            # The engine, or this client's place in it, may have been removed.
            with contextlib.suppress(FileNotFoundError):
                os.rename(*names)
