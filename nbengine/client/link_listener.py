"""What a client hears of its engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError
from nbengine.ipc.control_messages import EngineLost, EngineReady, Progress, Scaled


class LinkListener(Protocol):
    """What a `HostLink` tells its client. Called on the link's thread; must not block."""

    def on_attached(self, client_index: int, engine_ranks: list[int], tensor_dir: str) -> None:
        """A lease is held; the engines will connect to the client's sockets, and take tensors in `tensor_dir`."""

    def on_progress(self, progress: Progress) -> None:
        """The start makes progress."""

    def on_ready(self, ready: EngineReady) -> None:
        """An engine core is ready, at the start or later."""

    def on_ranks_changed(self, engine_ranks: list[int]) -> None:
        """Requests may be sent to these engine cores, and to no others."""

    def on_engine_lost(self, lost: EngineLost) -> None:
        """One engine core of several has ended; `on_ranks_changed` has come before."""

    def on_scaled(self, future: Future[int], answer: Scaled) -> None:
        """What was asked for by `HostLink.scale` is done, or has failed: `future` is to be told."""

    def on_lease_lost(self, error: LeaseExpiredError) -> None:
        """What was asked for is gone; the link is attaching anew."""

    def on_dead(self, error: EngineStartError | EngineDeadError) -> None:
        """The engine has ended; nothing more will come."""
