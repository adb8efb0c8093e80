"""The streaming frontend: works from any thread and any event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Unpack, cast

import msgspec

from nbengine.client.async_mp import AsyncMPClient
from nbengine.client.base import EngineCoreClient
from nbengine.client.connection import ConnectionInfo
from nbengine.client.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from nbengine.client.directory import find_engine
from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.assembly import assemble, resolve_files
from nbengine.frontend.async_requests import AsyncRequests
from nbengine.frontend.control import AsyncControl, Control, ControlOf
from nbengine.frontend.input_processor import PromptType, prompt_text
from nbengine.frontend.inspection import Inspection
from nbengine.frontend.loop_thread import LoopThread
from nbengine.frontend.options import EngineOptions, with_engine_options
from nbengine.frontend.output_collector import RequestOutputCollector
from nbengine.frontend.pooling_state import PoolingFuture
from nbengine.frontend.prompting import Prompting
from nbengine.frontend.transcripts import Transcripts, mark
from nbengine.ipc.control_messages import EngineReady
from nbengine.metrics.stats import EngineStats
from nbengine.models.progress import ProgressCallback
from nbengine.outputs import RequestOutput
from nbengine.pooling_outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    as_embedding,
)
from nbengine.sampling_params import PoolingParams, SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM(Prompting, AsyncControl, Inspection, Transcripts):
    """An engine whose outputs are streamed; many requests at once, from any thread or event loop.

    All its sockets live on one daemon thread. The constructor blocks until the engine takes requests.

    Args:
        model: a directory, a .gguf file, a hub id, or an alias such as "smollm2-135m" or "random-tiny".
        name: of the engine, for `attach` and `nbengine ps`; after its model if None.
        bound: the engine ends with this process. Otherwise it outlives it by `keep_alive` seconds.
        session: name of this client across restarts of its process: attaching again under the same name ends
            what the earlier attachment had asked for, and finds its `transcripts`.
        progress: called with the stages of the start, on this thread except while a model is fetched.
        options: see `EngineArgs`.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files.
        EngineStartError: the engine did not start; the message has the reason and the end of its log.
        InvalidArgumentError, NotSupportedError: an argument; the message names it.
    """

    @with_engine_options
    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        name: str | None = None,
        bound: bool = True,
        session: str | None = None,
        progress: ProgressCallback | None = None,
        multiprocess: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        if not multiprocess:
            raise InvalidArgumentError("multiprocess", multiprocess, "True (LLM has engines in this process)")
        config = EngineArgs.from_kwargs({"model": model, **options}).create_engine_config(bound=bound)
        self._start(config, name, session, progress)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        name: str | None = None,
        bound: bool = True,
        session: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> AsyncLLM:
        """Build from the flat arguments; the others, and what is raised, are the constructor's."""
        llm = cls.__new__(cls)
        llm._start(engine_args.create_engine_config(bound=bound), name, session, progress)
        return llm

    @classmethod
    def attach(
        cls,
        name_or_file: str | Path,
        *,
        session: str | None = None,
        progress: ProgressCallback | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncLLM:
        """Become a client of a running engine, given by its name or its connection file.

        Args:
            data_parallel_rank: the engine core that gets all requests, for a load that is balanced outside; None
                balances it here.

        Raises:
            NBEngineError: there is no such engine.
            EngineStartError: it was still starting, and failed.
            InvalidArgumentError: it has no such engine core.
        """
        info, loop_thread = find_engine(name_or_file), LoopThread.shared()
        client: AsyncMPClient
        if data_parallel_rank is None:
            client = DPLBAsyncMPClient(info, loop_thread, session=session)
        else:
            client = DPAsyncMPClient(info, loop_thread, data_parallel_rank, session=session)
        llm = cls.__new__(cls)
        llm._set_up(client, progress)
        return llm

    def _start(
        self, config: EngineConfig, name: str | None, session: str | None, progress: ProgressCallback | None
    ) -> None:
        client = EngineCoreClient.make_async_mp_client(
            resolve_files(config, progress), LoopThread.shared(), name=name, session=session
        )
        self._set_up(client, progress)

    def _set_up(self, client: AsyncMPClient, progress: ProgressCallback | None) -> None:
        self.engine_core: AsyncMPClient = client
        # Ends or leaves the engine when nobody refers to this object any more, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, client.release)
        parts = assemble(client, progress)
        self.ready: EngineReady = parts.ready
        self._tokenizer = parts.tokenizer
        self.input_processor = parts.input_processor
        self._requests = AsyncRequests(client, parts.output_processor)
        client.output_handler = self._requests
        self._request_counter = itertools.count()

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.engine_core.info.name

    @property
    def connection(self) -> ConnectionInfo:
        """Where the engine lives."""
        return self.engine_core.info

    @property
    def session(self) -> str:
        """Name of this client across restarts of its process."""
        return self.engine_core.session

    @property
    def engine_ranks(self) -> list[int]:
        """The engine cores that a request may be meant for: they take requests now, or are being started again."""
        return list(self.engine_core.engine_ranks)

    def submit(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        written: Sequence[int] = (),
        transcript: str | None = None,
    ) -> RequestOutputCollector:
        """Send a request and return the collector of its outputs. Safe on any thread; does not wait.

        Args:
            prompt: a string, `{"prompt": str}`, `{"prompt_token_ids": [int]}` or `{"prompt_embeds": tensor}`, the
                dicts with `cache_salt` if wanted; a list of integers is a prompt's tokens.
            sampling_params: None takes `default_sampling_params()`.
            request_id: what the outputs carry and `abort` takes; a number if None.
            priority: lower goes first, with `scheduling_policy="priority"`.
            data_parallel_rank: the engine core that is to have it; None leaves the choice to the client. With a rank it
                goes nowhere else, whatever the load, and waits while that core is started again.
            written: the first tokens of the answer, where it goes on from its middle: they stand behind the prompt, and
                count for `max_tokens`, `min_tokens` and `stop`; penalties and words that are not wanted see only what
                comes now. The outputs have the tokens that follow, and a text that begins with that of `written`.
            transcript: have the engine keep the output for `transcripts`, beside this text: the prompt, for a reader.

        Raises:
            InvalidArgumentError, NotSupportedError: the request is not possible.
            EngineDeadError, LeaseExpiredError: the engine cannot be reached.
        """
        self.engine_core.check_alive()
        self.engine_core.check_rank(data_parallel_rank)
        if request_id is None:
            request_id = str(next(self._request_counter))
        if sampling_params is None:
            sampling_params = SamplingParams(**self.default_sampling_params())
        elif not isinstance(sampling_params, SamplingParams):
            raise InvalidTypeError("sampling_params", sampling_params, "SamplingParams")
        request = self.input_processor.process_inputs(
            request_id, prompt, sampling_params, priority=priority, data_parallel_rank=data_parallel_rank
        )
        continuation = self.input_processor.continue_answer(request, written) if written else None
        self.input_processor.assign_request_id(request)
        if transcript is not None:
            request.transcript = mark(request, self.session, transcript, len(written))
        collector = RequestOutputCollector(sampling_params.output_kind, request_id, request.request_id)
        self.engine_core.loop_thread.call_soon(
            self._requests.add, request, prompt_text(prompt), collector, continuation
        )
        return collector

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        transcript: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs, as `sampling_params.output_kind` says; arguments and errors of `submit`.

        Closing the generator or cancelling its task aborts the request.

        Raises:
            RequestError: the engine refused this request.
            RequestLostError: the engine core that worked on it ended, and the engine goes on with others.
            EngineDeadError: the engine ended; the message has the reason and the end of its log.
        """
        collector = self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            transcript=transcript,
        )
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort_soon(collector.engine_request_id)

    def submit_pooling(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> PoolingFuture:
        """Send a pooling request and return the future of its outcome. Safe on any thread; does not wait.

        Cancelling the future aborts the request. Arguments and errors as of `submit`; `pooling_params` None asks for
        the model's first pooling task.
        """
        self.engine_core.check_alive()
        if request_id is None:
            request_id = str(next(self._request_counter))
        if pooling_params is None:
            pooling_params = PoolingParams()
        elif not isinstance(pooling_params, PoolingParams):
            raise InvalidTypeError("pooling_params", pooling_params, "PoolingParams")
        request = self.input_processor.process_inputs(request_id, prompt, pooling_params, priority=priority)
        self.input_processor.assign_request_id(request)
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
        """Yield the one output of a pooling request; arguments and errors of `submit_pooling`.

        Cancelling its task aborts the request.

        Raises:
            RequestError: the engine refused this request, or it was aborted.
            EngineDeadError: the engine ended; the message has the reason and the end of its log.
        """
        future = self.submit_pooling(prompt, pooling_params, request_id, priority=priority)
        yield await asyncio.wrap_future(future)

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """Make a vector of a prompt; arguments and errors of `encode`."""
        params = msgspec.structs.replace(pooling_params or PoolingParams(), task="embed")
        future = self.submit_pooling(prompt, params, request_id, priority=priority)
        return as_embedding(await asyncio.wrap_future(future))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several: their streams get what there is, with `finish_reason="abort"`."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        done = asyncio.run_coroutine_threadsafe(
            self._requests.abort(request_ids), self.engine_core.loop_thread.loop
        )
        await asyncio.wrap_future(done)

    def abort_soon(self, request_id: str) -> None:
        """`abort` without waiting, on any thread."""
        self.engine_core.loop_thread.call_soon(self._requests.abort_now, [request_id])

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core by name; see `EngineCoreClient.call_utility`."""
        return await self.engine_core.call_utility_async(method, *args)

    def call_utility_blocking(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """`call_utility` for code without an event loop."""
        return self.engine_core.call_utility(method, *args, timeout=timeout)

    def _submit_utility(self, method: str, *args: Any) -> Future[Any]:
        return self.engine_core.submit_utility(method, *args)

    async def stats(self) -> EngineStats:
        """The state of scheduler and KV cache now."""
        return cast("EngineStats", await self.call_utility("stats"))

    def stats_blocking(self) -> EngineStats:
        """`stats` for code without an event loop."""
        return cast("EngineStats", self.call_utility_blocking("stats"))

    async def scale(self, data_parallel_size: int, timeout: float | None = None) -> int:
        """Have so many engine cores, while requests run, and return their number; see `EngineCoreClient.scale`.

        New ones take requests as soon as they are ready. Those that go, the last ranks, finish what they have begun;
        the rest is sent to others.
        """
        done = asyncio.wrap_future(self.engine_core.submit_scale(data_parallel_size))
        return await asyncio.wait_for(done, timeout)

    def scale_blocking(
        self, data_parallel_size: int, timeout: float | None = None, progress: ProgressCallback | None = None
    ) -> int:
        """`scale` for code without an event loop; `progress` is called on another thread with what new engine cores
        report of their start."""
        self.engine_core.later_progress = progress
        try:
            return self.engine_core.scale(data_parallel_size, timeout)
        finally:
            self.engine_core.later_progress = None

    @property
    def control(self) -> Control:
        """The utilities for code without an event loop."""
        return ControlOf(self.config, self.call_utility_blocking)

    def detach(self) -> None:
        """Leave the engine running and drop this client's requests; again does nothing."""
        self.engine_core.detach()
        self._finalizer.detach()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, with `drain` after what runs has finished, and wait until all its processes are gone.

        Calling it again does nothing. It blocks, also when called in a coroutine.
        """
        self.engine_core.shutdown(drain=drain)
        self._finalizer.detach()


AsyncLLMEngine = AsyncLLM
"""The name that older scripts import."""
