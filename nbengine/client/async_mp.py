"""The client of `AsyncLLM`: its sockets live on the shared loop thread."""

from __future__ import annotations

import logging
from typing import Protocol

from nbengine.client.mp import MPClient
from nbengine.client.threads.loop_thread import LoopThread
from nbengine.client.threads.shared_loop import SharedLoop
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.ipc.shortage import Setbacks
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)


class OutputHandler(Protocol):
    """The frontend's part that takes in outputs, called on the loop thread."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take in a batch of outputs."""

    def on_error(self, error: NBEngineError) -> None:
        """Fail all requests with `error`."""


class LoopOutputs:
    """An `OutputConsumer` that hands outputs and errors to `handler`, on the loop thread, as they come."""

    def __init__(self, loop_thread: LoopThread) -> None:
        self.handler: OutputHandler | None = None
        self._loop_thread = loop_thread

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Hand outputs over."""
        if self.handler is not None:
            self.handler.on_outputs(outputs)

    def on_error(self, error: NBEngineError, *, dead: bool, client_index: int) -> None:
        """Have an error handed over soon."""
        del dead, client_index
        self._loop_thread.call_if_open(self._hand_over, error)

    def _hand_over(self, error: NBEngineError) -> None:
        if self.handler is not None:
            self.handler.on_error(error)


class AsyncMPClient(MPClient):
    """The client of `AsyncLLM`: outputs go to `outputs.handler`, on the loop thread, as soon as they come.

    Requests and calls may come from any thread.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        loop_thread: LoopThread,
        *,
        session: str | None = None,
        owns_engine: bool = False,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.loop_thread = loop_thread
        self.outputs = LoopOutputs(loop_thread)
        super().__init__(
            info,
            SharedLoop(loop_thread, Setbacks(logger, f"the sockets of engine {info.name} falter")),
            self.outputs,
            session=session,
            owns_engine=owns_engine,
            data_parallel_rank=data_parallel_rank,
        )
