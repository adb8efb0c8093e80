"""Prompts and parameters: what is accepted, completed and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from nbengine.config import EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NotSupportedError
from nbengine.frontend.input_processor import InputProcessor, prompt_text
from nbengine.sampling_params import PoolingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

MAX_MODEL_LEN = 64


def params_of(processor: InputProcessor, params: SamplingParams, prompt: Any = "the fox") -> SamplingParams:
    completed = processor.process_inputs("r", prompt, params).sampling_params
    assert completed is not None
    return completed


@pytest.mark.parametrize("shape", ["text", "text dict", "tokens", "tokens and text", "numpy tokens"])
def test_every_form_of_a_prompt_gives_its_tokens(
    input_processor: InputProcessor, tokenizer: PreTrainedTokenizerFast, shape: str
) -> None:
    ids = tokenizer.encode("the fox")
    prompt: Any = {
        "text": "the fox",
        "text dict": {"prompt": "the fox"},
        "tokens": {"prompt_token_ids": ids},
        "tokens and text": {"prompt_token_ids": ids, "prompt": "the fox"},
        "numpy tokens": {"prompt_token_ids": np.array(ids)},
    }[shape]
    request = input_processor.process_inputs("r", prompt, SamplingParams())
    assert request.prompt_token_ids == ids
    assert all(type(token) is int for token in request.prompt_token_ids)
    assert prompt_text(prompt) == (None if shape in ("tokens", "numpy tokens") else "the fox")


def test_the_cache_salt_reaches_the_request(input_processor: InputProcessor) -> None:
    request = input_processor.process_inputs("r", {"prompt": "x", "cache_salt": "mine"}, SamplingParams())
    assert request.cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must be at least one token long"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be at least one token id"),
        ({"prompt_token_ids": [1, -1]}, r"token ids in \[0, \d+\), got -1"),
        ({"prompt_token_ids": [10**6]}, r"token ids in \[0, \d+\), got 1000000"),
        ({"prompt_token_ids": ["1"]}, "a list of token ids"),
        ({"prompt_token_ids": [1.5]}, "a list of token ids"),
        ({"prompt_token_ids": [True]}, "a list of token ids"),
        ({"prompt_token_ids": 5}, "a list of token ids"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"prompt": "x", "images": []}, r"got \['images'\]"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({}, "prompt must be a string"),
        (None, "prompt must be a string"),
        ([1, 2], "prompt_token_ids"),
        ("\ud800", "UTF-8"),
    ],
)
def test_a_wrong_prompt_is_named(input_processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        input_processor.process_inputs("r", prompt, SamplingParams())


def test_wrong_types_are_type_errors(input_processor: InputProcessor) -> None:
    for prompt, params in ((3, SamplingParams()), ("x", {"temperature": 1}), ("x", PoolingParams())):
        with pytest.raises(InvalidTypeError):
            input_processor.process_inputs("r", prompt, params)  # type: ignore[arg-type]


def test_a_prompt_may_fill_the_context_but_for_one_token(input_processor: InputProcessor) -> None:
    fitting = {"prompt_token_ids": [1] * (MAX_MODEL_LEN - 1)}
    assert params_of(input_processor, SamplingParams(max_tokens=None), fitting).max_tokens == 1
    with pytest.raises(InvalidArgumentError, match=r"at most 63 tokens long .max_model_len=64.*got 64$"):
        params_of(input_processor, SamplingParams(), {"prompt_token_ids": [1] * MAX_MODEL_LEN})


def test_max_tokens_is_clipped_to_the_room_that_is_left(input_processor: InputProcessor) -> None:
    prompt = {"prompt_token_ids": [1] * 60}
    assert params_of(input_processor, SamplingParams(max_tokens=None), prompt).max_tokens == 4
    assert params_of(input_processor, SamplingParams(max_tokens=3), prompt).max_tokens == 3
    clipped = params_of(input_processor, SamplingParams(max_tokens=100, min_tokens=50), prompt)
    assert (clipped.max_tokens, clipped.min_tokens) == (4, 4)


def test_the_callers_parameters_stay_as_they_are(input_processor: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[7])
    completed = params_of(input_processor, params)
    assert completed is not params
    assert params == SamplingParams(max_tokens=None, stop_token_ids=[7])


def test_end_tokens_come_from_tokenizer_and_generation_config(
    input_processor: InputProcessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    completed = params_of(input_processor, SamplingParams(stop_token_ids=[9]))
    assert completed.eos_token_id == end == tokenizer.eos_token_id
    assert completed.stop_token_ids == [9, user]
    assert params_of(input_processor, SamplingParams(stop_token_ids=[user])).stop_token_ids == [user]
    assert params_of(input_processor, SamplingParams(ignore_eos=True)).stop_token_ids == []


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": [10**6]},
        {"allowed_token_ids": [1, 10**6]},
        {"allowed_token_ids": [-1]},
        {"logit_bias": {10**6: 1.0}},
        {"logit_bias": {-1: 1.0}},
    ],
    ids=str,
)
def test_a_token_outside_the_vocabulary_is_refused(
    input_processor: InputProcessor, options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be token ids in .*, got -?\d+$"):
        params_of(input_processor, SamplingParams(**options))


def test_bad_words_are_banned_at_the_beginning_and_after_a_space(
    input_processor: InputProcessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    words = ["fox", " the", "東京", "over the"]
    found = params_of(input_processor, SamplingParams(bad_words=words)).bad_words_token_ids
    assert found is not None
    expected = []
    for word in words:
        expected += [ids(word.lstrip()), ids(" " + word.lstrip())]
    assert [word for word in found if word not in expected] == []
    for word in expected:
        assert any(word[-len(banned) :] == banned for banned in found)
    assert ids("fox") != ids(" fox")
    assert params_of(input_processor, SamplingParams()).bad_words_token_ids is None


def test_parameters_of_the_logits_reach_the_request(input_processor: InputProcessor) -> None:
    options: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "allowed_token_ids": [1, 2],
        "logit_bias": {1: 1.0},
        "extra_args": {"x": 1},
    }
    completed = params_of(input_processor, SamplingParams(**options))
    assert {name: getattr(completed, name) for name in options} == options


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"truncate_prompt_tokens": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_is_not_offered_yet_is_named_with_its_value(
    input_processor: InputProcessor, options: dict[str, Any]
) -> None:
    ((name, value),) = options.items()
    with pytest.raises(NotSupportedError) as caught:
        params_of(input_processor, SamplingParams(**options))
    assert str(caught.value).startswith(f"{name}={value!r} ")


def test_prompt_embeds_are_not_offered_yet(input_processor: InputProcessor) -> None:
    with pytest.raises(NotSupportedError, match="prompt_embeds"):
        input_processor.process_inputs("r", {"prompt_embeds": np.zeros((2, 2))}, SamplingParams())


def test_parameters_changed_after_construction_are_checked_again(input_processor: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidArgumentError, match="temperature"):
        params_of(input_processor, params)


def test_request_ids_are_made_unique_and_remember_the_callers(input_processor: InputProcessor) -> None:
    seen = set()
    for _ in range(50):
        request = input_processor.process_inputs("mine", "the fox", SamplingParams())
        input_processor.assign_request_id(request)
        assert request.external_req_id == "mine"
        assert len(request.request_id) == len("mine-") + 8
        seen.add(request.request_id)
    assert len(seen) == 50


def test_priority_and_rank_are_checked(
    input_processor: InputProcessor, engine_config: EngineConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert input_processor.process_inputs("r", "x", SamplingParams(), priority=-3).priority == -3
    assert (
        input_processor.process_inputs("r", "x", SamplingParams(), data_parallel_rank=0).data_parallel_rank
        == 0
    )
    with pytest.raises(InvalidArgumentError, match="data_parallel_rank"):
        input_processor.process_inputs("r", "x", SamplingParams(), data_parallel_rank=1)
    first_come = InputProcessor(EngineConfig(model=engine_config.model), tokenizer, MAX_MODEL_LEN)
    with pytest.raises(InvalidArgumentError, match="scheduling_policy='priority'"):
        first_come.process_inputs("r", "x", SamplingParams(), priority=1)


def test_defaults_come_from_the_generation_config_and_are_valid(input_processor: InputProcessor) -> None:
    defaults = input_processor.default_sampling_params()
    assert defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 33}
    params = SamplingParams(**defaults, output_kind=RequestOutputKind.DELTA)
    assert params_of(input_processor, params).temperature == 0.6


@pytest.mark.parametrize("request_id", ["", None, 3])
def test_a_request_id_is_a_string(input_processor: InputProcessor, request_id: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id"):
        input_processor.process_inputs(request_id, "x", SamplingParams())
