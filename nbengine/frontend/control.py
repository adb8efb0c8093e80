"""What every frontend offers beside requests: pausing, sleeping, the prefix cache, profiling.

`Control` and `AsyncControl` are the same calls, blocking and awaitable. All of them concern the whole engine, also
the requests of its other clients.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from nbengine.checks import require
from nbengine.config import EngineConfig
from nbengine.ipc.utilities import (
    DEFAULT_PROFILE_STEPS,
    PAUSE_MODES,
    SLEEP_LEVELS,
    SLEEP_TAGS,
    ProfileReport,
)

DEFAULT_PROFILE_DIR = "nbengine-profiles"
_MODES = "one of " + ", ".join(PAUSE_MODES)


class Control(ABC):
    """The blocking utilities."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The engine's configuration."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine core by name and wait for its result.

        Raises:
            UtilityError: the engine has no such method, or it failed.
            TimeoutError: there was no answer within `timeout` seconds.
        """

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return tuple(self.call_utility("get_supported_tasks"))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False if unfinished requests forbid it.

        With `reset_running_requests` those that run compute their tokens again, and it is never refused.
        """
        return bool(self.call_utility("reset_prefix_cache", reset_running_requests))

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Hold requests back until `resume_generation`; returns when the model stands still.

        Requests that come meanwhile, from any client, wait.

        Args:
            mode: "abort" ends unfinished requests, with what they have; "wait" lets those that have begun finish;
                "keep" stops them where they are.
            clear_cache: forget the prefix cache, too; requests that are kept compute their tokens again.

        Raises:
            UtilityError: the engine was resumed before it had paused.
        """
        self.call_utility("pause_generation", *_pause_arguments(mode, clear_cache))

    def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        self.call_utility("resume_generation")

    pause = pause_generation
    resume = resume_generation

    def is_paused(self) -> bool:
        """Whether `pause_generation` holds requests back."""
        return bool(self.call_utility("is_paused"))

    def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Give memory back until `wake_up`; requests that come meanwhile, from any client, wait.

        The KV cache is freed and the prefix cache forgotten. On a GPU the weights move to host memory (level 1);
        level 2 gives them up, and `wake_up` reads them from their files again. On a CPU level 1 keeps them.

        Args:
            mode: what becomes of unfinished requests, as for `pause_generation`; those that are kept compute their
                tokens again. None: they are an error, unless a pause holds them back.

        Raises:
            UtilityError: there are unfinished requests, and `mode` is None.
        """
        self.call_utility("sleep", *_sleep_arguments(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again and go on. `tags` restores only "weights" or "kv_cache"; the rest follows later.

        Raises:
            UtilityError: there is not enough memory any more, or the weights' files have changed; the engine still
                sleeps.
        """
        self.call_utility("wake_up", *_wake_up_arguments(tags))

    def is_sleeping(self) -> bool:
        """Whether the engine has given memory back."""
        return bool(self.call_utility("is_sleeping"))

    def start_profile(self, directory: str | None = None, *, max_steps: int = DEFAULT_PROFILE_STEPS) -> None:
        """Record with torch's profiler what the workers compute, for at most `max_steps` steps.

        Args:
            directory: for the trace; None takes the engine argument `profile_dir`, else "nbengine-profiles" in the
                working directory.

        Raises:
            UtilityError: a profile is being recorded already, or the directory cannot be written to.
        """
        self.call_utility("start_profile", *_profile_arguments(self.config, directory, max_steps))

    def stop_profile(self) -> ProfileReport:
        """Write what has been recorded, as a Chrome trace, and return where it is and a summary by operation.

        Raises:
            UtilityError: no profile is being recorded, or it cannot be written.
        """
        return _profile_report(self.call_utility("stop_profile"))


class ControlOf(Control):
    """The blocking utilities of a frontend whose own are awaitable."""

    def __init__(self, config: EngineConfig, call_utility: Callable[..., Any]) -> None:
        self._config = config
        self._call_utility = call_utility

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self._config

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine core by name and wait for its result."""
        return self._call_utility(method, *args, timeout=timeout)


class AsyncControl(ABC):
    """The utilities as coroutines; `Control` says what they do."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The engine's configuration."""

    @abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core by name; see `Control.call_utility`."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return tuple(await self.call_utility("get_supported_tasks"))

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; see `Control.reset_prefix_cache`."""
        return bool(await self.call_utility("reset_prefix_cache", reset_running_requests))

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Hold requests back until `resume_generation`; see `Control.pause_generation`."""
        await self.call_utility("pause_generation", *_pause_arguments(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self.call_utility("resume_generation")

    pause = pause_generation
    resume = resume_generation

    async def is_paused(self) -> bool:
        """Whether `pause_generation` holds requests back."""
        return bool(await self.call_utility("is_paused"))

    async def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Give memory back until `wake_up`; see `Control.sleep`."""
        await self.call_utility("sleep", *_sleep_arguments(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again and go on; see `Control.wake_up`."""
        await self.call_utility("wake_up", *_wake_up_arguments(tags))

    async def is_sleeping(self) -> bool:
        """Whether the engine has given memory back."""
        return bool(await self.call_utility("is_sleeping"))

    async def start_profile(
        self, directory: str | None = None, *, max_steps: int = DEFAULT_PROFILE_STEPS
    ) -> None:
        """Record what the workers compute; see `Control.start_profile`."""
        await self.call_utility("start_profile", *_profile_arguments(self.config, directory, max_steps))

    async def stop_profile(self) -> ProfileReport:
        """Write what has been recorded; see `Control.stop_profile`."""
        return _profile_report(await self.call_utility("stop_profile"))


def _pause_arguments(mode: str, clear_cache: bool) -> tuple[Any, ...]:
    require("mode", mode, mode in PAUSE_MODES, _MODES)
    return mode, bool(clear_cache)


def _sleep_arguments(level: int, mode: str | None) -> tuple[Any, ...]:
    require("level", level, level in SLEEP_LEVELS and level is not True, "1 or 2")
    require("mode", mode, mode is None or mode in PAUSE_MODES, "None or " + _MODES)
    return level, mode


def _wake_up_arguments(tags: Sequence[str] | None) -> tuple[Any, ...]:
    if tags is None:
        return (None,)
    known = not isinstance(tags, str) and all(tag in SLEEP_TAGS for tag in tags)
    require("tags", tags, known, "None or a list of " + ", ".join(SLEEP_TAGS))
    return (list(tags),)


def _profile_arguments(config: EngineConfig, directory: str | None, max_steps: int) -> tuple[Any, ...]:
    require("max_steps", max_steps, isinstance(max_steps, int) and max_steps >= 1, "an integer, at least 1")
    # The engine's working directory may be another one.
    return os.path.abspath(directory or config.profile_dir or DEFAULT_PROFILE_DIR), max_steps


def _profile_report(answer: Any) -> ProfileReport:
    return answer if isinstance(answer, ProfileReport) else msgspec.convert(answer, ProfileReport)
