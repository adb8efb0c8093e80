"""The calls that every frontend offers beside requests: pausing, sleeping, the prefix cache, profiling,
health, the history and scaling.

`Control` and `AsyncControl` have the same calls, blocking and awaitable. `nbengine.client.calls` declares
them. All of them concern the whole engine, also the requests of its other clients.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from nbengine.checks import checked_timeout, require_int, require_line
from nbengine.client import calls
from nbengine.client.base import EngineCoreClient
from nbengine.client.calls import awaitable, blocking
from nbengine.client.health import DEFAULT_HEALTH_TIMEOUT, check_health, check_health_async
from nbengine.client.history import DEFAULT_HISTORY_TIMEOUT, read_history, read_history_async
from nbengine.config import EngineConfig
from nbengine.metrics.history import MetricsHistory


class Control(ABC):
    """The blocking calls."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""

    @abstractmethod
    def _engine_client(self) -> EngineCoreClient:
        """Return the client that reaches the engine."""

    get_supported_tasks = blocking(calls.get_supported_tasks)
    stats = blocking(calls.stats)
    reset_prefix_cache = blocking(calls.reset_prefix_cache)
    pause_generation = pause = blocking(calls.pause_generation)
    resume_generation = resume = blocking(calls.resume_generation)
    is_paused = blocking(calls.is_paused)
    sleep = blocking(calls.sleep)
    wake_up = blocking(calls.wake_up)
    is_sleeping = blocking(calls.is_sleeping)
    start_profile = blocking(calls.start_profile)
    stop_profile = blocking(calls.stop_profile)

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine core by name and wait for its result.

        Raises:
            UtilityError: the engine has no such method, or it failed.
            TimeoutError: there was no answer within `timeout` seconds.
        """
        require_line("method", method)
        seconds = checked_timeout("timeout", timeout)
        return self._engine_client().submit_utility(method, *args).result(seconds)

    def check_health(self, timeout: float = DEFAULT_HEALTH_TIMEOUT) -> None:
        """Return when the engine's host, the busy loop of every engine core and every worker have answered:
        each worker computes something and meets the others of its stage. A paused or sleeping engine is
        healthy.

        Args:
            timeout: seconds that they may take together. A step that is under way is finished first. With
                `multiprocess=False` nothing can be given up in the middle.

        Raises:
            EngineDeadError: the engine has ended.
            EngineStalledError: not all have answered in time; the message says which, and what they are in.
            InvalidArgumentError: `timeout`.
        """
        check_health(self._engine_client(), timeout)

    def metrics(
        self, last: str | float = "1h", *, rank: int | None = None, timeout: float = DEFAULT_HISTORY_TIMEOUT
    ) -> MetricsHistory:
        """Return the engine's figures over the last time, also of times when nobody looked: `rows()` are dicts,
        `to_frame()` is a DataFrame.

        Args:
            last: a number of seconds, or a text such as "90s", "10m", "1h", "1d". Up to an hour has a row a second,
                up to a day one for ten seconds.
            rank: the engine core; None: all.
            timeout: seconds for each answer of the engine's host.

        Raises:
            EngineDeadError: the engine has ended.
            EngineStalledError: the host has not answered in time.
            InvalidArgumentError: an argument.
            NotSupportedError: the engine is in this process, and has no host.
        """
        return read_history(self._engine_client(), last, rank, timeout)

    def scale(self, data_parallel_size: int, timeout: float | None = None) -> int:
        """Change the number of engine cores while requests run, and return that number.

        New ones take requests as soon as they are ready. Those that go, the last ranks, finish what they have
        begun; the rest is sent to others.

        Raises:
            InvalidArgumentError: the argument.
            NBEngineError: the engine cannot be scaled; the message says why.
            TimeoutError: it has not been done within `timeout` seconds; it goes on.
        """
        seconds = checked_timeout("timeout", timeout)
        size = require_int("data_parallel_size", data_parallel_size)
        return self._engine_client().submit_scale(size).result(seconds)


class ControlOf(Control):
    """The blocking calls of a client whose frontend has awaitable ones."""

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""
        return self._client.config

    def _engine_client(self) -> EngineCoreClient:
        return self._client


class AsyncControl(ABC):
    """The calls as coroutines; `Control` says what `check_health`, `metrics` and `scale` do."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""

    @abstractmethod
    def _engine_client(self) -> EngineCoreClient:
        """Return the client that reaches the engine."""

    get_supported_tasks = awaitable(calls.get_supported_tasks)
    stats = awaitable(calls.stats)
    reset_prefix_cache = awaitable(calls.reset_prefix_cache)
    pause_generation = pause = awaitable(calls.pause_generation)
    resume_generation = resume = awaitable(calls.resume_generation)
    is_paused = awaitable(calls.is_paused)
    sleep = awaitable(calls.sleep)
    wake_up = awaitable(calls.wake_up)
    is_sleeping = awaitable(calls.is_sleeping)
    start_profile = awaitable(calls.start_profile)
    stop_profile = awaitable(calls.stop_profile)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core by name; see `Control.call_utility`."""
        require_line("method", method)
        return await asyncio.wrap_future(self._engine_client().submit_utility(method, *args))

    async def check_health(self, timeout: float = DEFAULT_HEALTH_TIMEOUT) -> None:
        """Exercise the engine end to end; see `Control.check_health`."""
        await check_health_async(self._engine_client(), timeout)

    async def metrics(
        self, last: str | float = "1h", *, rank: int | None = None, timeout: float = DEFAULT_HISTORY_TIMEOUT
    ) -> MetricsHistory:
        """Return the engine's figures over the last time; see `Control.metrics`."""
        return await read_history_async(self._engine_client(), last, rank, timeout)

    async def scale(self, data_parallel_size: int, timeout: float | None = None) -> int:
        """Change the number of engine cores, and return that number; see `Control.scale`."""
        seconds = checked_timeout("timeout", timeout)
        size = require_int("data_parallel_size", data_parallel_size)
        done = asyncio.wrap_future(self._engine_client().submit_scale(size))
        return await asyncio.wait_for(done, seconds)
