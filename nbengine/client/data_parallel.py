"""The two clients of `AsyncLLM`: one balances the load between the engine cores,
the other leaves that to its users."""

from __future__ import annotations

from nbengine.client.async_mp import AsyncMPClient
from nbengine.client.threads.loop_thread import LoopThread
from nbengine.runtime.connection import ConnectionInfo


class DPLBAsyncMPClient(AsyncMPClient):
    """The client that balances the load itself: see `LoadBalancer`.

    It serves one engine core, too: others may be added while the client is attached (`scale`). With a single
    rank, balancing costs the entry in the map of requests in flight, and no statistics are followed.
    """


class DPAsyncMPClient(AsyncMPClient):
    """The client that sends all requests to one rank:
    the program that makes a client for every rank balances the load."""

    def __init__(
        self,
        info: ConnectionInfo,
        loop_thread: LoopThread,
        data_parallel_rank: int,
        *,
        session: str | None = None,
    ) -> None:
        super().__init__(info, loop_thread, session=session, data_parallel_rank=data_parallel_rank)
