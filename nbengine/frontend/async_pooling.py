"""The calls of `AsyncLLM` that give vectors and classes instead of text."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator

import msgspec

from nbengine.client.async_mp import AsyncMPClient
from nbengine.errors import InvalidTypeError, NBEngineError
from nbengine.frontend.async_requests import AsyncRequests
from nbengine.frontend.held_back import HeldBack
from nbengine.frontend.outputs.pooling_state import PoolingFuture
from nbengine.frontend.requests.beside_loop import beside_loop
from nbengine.frontend.requests.input_processor import InputProcessor, PromptType, prompt_text
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.pooling_outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    as_embedding,
)
from nbengine.sampling_params import PoolingParams


class AsyncPooling:
    """The base of `AsyncLLM`, which sets its attributes when the engine is ready."""

    engine_core: AsyncMPClient
    input_processor: InputProcessor
    _requests: AsyncRequests
    _request_counter: Iterator[int]
    _held_back: HeldBack

    @abstractmethod
    def abort_soon(self, request_id: str) -> None:
        """Have a request ended; safe on any thread."""

    def submit_pooling(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> PoolingFuture:
        """Send a pooling request and return the future of its outcome. Safe on any thread; does not wait.

        Cancelling the future aborts the request. Arguments and errors are those of `submit`; `pooling_params`
        None asks for the model's first pooling task.
        """
        return self._send_pooling(
            prompt, self._prepare_pooling(prompt, pooling_params, request_id, priority=priority)
        )

    def _prepare_pooling(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None,
        request_id: str | None,
        *,
        priority: int = 0,
    ) -> EngineCoreRequest:
        """Make a pooling request of which nobody has heard yet."""
        self.engine_core.check_alive()
        if request_id is None:
            request_id = str(next(self._request_counter))
        params = _checked_params(pooling_params)
        request = self.input_processor.process_inputs(request_id, prompt, params, priority=priority)
        self.input_processor.assign_request_id(request)
        return request

    def _send_pooling(self, prompt: PromptType, request: EngineCoreRequest) -> PoolingFuture:
        future: PoolingFuture = PoolingFuture()
        self.engine_core.loop_thread.call_soon(
            self._requests.add_pooling, request, prompt_text(prompt), future
        )
        engine_request_id = request.request_id
        future.add_done_callback(
            lambda done: self.abort_soon(engine_request_id) if done.cancelled() else None
        )
        return future

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the one output of a pooling request; arguments and errors are those of `submit_pooling`.

        Cancelling the task that waits for it aborts the request.

        Raises:
            RequestError: the engine refused this request, or it was aborted.
            EngineDeadError: the engine ended; the message has the reason and the end of its log.
        """
        request = await beside_loop(
            prompt, lambda: self._prepare_pooling(prompt, pooling_params, request_id, priority=priority)
        )
        question = self._held_back.ask_later()
        try:
            output = await asyncio.wrap_future(self._send_pooling(prompt, request))
        finally:
            question.cancel()
        yield output

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """Make a vector of a prompt; arguments and errors are those of `encode`."""
        params = msgspec.structs.replace(_checked_params(pooling_params), task="embed")
        async for output in self.encode(prompt, params, request_id, priority=priority):
            return as_embedding(output)
        raise NBEngineError("a pooling request has ended without an output")


def _checked_params(pooling_params: PoolingParams | None) -> PoolingParams:
    if pooling_params is None:
        return PoolingParams()
    if not isinstance(pooling_params, PoolingParams):
        raise InvalidTypeError("pooling_params", pooling_params, "PoolingParams")
    return pooling_params
