"""The leases that allow clients to use the engine, one per attached client.

A lease is renewed by the client's heartbeats and, if the client's process is on the host's machine, by every
look that finds the process running: a client that holds the interpreter for minutes, or is held by a
debugger, loses nothing. A client whose process is stopped, or is on another machine and silent, loses its
lease after the lease's duration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbengine.ipc.control_messages import Attach
from nbengine.ipc.liveness import ProcessIdentity, ProcessState

FIRST_CLIENT = 1
"""The epoch of the first client that an engine has."""
LIVENESS_INTERVAL = 0.5
"""Seconds between two looks at what the clients' processes do."""


@dataclass(slots=True)
class Lease:
    """An attached client. `identity` is its address on the host's ROUTER socket; `client_index` its epoch."""

    client_index: int
    identity: bytes
    session: str
    process: ProcessIdentity
    """The client's process; pid 0 if it is on another machine."""
    input_address: str
    output_address: str
    last_seen: float
    """Time at which the client was last heard of, or its process last seen running."""
    is_stopped: bool = False
    """True if the process was stopped at the last look."""
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that has just ended, and the reason. `final` means that the client will not come back to its
    sockets."""

    lease: Lease
    reason: str
    final: bool


class LeaseTable:
    """The table of all leases. `state_of` returns the state of a process; callers pass the time.

    A client's epoch (`client_index`) starts at 1 and is never reused, so nothing that was meant for an older
    attachment can reach a newer one.
    """

    def __init__(self, duration: float, state_of: Callable[[ProcessIdentity], ProcessState]) -> None:
        self._duration = duration
        self._state_of = state_of
        self._by_identity: dict[bytes, Lease] = {}
        self._next_index = FIRST_CLIENT
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def leases(self) -> list[Lease]:
        """Return all leases, the oldest first."""
        return list(self._by_identity.values())

    def grant(self, attach: Attach, identity: bytes, now: float) -> tuple[Lease, list[EndedLease]]:
        """Open a lease; an older one of the same session, connection or client ends."""
        superseded = [
            self._end(lease, f"session {attach.session!r} attached again", final=self._is_gone(lease))
            for lease in self.leases
            if lease.session == attach.session
            or lease.identity == identity
            or lease.client_index == attach.replaces
        ]
        lease = Lease(
            client_index=self._next_index,
            identity=identity,
            session=attach.session,
            process=attach.process,
            input_address=attach.input_address,
            output_address=attach.output_address,
            last_seen=now,
            secret=attach.secret,
        )
        self._next_index += 1
        self._by_identity[identity] = lease
        return lease, superseded

    def renew(self, identity: bytes, now: float) -> bool:
        """Note a sign of life of a client; return False if it holds no lease."""
        lease = self._by_identity.get(identity)
        if lease is None:
            return False
        lease.last_seen = now
        return True

    def release(self, identity: bytes) -> EndedLease | None:
        """End a client's lease at the client's wish."""
        lease = self._by_identity.get(identity)
        return None if lease is None else self._end(lease, "detached", final=True)

    def drop(self, client_index: int, reason: str) -> EndedLease | None:
        """End the lease with this epoch, if it is still held; the client may attach again."""
        for lease in self.leases:
            if lease.client_index == client_index:
                return self._end(lease, reason, final=False)
        return None

    def expire(self, now: float) -> list[EndedLease]:
        """End the leases whose process is gone and those that have lapsed."""
        ended = self._look(now) if now >= self._next_look else []
        for lease in self.leases:
            if lease.last_seen + self._duration <= now:
                why = f"; process {lease.process.pid} is stopped" if lease.is_stopped else ""
                reason = f"no heartbeat for {self._duration:g} s{why}"
                ended.append(self._end(lease, reason, final=False))
        return ended

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` has to be called next, None while there are no leases."""
        if not self._by_identity:
            return None
        lapse = min(lease.last_seen for lease in self._by_identity.values()) + self._duration
        return min(lapse, self._next_look)

    def _look(self, now: float) -> list[EndedLease]:
        # While the host did not get to look, it did not read heartbeats either, so that time does not count.
        missed = now - self._next_look
        self._next_look = now + LIVENESS_INTERVAL
        ended = []
        for lease in self.leases:
            if missed > LIVENESS_INTERVAL:
                lease.last_seen = min(now, lease.last_seen + missed)
            # Of a client on another machine only heartbeats can be seen.
            if lease.process.pid == 0:
                continue
            state = self._state_of(lease.process)
            lease.is_stopped = state is ProcessState.STOPPED
            if state is ProcessState.GONE:
                ended.append(self._end(lease, f"process {lease.process.pid} is gone", final=True))
            # A process that runs keeps its lease, also while it is too busy to send heartbeats.
            elif not lease.is_stopped:
                lease.last_seen = now
        return ended

    def _is_gone(self, lease: Lease) -> bool:
        return lease.process.pid != 0 and self._state_of(lease.process) is ProcessState.GONE

    def _end(self, lease: Lease, reason: str, *, final: bool) -> EndedLease:
        del self._by_identity[lease.identity]
        return EndedLease(lease, reason, final)
