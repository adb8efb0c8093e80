"""The engine as the routes see it: its state, the places for requests, and their outputs."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.frontend.outputs.output_collector import PromptCallback
from nbengine.frontend.requests.input_processor import InputProcessor, PromptType
from nbengine.frontend.text.stored_templates import template_for
from nbengine.metrics.history import MetricsHistory
from nbengine.metrics.stats import EngineStats
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.server.limits import Limits
from nbengine.server.outputs import Outputs, Stream
from nbengine.server.protocol.errors import INVALID_REQUEST, ApiError, unavailable
from nbengine.server.settings import ServerSettings
from nbengine.server.translate.conversation import own_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

T = TypeVar("T")

trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)
"""The headers that make the request that is being answered part of a trace."""
WATCH_INTERVAL = 0.2
"""Seconds between two looks at the engine: whether it lives, and what it has published."""


class State(enum.StrEnum):
    """The state of a server, as `/ready` tells it."""

    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


_EXPLANATIONS = {
    State.STARTING: ("the engine is starting", "engine_starting", 5),
    State.ASLEEP: ("the engine sleeps until it is woken up", "engine_asleep", 5),
    State.PAUSED: ("the engine is paused until it is resumed", "engine_paused", 5),
    State.DRAINING: ("the server is ending and takes no more requests", "server_draining", 5),
    State.DEAD: ("the engine has ended", "engine_dead", None),
}


class Engine(Protocol):
    """The part of `AsyncLLM` that a server needs."""

    input_processor: InputProcessor

    @property
    def name(self) -> str:
        """Return the name of the engine."""

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""

    @property
    def connection(self) -> ConnectionInfo:
        """Return the engine's connection."""

    @property
    def death(self) -> NBEngineError | None:
        """Return the error that says why the engine has ended; None while it runs."""

    async def metrics(self, last: str | float = "1h", *, rank: int | None = None) -> MetricsHistory:
        """Return what the engine's host has kept of the last time."""

    async def open_stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        output_interval: float = 0.0,
        on_prompt_progress: PromptCallback | None = None,
    ) -> Stream:
        """Send a request and return its outputs; closing them aborts it."""

    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the one output of a pooling request."""

    @property
    def render_chat(self) -> Callable[..., dict[str, Any]]:
        """Render a conversation to a prompt; the arguments are those of `AsyncLLM.render_chat`."""

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config recommends."""

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer of the model."""


class StatsSource(Protocol):
    """A source of the statistics that an engine publishes."""

    def poll(self, timeout: float | None = None) -> object | None:
        """Return the next message, None if none comes within `timeout` seconds."""

    def close(self) -> None:
        """Stop following."""


class EngineService:
    """The service of one engine to the routes of a server, for one event loop.

    It begins without an engine and refuses requests until `attach`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.limits = Limits(settings.max_concurrent_requests, settings.max_queued_requests)
        self.stats = EngineStats()
        """The newest statistics of the engine."""
        self.model_names: tuple[str, ...] = settings.served_model_names
        self.num_active = 0
        """Requests that are not answered yet."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.num_body_bytes = 0
        """Bytes of the bodies of these requests, as far as they have come."""
        self.death: NBEngineError | None = None
        self.is_draining = False
        self._engine: Engine | None = None
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._feed: StatsSource | None = None

    # The engine's life.

    async def attach(self, engine: Engine, feed: StatsSource | None = None) -> None:
        """Take requests from now on; `feed` replaces the engine's own statistics."""
        self._tokenizer = await asyncio.to_thread(engine.get_tokenizer)
        self._feed = feed or StatsSubscriber(engine.connection)
        if not self.model_names:
            self.model_names = (engine.config.model.model,)
        self._engine = engine

    async def watch(self) -> NBEngineError:
        """Follow the engine until it ends, and return why."""
        while self.death is None:
            self.look()
            await asyncio.sleep(WATCH_INTERVAL)
        return self.death

    def look(self) -> None:
        """Take note of what the engine has published since the last look, and of its end."""
        if self._engine is None or self._feed is None:
            return
        while (message := self._feed.poll(0)) is not None:
            if isinstance(message, EngineStats):
                self.stats = message
        self.death = self.death or self._engine.death

    def fail(self, error: NBEngineError) -> None:
        """Take note that there is no engine, and will be none."""
        self.death = error

    def begin(self) -> None:
        """Take note of a request."""
        self.num_active += 1
        self.idle.clear()

    def end(self) -> None:
        """Take note that a request is answered, or given up."""
        self.num_active -= 1
        if not self.num_active:
            self.idle.set()

    def close(self) -> None:
        """Let go of the engine's statistics."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    @property
    def state(self) -> State:
        """Return what keeps requests from being answered, READY if nothing does."""
        if self.death is not None:
            return State.DEAD
        if self.is_draining:
            return State.DRAINING
        if self._engine is None:
            return State.STARTING
        cores = self.stats.engines
        if any(core.is_sleeping for core in cores):
            return State.ASLEEP
        return State.PAUSED if any(core.is_paused for core in cores) else State.READY

    def check_ready(self) -> Engine:
        """Return the engine.

        Raises:
            ApiError: it cannot answer now (503); the error says why.
        """
        state = self.state
        if state is State.READY and self._engine is not None:
            return self._engine
        message, code, retry_after = _EXPLANATIONS[state]
        if isinstance(self.death, EngineDeadError):
            message = f"{message}: {self.death.cause}"
        raise unavailable(message, code, retry_after)

    # What is known of the model.

    @property
    def engine(self) -> Engine:
        """Return the engine, whatever its state.

        Raises:
            ApiError: it has not started yet.
        """
        return self._engine or self.check_ready()

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer; raises as `engine` does."""
        if self._tokenizer is None:
            self.check_ready()
            raise unavailable("the engine is starting", "engine_starting")
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a prompt and its output together."""
        return self.engine.input_processor.max_model_len

    def chat_template(self, given: str | None = None, *, has_tools: bool = False) -> str:
        """Return the chat template that a request is rendered with.

        Raises:
            InvalidArgumentError: there is none.
        """
        return template_for(self.tokenizer.chat_template, given, has_tools=has_tools)

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that an answer carries; None asks for the only one.

        Raises:
            ApiError: no model has this name here (404).
        """
        self.check_ready()
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        known = ", ".join(self.model_names)
        raise ApiError(
            404,
            INVALID_REQUEST,
            "model_not_found",
            "model",
            f"the model {name[:200]!r} does not exist here; there is {known}",
        )

    # Requests.

    async def send(
        self,
        prompts: Sequence[PromptType],
        params: SamplingParams,
        request_id: str,
        *,
        copies: int = 1,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reports_prompts: bool = False,
    ) -> Outputs:
        """Send several prompts, each as `copies` requests, as soon as there are places for them, and return their
        outputs, each with its request's index: the copies of a prompt follow each other. With `reports_prompts` they
        say also how much of a prompt that takes several steps has been read.

        Closing the outputs aborts what has not ended. They raise what `AsyncLLM.generate` does.

        Raises:
            ApiError: the engine cannot answer (503), or the server is busy (429).
            NBEngineError: a prompt or a parameter is not possible.
        """
        self.check_ready()
        outputs = Outputs(await self.limits.enter(len(prompts) * copies * params.n))
        try:
            # While it waited, the engine may have been put to sleep, or paused.
            engine = self.check_ready()
            sent = [prompt for prompt in prompts for _ in range(copies)]
            await outputs.open(
                [
                    engine.open_stream(
                        prompt,
                        params,
                        request_id if len(sent) == 1 else f"{request_id}-{index}",
                        priority=priority,
                        data_parallel_rank=data_parallel_rank,
                        trace_headers=trace_headers.get(),
                        output_interval=self.settings.output_interval,
                        on_prompt_progress=partial(outputs.report, index) if reports_prompts else None,
                    )
                    for index, prompt in enumerate(sent)
                ]
            )
        except BaseException:
            outputs.close()
            raise
        return outputs

    async def pool(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[PoolingParams],
        request_id: str,
        places: Sequence[str],
        *,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of pooling requests, in the order of the prompts; `params` has those of each, and
        `places` the field that it comes from (`input[3]`), which an error about it names.

        More prompts than there are places go one group after the other. Cancelling it aborts what has not
        ended; errors are those of `generate`.
        """
        most = self.settings.max_concurrent_requests
        outputs: list[PoolingRequestOutput[PoolingOutput]] = []
        for start in range(0, len(prompts), most):
            part = slice(start, start + most)
            group = zip(prompts[part], params[part], places[part], strict=True)
            outputs += await self._pool_group(list(group), f"{request_id}-{start}", priority)
        return outputs

    async def _pool_group(
        self, group: Sequence[tuple[PromptType, PoolingParams, str]], request_id: str, priority: int
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        self.check_ready()
        ticket = await self.limits.enter(len(group))
        try:
            engine = self.check_ready()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        _only(engine.encode(prompt, own, f"{request_id}-{index}", priority=priority), place)
                    )
                    for index, (prompt, own, place) in enumerate(group)
                ]
            return [task.result() for task in running]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            ticket.release()


async def _only(outputs: AsyncIterator[T], place: str) -> T:
    with own_names({"prompt": place, "prompt_token_ids": place}):
        async for output in outputs:
            return output
    raise NBEngineError("a pooling request has ended without an output")
