"""Whatever is passed to a method of `AsyncLLM`: an answer, or one error that names the argument; and the engine goes
on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings

from nbengine import AsyncLLM, NBEngineError, PoolingParams, SamplingParams
from nbengine.errors import EngineStalledError, UtilityError
from tests.support.odd_values import ANYTHING, LARGE, SURROGATE, short_line
from tests.support.thorough import amount

ONE = SamplingParams(max_tokens=1, temperature=0.0)
REQUEST: dict[str, Any] = {"prompt": "x", "sampling_params": ONE, "request_id": None, "priority": 0}
SENT: dict[str, Any] = {
    **REQUEST,
    "data_parallel_rank": None,
    "transcript": None,
    "trace_headers": None,
    "output_interval": 0.0,
}
POOLED: dict[str, Any] = {"prompt": "x", "pooling_params": None, "request_id": None, "priority": 0}
CALLS: dict[str, dict[str, Any]] = {
    "generate": {**SENT, "on_prompt_progress": None},
    "open_stream": {**SENT, "on_prompt_progress": None},
    "submit": {**SENT, "written": ()},
    "encode": {**POOLED, "pooling_params": PoolingParams()},
    "embed": POOLED,
    "submit_pooling": POOLED,
    "render_chat": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "chat_template_kwargs": None,
        "reasoning_parser": "auto",
        "tool_parser": "auto",
        "truncated": False,
    },
    "abort": {"request_id": "nobody"},
    "abort_soon": {"request_id": "nobody"},
    "call_utility": {"method": "is_sleeping"},
    "call_utility_blocking": {"method": "is_sleeping", "timeout": None},
    "check_health": {"timeout": 60.0},
    "metrics": {"last": "1h", "rank": None, "timeout": 60.0},
    "history": {"last": "1h"},
    "decode": {"token_ids": [1]},
    "read_transcripts": {"request_ids": ["nobody"], "session": None},
    "forget_transcripts": {"request_ids": ["nobody"], "session": None},
    "forget_transcripts_blocking": {"request_ids": ["nobody"], "session": None},
    "transcripts": {"session": None},
    "transcripts_blocking": {"session": None},
    "stats_within": {"timeout": 60.0},
    "place_within": {"request_ids": ["nobody"], "timeout": 60.0},
    "reset_prefix_cache": {"reset_running_requests": False},
    "pause": {"mode": "keep", "clear_cache": False},
    "pause_generation": {"mode": "keep", "clear_cache": False},
    "sleep": {"level": 1, "mode": "abort", "hold": False},
    "wake_up": {"tags": None},
    "start_profile": {"max_steps": 1},
}
ELSEWHERE = {
    "attach",
    "dashboard",
    "follow_stats",
    "from_engine_args",
    "observe_requests",
    "scale",
    "scale_blocking",
    "shutdown",
}
"""The methods of which tests of their own pass odd values, and `shutdown`, which ends the engine."""
ARGUMENTS = [(method, argument) for method, arguments in CALLS.items() for argument in arguments]
WORDS = {"messages": ["message"], "tools": ["tool"]}


def test_every_argument_of_every_public_method_is_tried() -> None:
    public = {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(AsyncLLM, callable)
        if not name.startswith("_") and name not in ELSEWHERE
    }
    named = {name: [each for each in names if each not in ("self", "args")] for name, names in public.items()}
    assert {name: set(names) for name, names in named.items() if names} == {
        name: {*arguments, *(["directory"] if name == "start_profile" else [])}
        for name, arguments in CALLS.items()
    }


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(no_leftovers_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    profiles = str(tmp_path_factory.mktemp("profiles"))
    llm = AsyncLLM("random-tiny", num_gpu_blocks_override=64, max_num_seqs=4, profile_dir=profiles)
    yield llm
    llm.shutdown()


async def used(llm: AsyncLLM, method: str, arguments: dict[str, Any]) -> None:
    """Call a method, and take all that comes of it."""
    given_back = getattr(llm, method)(**arguments)
    if inspect.isasyncgen(given_back):
        async for _ in given_back:
            pass
    elif method == "open_stream":
        stream = await given_back
        try:
            while not stream.finished:
                await stream.get()
        finally:
            stream.close()
    elif inspect.isawaitable(given_back):
        await given_back
    elif method == "submit":
        while not (await given_back.get()).finished:
            pass
    elif method == "submit_pooling":
        await asyncio.wrap_future(given_back)


async def passed(llm: AsyncLLM, method: str, argument: str, value: Any) -> None:
    """Pass a value to a method; whatever comes of it, the engine answers afterwards."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await used(llm, method, {**CALLS[method], argument: value})
    except (EngineStalledError, TimeoutError):
        # The number of seconds was possible, and too short.
        assert argument == "timeout"
    except NBEngineError as error:
        message = short_line(error)
        assert any(word in message for word in [argument, *WORDS.get(argument, [])]), message
    finally:
        if method == "start_profile":
            with contextlib.suppress(UtilityError):
                # Most values are refused before anything is recorded.
                await llm.stop_profile()
        if method in ("pause", "pause_generation", "sleep"):
            await llm.resume_generation()
            await llm.wake_up()


@pytest.mark.parametrize(("method", "argument"), ARGUMENTS, ids=lambda name: name)
def test_an_odd_value_is_taken_or_refused_by_the_name_of_its_argument(
    llm: AsyncLLM, runner: asyncio.Runner, method: str, argument: str
) -> None:
    @given(ANYTHING)
    @example(SURROGATE)
    @example([SURROGATE])
    @example({SURROGATE: SURROGATE})
    @example(LARGE)
    @example([LARGE])
    @example(object())
    @example(b"x")
    @example(float("nan"))
    @settings(max_examples=amount(10, thorough=300), deadline=None)
    def try_it(value: Any) -> None:
        runner.run(passed(llm, method, argument, value))

    try_it()
    runner.run(used(llm, "generate", REQUEST))


@pytest.mark.parametrize("odd", [SURROGATE, "a\0b", "x" * 10**5, b"x", 5, float("nan"), [], {}])
def test_values_that_are_no_directory_observer_or_size_are_refused_by_name(
    llm: AsyncLLM, runner: asyncio.Runner, odd: Any
) -> None:
    def size_of_something() -> Any:
        return runner.run(llm.scale("x" if odd == 5 else odd))

    calls: dict[str, Callable[[], Any]] = {
        "directory": lambda: runner.run(llm.start_profile(odd)),
        "observer": lambda: llm.observe_requests(odd),
        "stat_loggers": lambda: llm.follow_stats(odd),
        "data_parallel_size": size_of_something,
        "timeout": lambda: llm.scale_blocking(1, timeout=-1 if odd == 5 else odd),
    }
    for argument, call in calls.items():
        with pytest.raises(NBEngineError, match=argument) as refused:
            call()
        short_line(refused.value)
    runner.run(used(llm, "generate", REQUEST))
