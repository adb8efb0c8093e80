"""The standing of a client with its engine: it has a lease, has lost one for a while, or is at its end."""

from __future__ import annotations

import copy
import threading

from nbengine.errors import LeaseExpiredError, NBEngineError


class Standing:
    """The lease of a client, and the error that keeps it from its engine, if any does. It is safe on any
    thread."""

    def __init__(self) -> None:
        self.client_index = 0
        """The number of the lease, which marks the client's requests in the engine."""
        self.error: NBEngineError | None = None
        """The error that keeps the client from its engine."""
        self.is_dead = False
        """The engine has ended for this client, and `error` stays."""
        self._has_lease = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise the error that keeps the client from its engine, if any does."""
        # Read once: a lease that is renewed takes the error back.
        error = self.error
        if error is not None:
            # A copy: a raised error holds on to the caller's frames, and with them to the client's owner.
            raise copy.copy(error)

    def attached(self, client_index: int) -> None:
        """Take note of a lease; after a lost one, the client is usable when the cores have connected."""
        with self._lock:
            self.client_index, self._has_lease = client_index, True

    def connected(self, client_index: int) -> None:
        """Take note that all cores have connected under a lease: an error about a lost one is over."""
        # One look under the lock: an error that comes meanwhile must not be taken back.
        with self._lock:
            is_present = self._has_lease and client_index == self.client_index
            if is_present and isinstance(self.error, LeaseExpiredError):
                self.error = None

    def fail(self, error: NBEngineError, *, dead: bool) -> bool:
        """Take note of a lost lease or (`dead`) of the end; return False if the end was known before."""
        with self._lock:
            if self.is_dead:
                return False
            self.error, self.is_dead = error, dead
            self._has_lease = False
        return True
