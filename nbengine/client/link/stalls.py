"""The reports that a client has of processes of its engine that make no progress."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from nbengine.ipc.control_messages import EngineReady, Stalled
from nbengine.ipc.liveness import ProcessState, machine_id
from nbengine.ipc.process_state import what_holds
from nbengine.runtime.connection import ConnectionInfo

HOST_RANK = -1
"""The rank that stands for the host in reports: the host does not answer."""


class Stalls:
    """The processes that make no progress; written on the host link's thread, read on any."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, str]] = {}

    def note(self, stalled: Stalled) -> None:
        """Take note that a core or the host makes no progress."""
        self._since = {**self._since, stalled.rank: (time.monotonic() - stalled.seconds, stalled.doing)}

    def clear(self, rank: int | None = None) -> None:
        """Forget the report of a rank that goes on or is gone; None: of all of them."""
        self._since = {} if rank is None else {r: s for r, s in self._since.items() if r != rank}

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that make no progress."""
        return sorted(self._since)

    def describe(self, rank: int | None = None) -> str | None:
        """Describe the stalls in one line, as in "core 0: no progress for 42 s, in step 1,234";
        None if there are none.

        With `rank`, only that rank's stall counts.
        """
        now = time.monotonic()
        known = sorted(self._since.items())
        lines = [_line(r, now - since, doing) for r, (since, doing) in known if rank in (None, r)]
        return "; ".join(lines) or None


def _line(rank: int, seconds: float, doing: str) -> str:
    if rank == HOST_RANK:
        return f"host: no answer for {seconds:.0f} s, {doing}"
    return f"core {rank}: no progress for {seconds:.0f} s, {doing}"


def stopped_process(info: ConnectionInfo, ranks: Collection[int], cores: Iterable[EngineReady]) -> str | None:
    """Find a process of this machine that is stopped, the host or an engine core in `ranks`, and name it;
    None if none is."""
    if info.is_here and what_holds(info.host_pid) is ProcessState.STOPPED:
        return f"its host (pid {info.host_pid}) is stopped (SIGSTOP?)"
    for core in cores:
        is_here = core.machine in ("", machine_id())
        if core.rank in ranks and is_here and what_holds(core.pid) is ProcessState.STOPPED:
            return f"engine core {core.rank} (pid {core.pid}) is stopped (SIGSTOP?)"
    return None
