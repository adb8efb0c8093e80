"""The interface through which a client hears of its engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError
from nbengine.ipc.control_messages import EngineLost, EngineReady, Progress, Scaled, Stalled


class LinkListener(Protocol):
    """The client of a `HostLink`. Its methods are called on the link's thread, and must not block."""

    def on_attached(self, client_index: int, engine_ranks: list[int], tensor_dir: str) -> None:
        """Take in a new lease: the engine cores will connect to the client's sockets,
        and take tensors in `tensor_dir`."""

    def on_progress(self, progress: Progress) -> None:
        """Take in the progress of a start."""

    def on_ready(self, ready: EngineReady) -> None:
        """Take note of an engine core that is ready, at the start or later."""

    def on_ranks_changed(self, engine_ranks: list[int]) -> None:
        """Send requests to these engine cores, and to no others, from now on."""

    def on_engine_lost(self, lost: EngineLost) -> None:
        """Take note that one engine core of several has ended; `on_ranks_changed` has come before."""

    def on_scaled(self, future: Future[int], answer: Scaled) -> None:
        """Tell `future` that the call of `HostLink.scale` is done or has failed."""

    def on_stalled(self, stalled: Stalled) -> None:
        """Take note that an engine core makes no progress, or (`HOST_RANK`) that the host does not answer."""

    def on_recovered(self, rank: int) -> None:
        """Take note that the stall that `on_stalled` reported is over."""

    def on_lease_lost(self, error: LeaseExpiredError) -> None:
        """Fail the client's requests, which are gone; the link is attaching again."""

    def on_dead(self, error: EngineStartError | EngineDeadError) -> None:
        """Take note that the engine has ended; nothing more will come."""
