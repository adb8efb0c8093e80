"""The calls of an engine, each declared once: name, checked arguments, merging of several cores' answers,
undoing, result.

A declaration is a function of the caller and of the arguments that people pass; it checks them, and returns
those that are sent. `blocking` and `awaitable` make of it the methods of `LLM` and `AsyncLLM`, with its
signature and its text.
"""

from __future__ import annotations

import inspect
import os
import time
import typing
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from nbengine.checks import require, require_bool, require_int, require_path
from nbengine.config import EngineConfig
from nbengine.ipc.transcripts import TranscriptRecord, records_of
from nbengine.ipc.utilities import (
    DEFAULT_PROFILE_STEPS,
    PAUSE_MODES,
    SLEEP_LEVELS,
    SLEEP_TAGS,
    ProfileReport,
    QueuePlace,
)
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.plain import is_ordered, plain

DEFAULT_PROFILE_DIR = "nbengine-profiles"

P = ParamSpec("P")
T = TypeVar("T")
Arguments = tuple[Any, ...]
Merge = Callable[[Sequence[Any]], Any]


class Caller(Protocol):
    """The frontend that makes a call."""

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""


@dataclass(frozen=True)
class EngineCall(Generic[P, T]):
    """A call of a method of the engine core, by its name."""

    name: str
    arguments: Callable[Concatenate[Caller, P], Arguments]
    """The declaration: it checks the arguments that people pass, and returns those that are sent."""
    answer: Callable[[Any], T]
    """The function that makes the caller's result of the engine's answer."""
    merge: Merge | None
    """The function that merges the answers of all engine cores, given by rank;
    None: the call goes to the first core alone."""
    undone_by: str | None
    """The call that undoes this one on the cores that have done it when others could not:
    all of them do it or none."""


CALLS: dict[str, EngineCall[..., Any]] = {}
"""The declared calls, by name; a call that is not declared goes to the first engine core alone."""


def engine_call(
    answer: Callable[[Any], T], merge: Merge | None = None, *, undone_by: str | None = None
) -> Callable[[Callable[Concatenate[Caller, P], Arguments]], EngineCall[P, T]]:
    """Declare the call whose name and arguments are those of the function."""

    def declare(arguments: Callable[Concatenate[Caller, P], Arguments]) -> EngineCall[P, T]:
        call = EngineCall(arguments.__name__, arguments, answer, merge, undone_by)
        CALLS[call.name] = call
        return call

    return declare


def blocking(call: EngineCall[P, T]) -> Callable[Concatenate[Any, P], T]:
    """Make a method that makes the call and waits for its answer,
    for classes with `call_utility` and `config`."""

    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call.answer(self.call_utility(call.name, *call.arguments(self, *args, **kwargs)))

    _dress(method, call)
    return method


