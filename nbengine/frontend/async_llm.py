"""The streaming frontend: works from any thread and any event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from nbengine.checks import (
    check_session,
    checked_texts,
    checked_token_ids,
    require_bool,
    require_callback,
    require_headers,
    require_method,
)
from nbengine.client.async_mp import AsyncMPClient
from nbengine.client.base import EngineCoreClient
from nbengine.client.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from nbengine.client.engines.directory import find_engine
from nbengine.client.link.ownership import Owned, finalize, is_forked_copy
from nbengine.client.making import make_async_mp_client
from nbengine.client.routing.core_table import checked_rank
from nbengine.client.threads.loop_thread import LoopThread
from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.assembly import assemble, resolve_files
from nbengine.frontend.async_pooling import AsyncPooling
from nbengine.frontend.async_requests import AsyncRequests
from nbengine.frontend.control import AsyncControl, Control, ControlOf
from nbengine.frontend.held_back import HeldBack
from nbengine.frontend.inspection import Inspection
from nbengine.frontend.observability.request_watch import RequestObserver
from nbengine.frontend.options import EngineOptions, PathName, with_engine_options
from nbengine.frontend.outputs.output_collector import PromptCallback, RequestOutputCollector
from nbengine.frontend.outputs.output_stream import OutputStream
from nbengine.frontend.outputs.transcripts import Transcripts, mark
from nbengine.frontend.parsing.reading import answer_of
from nbengine.frontend.progress_line import start_progress
from nbengine.frontend.requests.beside_loop import beside_loop
from nbengine.frontend.requests.continuation import Continuation
from nbengine.frontend.requests.input_processor import PromptType, prompt_text
from nbengine.frontend.requests.output_interval import checked_interval
from nbengine.frontend.requests.prompting import Prompting
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.metrics.stats import EngineStats
from nbengine.outputs import RequestOutput
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.progress import ProgressCallback
from nbengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_Prepared = tuple[EngineCoreRequest, Continuation | None, RequestOutputCollector]


class AsyncLLM(Prompting, AsyncPooling, AsyncControl, Inspection, Transcripts):
    """An engine whose outputs are streamed; many requests at once, from any thread or event loop.

    All its sockets live on one daemon thread. The constructor blocks until the engine takes requests. Leaving
    an `async with` block ends an engine that ends with this process, and waits until its processes are gone;
    any other engine (`bound=False`, or joined with `attach`) goes on without this client.

    Args:
        model: a directory (a path, too), a .gguf file, a hub id, or an alias such as "smollm2-135m" or "random-tiny".
        name: the engine's name, for `attach` and `nbengine ps`; if None, the engine is named after its model.
        bound: the engine ends with this process. Otherwise it outlives it by `keep_alive` seconds.
        session: name of this client across restarts of its process: attaching again under the same name ends
            what the earlier attachment had asked for, and finds its `transcripts`.
        progress: called with the stages of the start, on this thread except while a model is fetched; None
            shows them in a notebook's cell, or in a line of a terminal.
        options: see `EngineArgs`.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files.
        EngineStartError: the engine did not start; the message has the reason and the end of its log.
        InvalidArgumentError, NotSupportedError: an argument; the message names it.
    """

    engine_core = Owned[AsyncMPClient]()

    @with_engine_options
    def __init__(
        self,
        model: PathName = "smollm2-135m",
        *,
        name: str | None = None,
        bound: bool = True,
        session: str | None = None,
        progress: ProgressCallback | None = None,
        multiprocess: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        if not require_bool("multiprocess", multiprocess):
            raise InvalidArgumentError("multiprocess", multiprocess, "True (LLM has engines in this process)")
        own = ("name", "bound", "session", "progress", "multiprocess")
        engine_args = EngineArgs.from_kwargs({"model": model, **options}, "AsyncLLM", own)
        config = engine_args.create_engine_config(bound=bound)
        with (
            start_progress(f"starting {model}", config.parallel)
            if progress is None
            else nullcontext(progress) as told
        ):
            self._start(config, name, session, told)

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
        """Build an engine from the flat arguments; the others, and what is raised, are the constructor's."""
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
            data_parallel_rank: the engine core that gets all requests, for a load that is balanced outside;
                None balances it here.

        Raises:
            NBEngineError: there is no such engine.
            EngineStartError: it was still starting, and failed.
            InvalidArgumentError: it has no such engine core.
        """
        check_session(session)
        require_callback("progress", progress)
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
        check_session(session)
        require_callback("progress", progress)
        client = make_async_mp_client(
            resolve_files(config, progress), LoopThread.shared(), name=name, session=session
        )
        self._set_up(client, progress)

    def _set_up(self, client: AsyncMPClient, progress: ProgressCallback | None) -> None:
        self.engine_core = client
        # Ends or leaves the engine when nobody refers to this object any more, and at the interpreter's exit.
        self._finalizer = finalize(self, client.release)
        parts = assemble(client, progress)
        self.ready: EngineReady = parts.ready
        self._tokenizer = parts.tokenizer
        self.input_processor = parts.input_processor
        self._requests = AsyncRequests(client, parts.output_processor)
        client.outputs.handler = self._requests
        self._held_back = HeldBack(client.info.name, client.submit_utility)
        self._request_counter = itertools.count()

    @property
    def name(self) -> str:
        """Return the name of the engine."""
        return self.engine_core.info.name

    @property
    def connection(self) -> ConnectionInfo:
        """Return the engine's connection: the contents of its connection file."""
        return self.engine_core.info

    @property
    def session(self) -> str:
        """Return the name that this client keeps across restarts of its process."""
        return self.engine_core.session

    @property
    def engine_ranks(self) -> list[int]:
        """Return the ranks that a request may be meant for: they take requests now, or are being started
        again."""
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
        trace_headers: Mapping[str, str] | None = None,
        output_interval: float = 0.0,
    ) -> RequestOutputCollector:
        """Send a request and return the collector of its outputs. Safe on any thread; does not wait, except
        to tokenize the prompt.

        Args:
            prompt: a string, `{"prompt": str}`, `{"prompt_token_ids": [int]}` or `{"prompt_embeds": tensor}`,
                the dicts with `cache_salt` if wanted; a list of integers is a prompt's tokens.
            sampling_params: None takes `default_sampling_params()`.
            request_id: what the outputs carry and `abort` takes; a number if None.
            priority: lower goes first, with `scheduling_policy="priority"`.
            data_parallel_rank: the engine core that is to have the request; None leaves the choice to the
                client. With a rank the request goes nowhere else, whatever the load, and waits while that
                core is started again.
            written: the first tokens of the answer, where it goes on from its middle: they stand behind the
                prompt, and count for `max_tokens`, `min_tokens` and `stop`; penalties and words that are not
                wanted see only what comes now. The outputs have the tokens that follow, and a text that
                begins with that of `written`.
            transcript: have the engine keep the output for `transcripts`, beside this text: the prompt, for a
                reader.
            trace_headers: the headers with which the request came; a `RequestTracer` makes it part of the trace
                that they name.
            output_interval: seconds for which the engine may hold tokens, to send them together, which leaves
                more of the processor to steps; the first token and the end are sent at once.

        Raises:
            InvalidArgumentError, NotSupportedError: the request is not possible.
            EngineDeadError, LeaseExpiredError: the engine cannot be reached.
        """
        prepared = self._prepare(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            written=written,
            transcript=transcript,
            trace_headers=trace_headers,
            output_interval=output_interval,
        )
        return self._send(prompt, *prepared)

    def _prepare(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        *,
        priority: int,
        data_parallel_rank: int | None,
        written: Sequence[int] = (),
        transcript: str | None,
        trace_headers: Mapping[str, str] | None,
        output_interval: float,
    ) -> _Prepared:
        """Make a request of which nobody has heard yet; arguments and errors are those of `submit`."""
        self.engine_core.check_alive()
        interval = checked_interval(output_interval)
        require_headers("trace_headers", trace_headers)
        data_parallel_rank = checked_rank(data_parallel_rank, self.engine_core.engine_ranks)
        if request_id is None:
            request_id = str(next(self._request_counter))
        if sampling_params is None:
            sampling_params = SamplingParams(**self.default_sampling_params())
        elif not isinstance(sampling_params, SamplingParams):
            raise InvalidTypeError("sampling_params", sampling_params, "SamplingParams")
        request = self.input_processor.process_inputs(
            request_id, prompt, sampling_params, priority=priority, data_parallel_rank=data_parallel_rank
        )
        tokens = checked_token_ids("written", written)
        continuation = self.input_processor.continue_answer(request, tokens) if tokens else None
        self.input_processor.assign_request_id(request)
        request.output_interval = max(request.output_interval, interval)
        if transcript is not None:
            request.transcript = mark(request, self.session, transcript, len(tokens))
        collector = RequestOutputCollector(sampling_params.output_kind, request_id, request.request_id)
        collector.trace_headers = trace_headers
        return request, continuation, collector

    def _send(
        self,
        prompt: PromptType,
        request: EngineCoreRequest,
        continuation: Continuation | None,
        collector: RequestOutputCollector,
    ) -> RequestOutputCollector:
        self.engine_core.loop_thread.call_soon(
            self._requests.add, request, prompt_text(prompt), collector, continuation, answer_of(prompt)
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
        trace_headers: Mapping[str, str] | None = None,
        output_interval: float = 0.0,
        on_prompt_progress: PromptCallback | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs, as `sampling_params.output_kind` says; the other arguments and errors are
        those of `submit`.

        Closing the generator or cancelling its task aborts the request. Where the engine sleeps or is paused, the
        request waits, and the log says so.

        Args:
            on_prompt_progress: what is called with a `PromptProgress`, on this event loop, while the first output is
                awaited and steps have read a part of the prompt and not all of it. What it raises ends the stream.

        Raises:
            RequestError: the engine refused this request.
            RequestLostError: the engine core that worked on it ended, and the engine goes on with others.
            EngineDeadError: the engine ended; the message has the reason and the end of its log.
        """
        stream = await self.open_stream(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            transcript=transcript,
            trace_headers=trace_headers,
            output_interval=output_interval,
            on_prompt_progress=on_prompt_progress,
        )
        try:
            while not stream.finished:
                yield await stream.get()
        finally:
            stream.close()

    async def open_stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        transcript: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        output_interval: float = 0.0,
        on_prompt_progress: PromptCallback | None = None,
    ) -> OutputStream:
        """Send a request and return its outputs for a reader that is called when there are some, which costs a program
        of many streams less than a task for each of them. The arguments are those of `generate`; `close` aborts the
        request. Errors about the arguments are raised here, the others by the stream.
        """
        prepare = partial(
            self._prepare,
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            transcript=transcript,
            trace_headers=trace_headers,
            output_interval=output_interval,
        )
        require_callback("on_prompt_progress", on_prompt_progress)
        prepared = await beside_loop(prompt, prepare)
        prepared[-1].on_prompt_progress = on_prompt_progress
        collector = self._send(prompt, *prepared)
        return OutputStream(collector, self.abort_soon, self._held_back.ask_later())

    def observe_requests(self, observer: RequestObserver) -> None:
        """Tell an observer of every request of this object that is sent from now on, when it has ended."""
        require_method("observer", observer, "ended")
        self._requests.watch.observers.append(observer)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several: their streams get the text that there is, with
        `finish_reason="abort"`."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        request_ids = checked_texts("request_id", ids, "the id of a request, or several")
        done = self.engine_core.loop_thread.submit(self._requests.abort(request_ids))
        await asyncio.wrap_future(done)

    def abort_soon(self, request_id: str) -> None:
        """Do what `abort` does, without waiting, on any thread. After the end of the loop, at the
        interpreter's exit, nothing is left to abort: generators that are finalized there come here."""
        if not isinstance(request_id, str):
            raise InvalidTypeError("request_id", request_id, "the id of a request")
        self.engine_core.loop_thread.call_if_open(self._requests.abort_now, [request_id])

    def go_on_soon(self) -> None:
        """Wake the engine if it sleeps and lift a pause, without waiting, on any thread; the log says where
        that fails."""
        for method in ("wake_up", "resume_generation"):
            self._submit_utility(method).add_done_callback(partial(_log_failure, self.name, method))

    def call_utility_blocking(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Do what `call_utility` does, for code without an event loop."""
        return self.control.call_utility(method, *args, timeout=timeout)

    def _engine_client(self) -> EngineCoreClient:
        return self.engine_core

    def _submit_utility(self, method: str, *args: Any) -> Future[Any]:
        return self.engine_core.submit_utility(method, *args)

    def stats_blocking(self) -> EngineStats:
        """Do what `stats` does, for code without an event loop."""
        return self.control.stats()

    def scale_blocking(
        self, data_parallel_size: int, timeout: float | None = None, progress: ProgressCallback | None = None
    ) -> int:
        """Do what `scale` does, for code without an event loop; `progress` is called on another thread with
        what new engine cores report of their start."""
        self.engine_core.later_progress = progress
        try:
            return self.control.scale(data_parallel_size, timeout)
        finally:
            self.engine_core.later_progress = None

    @property
    def control(self) -> Control:
        """Return the calls for code without an event loop."""
        return ControlOf(self.engine_core)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A forked child that leaves the block too has nothing to end.
        if not is_forked_copy(self, "engine_core"):
            await asyncio.to_thread(self.shutdown if self.engine_core.ends_engine else self.detach)

    def detach(self) -> None:
        """Leave the engine running and drop this client's requests; a second call does nothing."""
        self.engine_core.detach()
        self._finalizer.detach()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, with `drain` after what runs has finished, and wait until all its processes are
        gone.

        Calling it again does nothing. It blocks, also when called in a coroutine.
        """
        self.engine_core.shutdown(drain=drain)
        self._finalizer.detach()


AsyncLLMEngine = AsyncLLM
"""The name under which older scripts import the class."""


def _log_failure(name: str, method: str, done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.warning("engine %s: %s failed: %s", name, method, error)
