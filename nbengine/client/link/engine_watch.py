"""A watch over an engine's processes from a client on the same machine,
with descriptors that are opened once."""

from __future__ import annotations

from collections.abc import Collection

from nbengine.ipc.liveness import ProcessIdentity, ProcessWatch, is_alive
from nbengine.runtime.connection import ConnectionInfo


class EngineWatch:
    """A watch over the host and the engine cores that it is told of.

    On another machine than the engine's it sees nothing.
    """

    def __init__(self, info: ConnectionInfo) -> None:
        self._cores: dict[int, ProcessWatch] = {}
        self._host = ProcessWatch(info.host) if info.is_here else None

    def host_gone(self) -> bool:
        """Return whether the host has ended."""
        return self._host is not None and self._host.gone()

    def signal_host(self, number: int) -> None:
        """Send a signal to the host, never to a later process with its pid;
        this has no effect when it has ended."""
        if self._host is not None:
            self._host.send_signal(number)

    def watch_core(self, rank: int, process: ProcessIdentity) -> None:
        """Watch a core's process from now on, in place of an earlier one;
        one that has ended already is not watched."""
        self._forget(rank)
        if is_alive(process):
            self._cores[rank] = ProcessWatch(process)

    def keep(self, ranks: Collection[int]) -> None:
        """Watch only these cores from now on."""
        for rank in self._cores.keys() - set(ranks):
            self._forget(rank)

    def core_gone(self) -> bool:
        """Return whether a watched core has ended."""
        return any(watch.gone() for watch in self._cores.values())

    def close(self) -> None:
        """Give the descriptors back."""
        for rank in list(self._cores):
            self._forget(rank)
        if self._host is not None:
            self._host.close()

    def __del__(self) -> None:
        self.close()

    def _forget(self, rank: int) -> None:
        watch = self._cores.pop(rank, None)
        if watch is not None:
            watch.close()
