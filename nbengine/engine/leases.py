"""Who may use the engine: one lease per attached client, renewed by its heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbengine.ipc.control_messages import Attach

LIVENESS_INTERVAL = 0.5
"""Seconds between two looks at whether the clients' processes still run."""


@dataclass(slots=True)
class Lease:
    """An attached client. `identity` is its address on the host's ROUTER socket; `client_index` its epoch."""

    client_index: int
    identity: bytes
    session: str
    pid: int
    create_time: float
    input_address: str
    output_address: str
    last_seen: float


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that has just ended, and why. `final`: the client will not come back to its sockets."""

    lease: Lease
    reason: str
    final: bool


class LeaseTable:
    """All leases. `alive(pid, create_time)` tells whether a process runs; time is what the caller says it is.

    A client's epoch (`client_index`) starts at 1 and is never reused, so nothing that was meant for an older
    attachment can reach a newer one.
    """

    def __init__(self, duration: float, alive: Callable[[int, float], bool]) -> None:
        self._duration = duration
        self._alive = alive
        self._by_identity: dict[bytes, Lease] = {}
        self._next_index = 1
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
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
            pid=attach.pid,
            create_time=attach.create_time,
            input_address=attach.input_address,
            output_address=attach.output_address,
            last_seen=now,
        )
        self._next_index += 1
        self._by_identity[identity] = lease
        return lease, superseded

    def renew(self, identity: bytes, now: float) -> bool:
        """Note a sign of life; False if this client holds no lease."""
        lease = self._by_identity.get(identity)
        if lease is None:
            return False
        lease.last_seen = now
        return True

    def release(self, identity: bytes) -> EndedLease | None:
        """End a client's lease at its own wish."""
        lease = self._by_identity.get(identity)
        return None if lease is None else self._end(lease, "detached", final=True)

    def drop(self, client_index: int, reason: str) -> EndedLease | None:
        """End the lease with this epoch, if it is still held; the client may attach again."""
        for lease in self.leases:
            if lease.client_index == client_index:
                return self._end(lease, reason, final=False)
        return None

    def expire(self, now: float) -> list[EndedLease]:
        """End the leases that have lapsed and those whose process is gone."""
        ended = [
            self._end(lease, f"no heartbeat for {self._duration:g} s", final=False)
            for lease in self.leases
            if lease.last_seen + self._duration <= now
        ]
        if now >= self._next_look:
            self._next_look = now + LIVENESS_INTERVAL
            ended += [
                self._end(lease, f"process {lease.pid} is gone", final=True)
                for lease in self.leases
                if self._is_gone(lease)
            ]
        return ended

    def next_deadline(self) -> float | None:
        """When `expire` has to be called next, None while there are no leases."""
        if not self._by_identity:
            return None
        lapse = min(lease.last_seen for lease in self._by_identity.values()) + self._duration
        return min(lapse, self._next_look)

    def _is_gone(self, lease: Lease) -> bool:
        return lease.pid != 0 and not self._alive(lease.pid, lease.create_time)

    def _end(self, lease: Lease, reason: str, *, final: bool) -> EndedLease:
        del self._by_identity[lease.identity]
        return EndedLease(lease, reason, final)
