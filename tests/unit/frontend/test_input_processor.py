"""Prompts and parameters: what is accepted, completed and refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nbengine.config import EngineConfig, ModelConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, ModelLoadError, NotSupportedError
from nbengine.frontend.requests.input_processor import InputProcessor, _can_structure, prompt_text
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.frontend.requests.reasoning import ReasoningMarks
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

MAX_MODEL_LEN = 64
HIDDEN_SIZE = 8


def params_of(processor: InputProcessor, params: SamplingParams, prompt: Any = "the fox") -> SamplingParams:
    completed = processor.process_inputs("r", prompt, params).sampling_params
    assert completed is not None
    return completed


@pytest.mark.parametrize(
    "shape", ["text", "text dict", "tokens", "tokens and text", "numpy tokens", "list", "tuple"]
)
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
        "list": ids,
        "tuple": tuple(ids),
    }[shape]
    request = input_processor.process_inputs("r", prompt, SamplingParams())
    assert request.prompt_token_ids == ids
    assert all(type(token) is int for token in request.prompt_token_ids)
    assert prompt_text(prompt) == ("the fox" if "text" in shape else None)


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
        ([], "prompt_token_ids must be at least one token id"),
        ([1, "a"], "prompt_token_ids must be a list of token ids, got 'a'"),
        ([1, 10**6], r"token ids in \[0, \d+\), got 1000000"),
        ({1, 2}, "prompt must be a string"),
        (
            {"prompt_token_ids": [1], "prompt_embeds": np.zeros((1, 8))},
            "either prompt_token_ids or prompt_embeds",
        ),
        ("\ud800", "UTF-8"),
    ],
)
def test_a_wrong_prompt_is_named(input_processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        input_processor.process_inputs("r", prompt, SamplingParams())


def test_wrong_types_are_type_errors(input_processor: InputProcessor) -> None:
    for prompt, params in ((3, SamplingParams()), ("x", {"temperature": 1}), ("x", None)):
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


def test_structured_outputs_need_their_library(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert params_of(input_processor, params).structured_outputs == params.structured_outputs
    _can_structure.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotSupportedError, match=r"pip install nbengine\[structured\]"):
        params_of(input_processor, params)
    assert params_of(input_processor, SamplingParams()).structured_outputs is None
    _can_structure.cache_clear()


@pytest.mark.parametrize(
    "embeds",
    [
        np.ones((3, HIDDEN_SIZE), np.float16),
        np.ones((3, HIDDEN_SIZE), np.float64),
        np.ones((3, HIDDEN_SIZE), ">f4"),
        torch.ones(3, HIDDEN_SIZE),
        torch.ones(3, HIDDEN_SIZE, dtype=torch.bfloat16),
        torch.ones(HIDDEN_SIZE, 3).T,
        torch.nn.Parameter(torch.ones(3, HIDDEN_SIZE)),
    ],
    ids=lambda embeds: f"{type(embeds).__name__} {embeds.dtype}",
)
def test_embeddings_take_the_place_of_tokens(input_processor: InputProcessor, embeds: Any) -> None:
    prompt = {"prompt_embeds": embeds, "prompt": "shown", "cache_salt": "s"}
    request = input_processor.process_inputs("r", prompt, SamplingParams(max_tokens=None))
    assert request.prompt_token_ids is None
    assert request.cache_salt == "s"
    assert len(request.prompt_embeds) == 3
    assert (request.prompt_embeds == embeds).all()
    assert not getattr(request.prompt_embeds, "requires_grad", False)
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == MAX_MODEL_LEN - 3
    assert prompt_text(prompt) == "shown"
    assert prompt_text({"prompt_embeds": embeds}) is None


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (None, "prompt_embeds must be a torch tensor or a numpy array, got None"),
        ([[1.0] * HIDDEN_SIZE], "a torch tensor or a numpy array"),
        (np.ones(HIDDEN_SIZE), r"of shape \[prompt tokens, hidden size 8\].*got \(8,\)"),
        (np.ones((1, 2, HIDDEN_SIZE)), r"of shape .*got \(1, 2, 8\)"),
        (np.ones((2, HIDDEN_SIZE + 1)), r"of shape .*got \(2, 9\)"),
        (np.ones((0, HIDDEN_SIZE)), r"at least one token, got \(0, 8\)"),
        (np.ones((2, HIDDEN_SIZE), np.int64), "of dtype float16, bfloat16, float32, float64, got 'int64'"),
        (np.ones((2, HIDDEN_SIZE), np.complex128), "got 'complex128'"),
        (np.ones((2, HIDDEN_SIZE), object), "got 'object'"),
        (torch.ones(2, HIDDEN_SIZE, dtype=torch.int8), "got 'int8'"),
        (torch.ones(2, HIDDEN_SIZE).to_sparse(), "dense"),
        (np.full((2, HIDDEN_SIZE), np.nan), "prompt_embeds must be finite"),
        (torch.full((2, HIDDEN_SIZE), -torch.inf, dtype=torch.bfloat16), "prompt_embeds must be finite"),
        (np.ones((MAX_MODEL_LEN, HIDDEN_SIZE)), "prompt must be at most 63 tokens long"),
    ],
)
def test_wrong_embeddings_are_named(input_processor: InputProcessor, embeds: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        input_processor.process_inputs("r", {"prompt_embeds": embeds}, SamplingParams())


def test_embeddings_have_no_prompt_logprobs(input_processor: InputProcessor) -> None:
    prompt = {"prompt_embeds": np.ones((2, HIDDEN_SIZE))}
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs must be None with prompt_embeds"):
        input_processor.process_inputs("r", prompt, SamplingParams(prompt_logprobs=1))


THOUGHTFUL = ReasoningMarks(endings=("</t>",), closing="\n</t>", openings=("<t>",))


def test_a_budget_of_reasoning_goes_with_the_tokens_of_its_marks(input_processor: InputProcessor) -> None:
    prompt = {"prompt": "the fox", "reasoning": THOUGHTFUL}
    request = input_processor.process_inputs("r", prompt, SamplingParams(thinking_budget=9))
    assert request.reasoning is not None
    assert request.reasoning.closing == input_processor.encoder.encode("\n</t>")
    assert request.reasoning.ending_texts == ["</t>"]
    assert input_processor.process_inputs("r", prompt, SamplingParams()).reasoning is None
    with pytest.raises(InvalidArgumentError, match=r"thinking_budget must be None.*got 9"):
        input_processor.process_inputs("r", "the fox", SamplingParams(thinking_budget=9))


def test_an_answer_that_goes_on_says_how_much_of_it_is_written(input_processor: InputProcessor) -> None:
    prompt = {"prompt": "the fox", "reasoning": THOUGHTFUL}
    request = input_processor.process_inputs("r", prompt, SamplingParams(thinking_budget=9))
    input_processor.continue_answer(request, [5, 6, 7])
    assert request.reasoning is not None
    assert request.reasoning.num_written == 3


@pytest.mark.parametrize("budget", [-1, 2**31, 1.5, "9", True])
def test_a_budget_is_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match="thinking_budget"):
        SamplingParams(thinking_budget=budget)


@pytest.mark.parametrize(
    ("truncate", "kept"), [(None, 10), (1, 1), (4, 4), (10, 10), (50, 10), (MAX_MODEL_LEN - 1, 10), (-1, 10)]
)
def test_truncation_keeps_the_last_tokens(
    input_processor: InputProcessor, tokenizer: PreTrainedTokenizerFast, truncate: int | None, kept: int
) -> None:
    params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=None)
    ids = list(range(20, 30))
    request = input_processor.process_inputs("r", {"prompt_token_ids": ids}, params)
    assert request.prompt_token_ids == ids[-kept:]
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == MAX_MODEL_LEN - kept
    rows = np.arange(10.0).repeat(HIDDEN_SIZE).reshape(10, HIDDEN_SIZE)
    request = input_processor.process_inputs("r", {"prompt_embeds": rows}, params)
    assert (request.prompt_embeds == rows[-kept:]).all()
    text = "the quick brown fox jumps over the lazy dog"
    request = input_processor.process_inputs("r", text, params)
    whole = tokenizer.encode(text)
    assert request.prompt_token_ids == (whole if truncate in (None, -1) else whole[-(truncate or 0) :])


def test_minus_one_truncates_to_what_leaves_room_for_one_token(input_processor: InputProcessor) -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=5)
    request = input_processor.process_inputs("r", [1] * 10 + [2] * (MAX_MODEL_LEN - 1), params)
    assert request.prompt_token_ids == [2] * (MAX_MODEL_LEN - 1)
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 1


def test_truncation_to_more_than_there_is_room_for_is_refused(input_processor: InputProcessor) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"truncate_prompt_tokens must be -1 or in \[1, 63\].*got 64"
    ):
        input_processor.process_inputs("r", "x", SamplingParams(truncate_prompt_tokens=MAX_MODEL_LEN))
    with pytest.raises(InvalidArgumentError, match="at most 63 tokens long"):
        input_processor.process_inputs("r", [1] * MAX_MODEL_LEN, SamplingParams())


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


def test_a_priority_is_checked_and_a_rank_is_kept(
    input_processor: InputProcessor, engine_config: EngineConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert input_processor.process_inputs("r", "x", SamplingParams(), priority=-3).priority == -3
    assert (
        input_processor.process_inputs("r", "x", SamplingParams(), data_parallel_rank=0).data_parallel_rank
        == 0
    )
    with pytest.raises(InvalidArgumentError, match="priority must be an integer of at most 64 bits"):
        input_processor.process_inputs("r", "x", SamplingParams(), priority=2**63)
    first_come = InputProcessor(
        EngineConfig(model=engine_config.model),
        tokenizer,
        TextEncoder(tokenizer.backend_tokenizer),
        MAX_MODEL_LEN,
    )
    with pytest.raises(InvalidArgumentError, match="scheduling_policy='priority'"):
        first_come.process_inputs("r", "x", SamplingParams(), priority=1)


def test_defaults_come_from_the_generation_config_and_are_valid(input_processor: InputProcessor) -> None:
    defaults = input_processor.default_sampling_params()
    assert defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 33}
    params = SamplingParams(**defaults, output_kind=RequestOutputKind.DELTA)
    assert params_of(input_processor, params).temperature == 0.6


def processor_with(
    directory: Path, tokenizer: PreTrainedTokenizerFast, content: dict[str, Any], **settings: str
) -> InputProcessor:
    """The input processor of a copy of the model with another generation_config.json."""
    (directory / "generation_config.json").write_text(json.dumps(content))
    model = ModelConfig(model="tiny", directory=str(directory), **settings)
    return InputProcessor(
        EngineConfig(model=model), tokenizer, TextEncoder(tokenizer.backend_tokenizer), MAX_MODEL_LEN
    )


@pytest.fixture
def copied(model_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory, tmp_path / "copied"))


def test_generation_config_none_gives_neutral_defaults_and_keeps_the_end_tokens(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    content = {"eos_token_id": [0, 1], "temperature": 0.6, "top_p": 0.5, "stop_strings": ["END", "STOP"]}
    auto = processor_with(copied, tokenizer, content)
    assert auto.default_sampling_params() == {"temperature": 0.6, "top_p": 0.5, "stop": ["END", "STOP"]}
    none = processor_with(copied, tokenizer, content, generation_config="none")
    assert none.default_sampling_params() == {}
    for processor in (auto, none):
        completed = params_of(processor, SamplingParams())
        assert {completed.eos_token_id, *completed.stop_token_ids} == {0, 1}
    one = processor_with(copied, tokenizer, {"stop_strings": "END", "top_k": None})
    assert SamplingParams(**one.default_sampling_params()).stop == ["END"]


def test_a_model_that_does_not_sample_is_greedy_unless_told_otherwise(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    content = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}
    greedy = processor_with(copied, tokenizer, content)
    assert greedy.default_sampling_params() == {"temperature": 0.0, "repetition_penalty": 1.1}
    for drawn in ({}, {"do_sample": None}, {"do_sample": True}):
        processor = processor_with(copied, tokenizer, {"temperature": 0.6, **drawn})
        assert processor.default_sampling_params() == {"temperature": 0.6}


def test_what_is_not_applied_is_named(
    copied: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "min_length": 0, "suppress_tokens": [], "top_h": None}
    processor_with(copied, tokenizer, neutral)
    assert caplog.messages == []
    processor_with(copied, tokenizer, neutral | {"no_repeat_ngram_size": 3}, generation_config="none")
    assert caplog.messages == []
    processor_with(copied, tokenizer, neutral | {"no_repeat_ngram_size": 3, "suppress_tokens": [7, 8]})
    (message,) = caplog.messages
    assert "generation_config.json says no_repeat_ngram_size=3, suppress_tokens=[7, 8]" in message


def test_a_default_that_is_not_possible_is_told_with_its_file_and_the_way_around_it(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    processor = processor_with(copied, tokenizer, {"temperature": -3.0})
    with pytest.raises(
        ModelLoadError, match=r"generation_config\.json that cannot be used: temperature.*'none'"
    ):
        processor.default_sampling_params()


def test_several_end_tokens_of_config_json_count_where_the_generation_config_has_none(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 0, 9]}))
    completed = params_of(processor_with(copied, tokenizer, {"temperature": 0.5}), SamplingParams())
    assert (completed.eos_token_id, completed.stop_token_ids) == (tokenizer.eos_token_id, [7, 9])


def test_tokens_that_the_model_does_not_have_are_no_end_tokens_and_no_prompt(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = json.loads((copied / "config.json").read_text())
    size = tokenizer.backend_tokenizer.get_vocab_size() - 5
    (copied / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    larger = load_tokenizer(ModelConfig(directory=str(copied)))
    larger.add_special_tokens({"eos_token": "<|beyond|>"})
    assert larger.eos_token_id >= size
    processor = processor_with(copied, larger, {"eos_token_id": [size, 1]})
    completed = params_of(processor, SamplingParams(min_tokens=2))
    assert (completed.eos_token_id, completed.stop_token_ids) == (1, [])
    with pytest.raises(
        InvalidArgumentError, match=r"prompt must be text whose tokens the model has \('<.beyond.>' is"
    ):
        processor.process_inputs("r", "the fox<|beyond|>", SamplingParams())
    with pytest.raises(InvalidArgumentError, match="bad_words must be text whose tokens the model has"):
        processor.process_inputs("r", "the fox", SamplingParams(bad_words=["<|beyond|>"]))
    with pytest.raises(InvalidArgumentError, match="prompt_token_ids must be token ids in"):
        processor.process_inputs("r", [size], SamplingParams())
    assert processor.process_inputs("r", "the fox", SamplingParams()).prompt_token_ids


@pytest.mark.parametrize("request_id", ["", None, 3])
def test_a_request_id_is_a_string(input_processor: InputProcessor, request_id: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id"):
        input_processor.process_inputs(request_id, "x", SamplingParams())
