"""Whatever is passed to a method of `LLM`: an answer, or one error that names the argument; and the engine goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbengine import LLM, NBEngineError, PoolingParams, SamplingParams
from nbengine.sampling_params import StructuredOutputsParams
from tests.support.odd_values import ANYTHING, LARGE, SURROGATE, short_line
from tests.support.thorough import amount

ONE = SamplingParams(max_tokens=1, temperature=0.0)
QUIET = {"use_tqdm": False}
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS: dict[str, dict[str, Any]] = {
    "generate": {"prompts": "x", "sampling_params": ONE, "priority": None, "on_prompt_progress": None},
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
    },
    "embed": {"prompts": "x", "truncate_prompt_tokens": None, "pooling_params": None},
    "encode": {
        "prompts": "x",
        "truncate_prompt_tokens": None,
        "pooling_task": "encode",
        "pooling_params": None,
    },
    "score": {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": None, "pooling_params": None},
    "check_health": {"timeout": 60.0},
    "reset_prefix_cache": {"reset_running_requests": False},
    "pause_generation": {"mode": "keep", "clear_cache": False},
    "sleep": {"level": 1, "mode": "abort"},
    "wake_up": {"tags": None},
}
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


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("random-tiny", multiprocess=False, num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        yield llm


def passed(llm: LLM, method: str, argument: str, value: Any) -> None:
    """Pass a value to a method; whatever comes of it, the engine answers afterwards."""
    arguments = {**CALLS[method], argument: value}
    if method in ("generate", "chat", "embed", "encode", "score"):
        arguments |= QUIET
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(llm, method)(**arguments)
    except NBEngineError as error:
        message = short_line(error)
        assert any(word in message for word in [argument, *WORDS.get(argument, [])]), message
    finally:
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
    @settings(max_examples=amount(15, thorough=1000), deadline=None)
    def try_it(value: Any) -> None:
        passed(llm, method, argument, value)

    try_it()
    assert llm.generate("x", ONE, **QUIET)[0].finished


PARTS = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]),
    ANYTHING | st.just("user") | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": ANYTHING})),
    max_size=4,
)


@given(st.lists(PARTS, min_size=1, max_size=3))
@settings(max_examples=amount(60, thorough=3000), deadline=None)
def test_messages_of_any_shape_are_answered_or_refused(llm: LLM, messages: list[Any]) -> None:
    passed(llm, "chat", "messages", messages)


KINDS = {
    PoolingParams: [name for name in PoolingParams.__struct_fields__ if not name.startswith("_")],
    StructuredOutputsParams: [
        name for name in StructuredOutputsParams.__struct_fields__ if not name.startswith("_")
    ],
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_parameters_of_pooling_and_of_structure_are_taken_or_refused_by_name(kind: type) -> None:
    @given(st.dictionaries(st.sampled_from(KINDS[kind]), ANYTHING, max_size=2))
    @settings(max_examples=amount(200, thorough=5000), deadline=None)
    def make(given_: dict[str, Any]) -> None:
        try:
            kind(**given_)
        except NBEngineError as error:
            message = short_line(error)
            assert any(name in message for name in (*given_, "structured_outputs")), message

    make()
