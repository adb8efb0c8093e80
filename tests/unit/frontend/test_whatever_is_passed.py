"""Whatever is passed to a method of `LLM`: an answer, or one error that names the argument; and the engine goes on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbengine import LLM, NBEngineError, PoolingParams, SamplingParams
from nbengine.errors import NotSupportedError, UtilityError
from nbengine.sampling_params import StructuredOutputsParams
from tests.support.odd_values import ANYTHING, LARGE, SURROGATE, short_line
from tests.support.thorough import amount

ONE = SamplingParams(max_tokens=1, temperature=0.0)
QUIET = {"use_tqdm": False}
POOLED: dict[str, Any] = {"truncate_prompt_tokens": None, "pooling_params": None, **QUIET}
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS: dict[str, dict[str, Any]] = {
    "generate": {
        "prompts": "x",
        "sampling_params": ONE,
        "priority": None,
        "on_prompt_progress": None,
        **QUIET,
    },
    "chat": {
        "messages": MESSAGES,
        "sampling_params": ONE,
        "tools": TOOLS,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "chat_template_kwargs": None,
        "reasoning_parser": "auto",
        "tool_parser": "auto",
        "on_prompt_progress": None,
        **QUIET,
    },
    "embed": {"prompts": "x", **POOLED},
    "classify": {"prompts": "x", **POOLED},
    "encode": {"prompts": "x", "pooling_task": "encode", **POOLED},
    "score": {"text_1": "x", "text_2": "y", **POOLED},
    "call_utility": {"method": "is_sleeping", "timeout": None},
    "metrics": {"last": "1h", "rank": None, "timeout": 60.0},
    "start_profile": {"max_steps": 1},
    "check_health": {"timeout": 60.0},
    "reset_prefix_cache": {"reset_running_requests": False},
    "pause_generation": {"mode": "keep", "clear_cache": False},
    "pause": {"mode": "keep", "clear_cache": False},
    "sleep": {"level": 1, "mode": "abort", "hold": False},
    "wake_up": {"tags": None},
}
ELSEWHERE = {"dashboard", "scale", "shutdown"}
"""The methods that need an engine of processes, which those of `AsyncLLM` do, too, and the end."""
ARGUMENTS = [(method, argument) for method, arguments in CALLS.items() for argument in arguments]
WORDS = {
    "prompts": ["prompt"],
    # Texts are prompts of the requests that their score is made of.
    "text_1": ["text", "prompt"],
    "text_2": ["text", "prompt"],
    "messages": ["message"],
    "tools": ["tool"],
}
"""The words for one of several values, of which an error speaks."""


NOT_HERE = {"classify": ["task"], "metrics": ["multiprocess"]}
"""Words of the errors about methods that this engine cannot carry out, whatever it is passed."""


def test_every_argument_of_every_public_method_is_tried() -> None:
    public = {
        # A directory would be made wherever a value says.
        name: {*inspect.signature(method).parameters} - {"self", "args", "directory"}
        for name, method in inspect.getmembers(LLM, callable)
        if not name.startswith("_") and name not in ELSEWHERE
    }
    assert {name: names for name, names in public.items() if names} == {
        name: {*arguments} for name, arguments in CALLS.items()
    }


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    profiles = str(tmp_path_factory.mktemp("profiles"))
    options: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "profile_dir": profiles}
    with LLM("random-tiny", multiprocess=False, **options) as llm:
        yield llm


def passed(llm: LLM, method: str, argument: str, value: Any) -> None:
    """Pass a value to a method; whatever comes of it, the engine answers afterwards."""
    arguments = {**CALLS[method], argument: value}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(llm, method)(**arguments)
    except NBEngineError as error:
        message = short_line(error)
        words = [argument, *WORDS.get(argument, []), *NOT_HERE.get(method, [])]
        assert any(word in message for word in words), message
    finally:
        if method == "start_profile":
            with contextlib.suppress(UtilityError):
                # Most values are refused before anything is recorded.
                llm.stop_profile()
        llm.resume_generation()
        llm.wake_up()
    assert llm.llm_engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(("method", "argument"), ARGUMENTS, ids=lambda name: name)
def test_an_odd_value_is_taken_or_refused_by_the_name_of_its_argument(
    llm: LLM, method: str, argument: str
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
    @settings(max_examples=amount(12, thorough=1000), deadline=None)
    def try_it(value: Any) -> None:
        passed(llm, method, argument, value)

    try_it()
    assert llm.generate("x", ONE, **QUIET)[0].finished


@pytest.mark.parametrize("copy", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda copy: copy.__name__)
def test_an_engine_is_no_data_and_says_so(llm: LLM, copy: Callable[[Any], Any]) -> None:
    for engine in (llm.llm_engine, [llm]) if copy.__name__ != "copy" else (llm.llm_engine,):
        with pytest.raises(NotSupportedError, match=r"cannot be pickled or copied; .*AsyncLLM\.attach"):
            copy(engine)


PARTS = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]),
    ANYTHING | st.just("user") | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": ANYTHING})),
    max_size=4,
)


@given(st.lists(PARTS, min_size=1, max_size=3))
@settings(max_examples=amount(25, thorough=3000), deadline=None)
def test_messages_of_any_shape_are_answered_or_refused(llm: LLM, messages: list[Any]) -> None:
    passed(llm, "chat", "messages", messages)


KINDS = {
    SamplingParams: [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")],
    PoolingParams: [name for name in PoolingParams.__struct_fields__ if not name.startswith("_")],
    StructuredOutputsParams: [
        name for name in StructuredOutputsParams.__struct_fields__ if not name.startswith("_")
    ],
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_parameters_of_requests_are_taken_or_refused_by_name(kind: type) -> None:
    @given(st.dictionaries(st.sampled_from(KINDS[kind]), ANYTHING, max_size=2))
    @settings(max_examples=amount(50, thorough=5000), deadline=None)
    def make(given_: dict[str, Any]) -> None:
        try:
            kind(**given_)
        except NBEngineError as error:
            message = short_line(error)
            assert any(name in message for name in (*given_, "structured_outputs")), message

    make()
