"""The unfinished requests of an `AsyncLLM`, on the loop thread, which hand outputs and errors to their
readers."""

from __future__ import annotations

import logging

from nbengine.client.async_mp import AsyncMPClient
from nbengine.errors import NBEngineError
from nbengine.frontend.observability.request_watch import RequestWatch
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.outputs.pooling_state import PoolingFuture
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.requests.continuation import Continuation
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)


class AsyncRequests:
    """The unfinished requests, on the loop thread. They know nothing of the `AsyncLLM`, which can therefore
    be dropped."""

    def __init__(self, client: AsyncMPClient, output_processor: OutputProcessor) -> None:
        self._client = client
        self._output_processor = output_processor

    @property
    def watch(self) -> RequestWatch:
        """Return the observers of the requests."""
        return self._output_processor.watch

    def add(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        collector: RequestOutputCollector,
        continuation: Continuation | None = None,
        answer: AnswerReading | None = None,
    ) -> None:
        """Register a request and send it."""
        try:
            self._client.check_alive()
            to_send = self._output_processor.add_request(request, prompt, collector, continuation, answer)
        except NBEngineError as error:
            collector.put_error(error)
            return
        try:
            for part in to_send:
                self._client.add_request(part)
        except NBEngineError as error:
            self._client.abort_requests(self._output_processor.discard_request(request.request_id))
            collector.put_error(error)

    def add_pooling(self, request: EngineCoreRequest, prompt: str | None, future: PoolingFuture) -> None:
        """Register a pooling request and send it, unless it has been cancelled already."""
        if future.cancelled():
            return
        try:
            self._client.check_alive()
            self._output_processor.pooling.add(request, prompt, future)
            self._client.add_request(request)
        except NBEngineError as error:
            self._client.abort_requests(self._output_processor.pooling.discard(request.request_id))
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Process a batch of outputs; a failure here, which would be a bug, ends the requests instead of
        stalling them."""
        try:
            if outputs.prompts_read:
                self._output_processor.process_prompts_read(outputs.prompts_read)
            processed = self._output_processor.process_outputs(outputs.outputs, outputs.engine_index)
        except Exception as error:
            logger.exception("outputs of the engine cannot be processed")
            self._client.abort_requests(self._output_processor.unfinished_ids())
            failure = NBEngineError(f"outputs of the engine cannot be processed: {error!r}")
            failure.__cause__ = error
            self._output_processor.fail_requests(failure)
            return
        if processed.reqs_to_abort:
            self._client.abort_requests(processed.reqs_to_abort, stopped=processed.stopped)
        # These have ended in the engine core without an output.
        if outputs.finished_requests:
            self._output_processor.abort_requests(outputs.finished_requests)

    def on_error(self, error: NBEngineError) -> None:
        """End all requests with an error."""
        self._output_processor.fail_requests(error)

    def abort_now(self, request_ids: list[str]) -> None:
        """End requests with what they have, and tell the engine."""
        self._client.abort_requests(self._output_processor.abort_requests(request_ids))

    async def abort(self, request_ids: list[str]) -> None:
        """Do what `abort_now` does, as a coroutine."""
        self.abort_now(request_ids)
