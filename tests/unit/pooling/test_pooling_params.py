"""Pooling parameters: checked, completed from the model's files, and carried over the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from nbengine.config import EngineConfig, ModelConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, ModelLoadError
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.pooling_inputs import PoolingInputs
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.models.configs.pooling_config import PoolingDefaults, load_pooling_defaults, supported_tasks
from nbengine.sampling_params import PoolingParams, SamplingParams

BERT = {"architectures": ["BertModel"], "hidden_size": 16}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16}
TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "generate"),
        ("pooling", "max"),
        ("dimensions", 0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("second_segment_start", -1),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be "):
        PoolingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("normalize", 1), ("use_activation", "yes"), ("dimensions", 2.0), ("truncate_prompt_tokens", True)],
)
def test_a_value_of_the_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match=rf"^{name} must be "):
        PoolingParams(**{name: value})


def test_what_a_model_can_be_asked_for_follows_from_its_architecture() -> None:
    assert supported_tasks(LLAMA) == ("generate", "embed", "score", "encode")
    assert supported_tasks(BERT) == ("embed", "score", "encode")
    reranker = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert supported_tasks(reranker) == ("score", "classify", "encode")
    classifier = {"architectures": ["BertForSequenceClassification"]}
    assert supported_tasks(classifier) == ("classify", "encode")


def write_modules(directory: Path, *modules: dict[str, str], pooling: dict[str, Any] | None = None) -> None:
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_without_sentence_transformers_files_the_kind_of_model_decides(tmp_path: Path) -> None:
    assert load_pooling_defaults(str(tmp_path), BERT) == PoolingDefaults("cls", True)
    assert load_pooling_defaults(str(tmp_path), LLAMA) == PoolingDefaults("last", True)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "weightedmean"}, None),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
    ],
)
def test_sentence_transformers_files_decide(
    config: dict[str, Any], pooling: str | None, tmp_path: Path
) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    write_modules(tmp_path, TRANSFORMER, POOLING, pooling=config)
    assert load_pooling_defaults(str(tmp_path), BERT) == PoolingDefaults(pooling, False, 99)
    write_modules(tmp_path, TRANSFORMER, POOLING, NORMALIZE)
    assert load_pooling_defaults(str(tmp_path), LLAMA) == PoolingDefaults(pooling, True, 99)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"type": "sentence_transformers.models.Dense", "path": "3"}]', "modules Dense are not supported"),
        ('{"type": "x"}', "does not hold a list"),
        ("[1]", "does not hold a list"),
        ("[", "not valid JSON"),
    ],
)
def test_files_that_would_change_the_vectors_unseen_are_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_pooling_defaults(str(tmp_path), BERT)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("models"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def processor(directory: Path, tokenizer: PreTrainedTokenizerFast, *tasks: str) -> InputProcessor:
    config = EngineConfig(model=ModelConfig("tiny", directory=str(directory)))
    return InputProcessor(
        config,
        tokenizer,
        TextEncoder(tokenizer.backend_tokenizer),
        32,
        tasks or ("generate", "embed", "score", "encode"),
    )


def test_a_request_leaves_with_everything_said(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    inputs = processor(directory, tokenizer)
    given = PoolingParams()
    request = inputs.process_inputs("r", "hello", given)
    assert request.sampling_params is None
    assert request.pooling_params == PoolingParams(task="embed", pooling="last", normalize=True)
    assert given == PoolingParams()
    states = inputs.process_inputs("r", "hello", PoolingParams(task="encode")).pooling_params
    assert states == PoolingParams(task="encode", normalize=False)
    head = processor(directory, tokenizer, "score", "classify", "encode")
    asked = head.process_inputs("r", "hello", PoolingParams()).pooling_params
    assert asked == PoolingParams(task="score", pooling="last", use_activation=True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (PoolingParams(task="classify"), "task must be one of generate, embed, score, encode"),
        (PoolingParams(task="score"), "a score of this model needs two texts"),
        (
            PoolingParams(task="embed", use_activation=True),
            "use_activation must be None with the task 'embed'",
        ),
        (PoolingParams(task="encode", dimensions=3), "dimensions must be None with the task 'encode'"),
        (PoolingParams(task="encode", pooling="cls"), "pooling must be None with the task 'encode'"),
        (PoolingParams(dimensions=65), "dimensions must be at most 64"),
        (PoolingParams(truncate_prompt_tokens=33), r"at most max_model_len \(32\)"),
    ],
)
def test_what_has_no_meaning_is_refused(
    params: PoolingParams, message: str, directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        processor(directory, tokenizer).process_inputs("r", "hello", params)


def test_a_model_that_only_pools_is_not_asked_to_generate(
    directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"task must be one of embed, score.*got 'generate'"):
        processor(directory, tokenizer, "embed", "score").process_inputs("r", "hello", SamplingParams())


def test_a_model_with_a_pooling_of_its_own_kind_needs_an_explicit_one(
    tmp_path: Path, directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write_modules(tmp_path, TRANSFORMER, POOLING, pooling={"pooling_mode_max_tokens": True})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    inputs = processor(tmp_path, tokenizer)
    with pytest.raises(InvalidArgumentError, match="pooling must be mean, cls or last"):
        inputs.process_inputs("r", "hello", PoolingParams())
    assert inputs.process_inputs("r", "hello", PoolingParams(pooling="cls")).pooling_params is not None


@pytest.mark.parametrize(
    "prompt", ["x" * 50, {"prompt": "x" * 50}, {"prompt_token_ids": [120] * 50}], ids=["text", "dict", "ids"]
)
def test_prompts_of_every_form_are_truncated_to_their_first_tokens(
    prompt: Any, directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = processor(directory, tokenizer)
    full = (
        tokenizer("x" * 50)["input_ids"] if not isinstance(prompt, dict) or "prompt" in prompt else [120] * 50
    )
    for length, kept in ((-1, 32), (32, 32), (7, 7)):
        params = PoolingParams(truncate_prompt_tokens=length)
        assert inputs.process_inputs("r", prompt, params).prompt_token_ids == full[:kept]
    with pytest.raises(InvalidArgumentError, match="at most 32 tokens long"):
        inputs.process_inputs("r", prompt, PoolingParams())


def test_a_text_shorter_than_the_limit_keeps_its_tokens(
    directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs: PoolingInputs = processor(directory, tokenizer).pooling
    truncated = inputs.truncated("hello", PoolingParams(truncate_prompt_tokens=20))
    assert truncated == {"prompt": "hello", "prompt_token_ids": tokenizer("hello")["input_ids"]}


@pytest.mark.parametrize("shape", [(3,), (384,), (20, 384)])
def test_requests_and_results_survive_the_wire(shape: tuple[int, ...]) -> None:
    params = PoolingParams(task="embed", pooling="mean", normalize=True, dimensions=3, second_segment_start=2)
    request = EngineCoreRequest("r", [1, 2, 3], None, params)
    frames = MsgpackEncoder().encode(request)
    assert MsgpackDecoder[EngineCoreRequest](EngineCoreRequest).decode(frames) == request
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    output = EngineCoreOutput("r", [], FinishReason.STOP, pooling_output=data)
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
    assert len(frames) == (1 if data.nbytes < 256 else 2)
    (arrived,) = MsgpackDecoder[EngineCoreOutputs](EngineCoreOutputs).decode(frames).outputs
    assert arrived.pooling_output.dtype == np.float32
    assert not arrived.pooling_output.flags.writeable
    np.testing.assert_array_equal(arrived.pooling_output, data)


def test_parameters_from_the_wire_are_checked_again() -> None:
    raw = msgspec.msgpack.encode({"task": "embed", "dimensions": -4})
    with pytest.raises(msgspec.ValidationError, match="dimensions must be at least 1"):
        msgspec.msgpack.decode(raw, type=PoolingParams)
