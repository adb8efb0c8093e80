"""The clients of `AsyncLLM`, by who balances the load between the engine cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbengine.client.async_mp import AsyncMPClient
from nbengine.client.connection import ConnectionInfo

if TYPE_CHECKING:
    from nbengine.frontend.loop_thread import LoopThread


class DPLBAsyncMPClient(AsyncMPClient):
    """Balances the load itself: see `LoadBalancer`.

    With one engine core, too: others may be added while the client is attached (`scale`). Balancing between one rank
    costs the entry in the map of requests in flight, and no statistics are followed.
    """


class DPAsyncMPClient(AsyncMPClient):
    """All requests go to one rank: the load is balanced outside, by whoever makes a client for every rank."""

    def __init__(
        self,
        info: ConnectionInfo,
        loop_thread: LoopThread,
        data_parallel_rank: int,
        *,
        session: str | None = None,
    ) -> None:
        super().__init__(info, loop_thread, session=session, data_parallel_rank=data_parallel_rank)
