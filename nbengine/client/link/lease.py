"""A client's lease on its engine: when to ask for one, under which name, and when a heartbeat is due."""

from __future__ import annotations

import math
import uuid

from nbengine.ipc.control_messages import Attach
from nbengine.ipc.liveness import ProcessIdentity, this_process
from nbengine.ipc.protocol import PROTOCOL
from nbengine.runtime.connection import ConnectionInfo

LONGEST_HEARTBEAT_INTERVAL = 5.0


class Lease:
    """A lease, which is asked for at once and kept with heartbeats. All times are of the monotonic clock.

    A lost lease (this process did not run for too long) is replaced by a new one under a new session name: if
    another process has taken the old name over, that process keeps it.

    Args:
        addresses: where engine cores connect for input and output.
        secret: the secret in the engine cores' identities at these addresses.
    """

    def __init__(self, info: ConnectionInfo, session: str, addresses: tuple[str, str], secret: bytes) -> None:
        self.heartbeat_interval = min(info.config.lease / 4, LONGEST_HEARTBEAT_INTERVAL)
        """Seconds between two heartbeats."""
        self.is_held = False
        self.ask_at = 0.0
        """The time at which to ask for the lease."""
        self.heartbeat_at = math.inf
        """The time of the next heartbeat."""
        self._session = session
        self._addresses = addresses
        self._secret = secret
        self._process = this_process() if info.is_here else ProcessIdentity(0, 0)
        self._client_index = 0

    @property
    def due(self) -> float:
        """Return the time at which something is to be done."""
        return min(self.ask_at, self.heartbeat_at)

    def request(self) -> Attach:
        """Return the message that asks for the lease."""
        self.ask_at = math.inf
        return Attach(
            self._session, self._process, *self._addresses, self._client_index, PROTOCOL, self._secret
        )

    def granted(self, client_index: int, now: float) -> None:
        """Take note of the host's answer."""
        self.is_held = True
        self._client_index = client_index
        self.heartbeat_at = now + self.heartbeat_interval

    def heartbeat(self, now: float) -> bool:
        """Return whether a heartbeat is to be sent now."""
        if now < self.heartbeat_at:
            return False
        self.heartbeat_at = now + self.heartbeat_interval
        return True

    def rest(self) -> None:
        """Send no more heartbeats: the engine ends."""
        self.heartbeat_at = math.inf

    def lost(self) -> None:
        """Take note that the lease is lost; ask for another one at once."""
        self.is_held = False
        self.heartbeat_at = math.inf
        self._session = f"{self._session.partition('#')[0]}#{uuid.uuid4().hex[:8]}"
        self.ask_at = 0.0