def awaitable(call: EngineCall[P, T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make the same method as a coroutine, for classes whose `call_utility` is one."""

    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call.answer(await self.call_utility(call.name, *call.arguments(self, *args, **kwargs)))

    _dress(method, call)
    return method


def merged_answers(method: str, answers: Sequence[Any]) -> Any:
    """Merge the answers of the engine cores that a call went to, given by rank, into one."""
    call = CALLS.get(method)
    return call.merge(answers) if call and call.merge else answers[0]


def merged_stats(answers: Iterable[Any]) -> EngineStats:
    """Make the public statistics from each engine core's answer to the call `stats`."""
    engines = [
        answer if isinstance(answer, SchedulerStats) else msgspec.convert(answer, SchedulerStats)
        for answer in answers
    ]
    return EngineStats(
        engines=engines,
        current_wave=max((engine.current_wave for engine in engines), default=0),
        engines_running=any(
            engine.engines_running or engine.num_running_reqs + engine.num_waiting_reqs > 0
            for engine in engines
        ),
        timestamp=time.time(),
    )


def _dress(method: Any, call: EngineCall[..., Any]) -> None:
    """Give a method the name, the text and the signature of its declaration."""
    declared = inspect.signature(call.arguments)
    _, *parameters = declared.parameters.values()
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    gives = call.answer if isinstance(call.answer, type) else inspect.signature(call.answer).return_annotation
    method.__name__ = method.__qualname__ = call.name
    method.__doc__ = call.arguments.__doc__
    method.__signature__ = declared.replace(parameters=[own, *parameters], return_annotation=gives)


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


def _nothing(answer: Any) -> None:
    del answer


def _as_given(answer: Any) -> Any:
    return answer


def _strings(answer: Any) -> tuple[str, ...]:
    return tuple(answer)


def _statistics(answer: Any) -> EngineStats:
    return typing.cast("EngineStats", answer)


def _profile_report(answer: Any) -> ProfileReport:
    return answer if isinstance(answer, ProfileReport) else msgspec.convert(answer, ProfileReport)


def _merged_reports(answers: Sequence[Any]) -> ProfileReport:
    reports = [msgspec.convert(answer, ProfileReport, from_attributes=True) for answer in answers]
    return ProfileReport(
        [path for report in reports for path in report.paths],
        sum(report.num_steps for report in reports),
        reports[0].summary,
    )


def _queue_place(answer: Any) -> QueuePlace | None:
    return typing.cast("QueuePlace | None", answer)


def _first_place(answers: Sequence[Any]) -> QueuePlace | None:
    """Return the place of the request that is admitted first, of those that wait in several engine cores."""
    places = [
        msgspec.convert(answer, QueuePlace, from_attributes=True) for answer in answers if answer is not None
    ]
    return min(places, key=lambda place: (place.num_ahead, place.rank), default=None)


def _merged_records(answers: Sequence[Any]) -> list[TranscriptRecord]:
    return [record for answer in answers for record in records_of(answer)]


def _merged_counts(answers: Sequence[Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for answer in answers:
        # A session whose requests have all been read counts 0, and is listed.
        for session, number in msgspec.convert(answer, dict[str, int]).items():
            counts[session] += number
    return dict(counts)


# The engine's tasks, state, health and caches.


@engine_call(_strings)
def get_supported_tasks(caller: Caller) -> Arguments:
    """List the tasks that the model can do, of "generate", "embed", "score", "classify" and "encode"."""
    del caller
    return ()


@engine_call(_statistics, merged_stats)
def stats(caller: Caller) -> Arguments:
    """Return the state of scheduler and KV cache now."""
    del caller
    return ()


@engine_call(_queue_place, _first_place)
def queue_place(caller: Caller, request_ids: list[str]) -> Arguments:
    """Return the place in the queue of the first of these requests, None if none of them waits."""
    del caller
    return (request_ids,)


@engine_call(_nothing, _first)
def check_health(caller: Caller) -> Arguments:
    """Have every worker compute something; see `nbengine.client.health.check_health`, which also asks the host."""
    del caller
    return ()


@engine_call(bool, all)
def reset_prefix_cache(caller: Caller, *, reset_running_requests: bool = False) -> Arguments:
    """Forget all cached prefixes; return False if unfinished requests forbid it.

    With `reset_running_requests` the running requests compute their tokens again, and nothing forbids it.
    """
    del caller
    return (require_bool("reset_running_requests", reset_running_requests),)


# Pausing.


@engine_call(_nothing, _first, undone_by="resume_generation")
def pause_generation(caller: Caller, mode: str = "abort", *, clear_cache: bool = True) -> Arguments:
    """Hold requests back until `resume_generation`; return when the model stands still.

    Requests that come meanwhile, from any client, wait.

    Args:
        mode: "abort" ends unfinished requests, with the output that they have; "wait" lets those that have
            begun finish; "keep" stops them where they are.
        clear_cache: forget the prefix cache, too; requests that are kept compute their tokens again.

    Raises:
        UtilityError: the engine was resumed before it had paused.
    """
    del caller
    require("mode", mode, mode in PAUSE_MODES, "one of " + ", ".join(PAUSE_MODES))
    return mode, require_bool("clear_cache", clear_cache)


@engine_call(_nothing, _first)
def resume_generation(caller: Caller) -> Arguments:
    """Go on after `pause_generation`."""
    del caller
    return ()


@engine_call(bool, any)
def is_paused(caller: Caller) -> Arguments:
    """Return whether `pause_generation` holds requests back."""
    del caller
    return ()


# Sleeping.


@engine_call(_nothing, _first, undone_by="wake_up")
def sleep(caller: Caller, level: int = 1, mode: str | None = None, *, hold: bool = False) -> Arguments:
    """Give memory back until `wake_up`; requests that come meanwhile, from any client, wait.

    The KV cache is freed and the prefix cache forgotten. On a GPU the weights move to host memory (level 1);
    level 2 gives them up, and `wake_up` reads them from their files again. On a CPU level 1 keeps them.

    Args:
        mode: how to treat unfinished requests, as for `pause_generation`; those that are kept compute their
            tokens again. None: they are an error, unless a pause holds them back.
        hold: refuse requests that come meanwhile.

    Raises:
        UtilityError: the engine has unfinished requests, and `mode` is None.
    """
    del caller
    level = require_int("level", level)
    require("level", level, level in SLEEP_LEVELS, "1 or 2")
    require("mode", mode, mode is None or mode in PAUSE_MODES, "None or one of " + ", ".join(PAUSE_MODES))
    hold = require_bool("hold", hold)
    return level, mode, hold


@engine_call(_nothing, _first)
def wake_up(caller: Caller, tags: Sequence[str] | None = None) -> Arguments:
    """Take the memory again and go on. `tags` restores only "weights" or "kv_cache"; the rest follows later.

    Raises:
        UtilityError: the memory does not suffice any more, or the weights' files have changed; the engine
            still sleeps.
    """
    del caller
    if tags is None:
        return (None,)
    known = is_ordered(tags) and all(tag in SLEEP_TAGS for tag in tags)
    require("tags", tags, known, "None or a list of " + ", ".join(SLEEP_TAGS))
    return ([plain(tag) for tag in tags],)


@engine_call(bool, any)
def is_sleeping(caller: Caller) -> Arguments:
    """Return whether the engine sleeps, having given memory back."""
    del caller
    return ()


# Profiling.


@engine_call(_nothing, _first, undone_by="stop_profile")
def start_profile(
    caller: Caller, directory: str | None = None, *, max_steps: int = DEFAULT_PROFILE_STEPS
) -> Arguments:
    """Record with torch's profiler what the workers compute, for at most `max_steps` steps and those that are
    computed at once with the last of them.

    Args:
        directory: the trace's directory; None takes the engine argument `profile_dir`, else
            "nbengine-profiles" in the working directory.

    Raises:
        UtilityError: a profile is being recorded already, or the directory cannot be written to.
    """
    max_steps = require_int("max_steps", max_steps)
    require("max_steps", max_steps, 1 <= max_steps < 2**63, "an integer in [1, 2**63)")
    if directory is not None:
        directory = require_path("directory", directory)
    # The engine's working directory may be another one.
    return os.path.abspath(directory or caller.config.profile_dir or DEFAULT_PROFILE_DIR), max_steps


@engine_call(_profile_report, _merged_reports)
def stop_profile(caller: Caller) -> Arguments:
    """Write what has been recorded, as a Chrome trace, and return where it is and a summary by operation.

    Raises:
        UtilityError: no profile is being recorded, or it cannot be written.
    """
    del caller
    return ()


# Transcripts that an engine has kept; `nbengine.frontend.outputs.transcripts.Transcripts` makes text of them.


@engine_call(_as_given, _merged_records)
def transcripts(caller: Caller, session: str) -> Arguments:
    """Return the transcripts that have been kept of a session."""
    del caller
    return (session,)


@engine_call(_nothing, _first)
def read_transcripts(caller: Caller, session: str, request_ids: list[str]) -> Arguments:
    """Mark transcripts of a session as seen."""
    del caller
    return session, request_ids


@engine_call(int, sum)
def forget_transcripts(caller: Caller, session: str, request_ids: list[str] | None) -> Arguments:
    """Drop transcripts, or all of completions that have ended if `request_ids` is None;
    return how many were dropped."""
    del caller
    return session, request_ids


@engine_call(_as_given, _merged_counts)
def transcript_sessions(caller: Caller) -> Arguments:
    """Count the completions that have ended and that nobody has read, by session."""
    del caller
    return ()
