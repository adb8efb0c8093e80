"""A wrong call of `LLM` or `AsyncLLM` gets one clear error, and everything else goes on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.config import ModelConfig
from nbengine.errors import (
    EngineStartError,
    InvalidArgumentError,
    ModelLoadError,
    ModelNotFoundError,
    NBEngineError,
    NotSupportedError,
)
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.models.checkpoints.files import resolve_model
from tests.support.thorough import amount

Start = Callable[..., object]

MAX_MODEL_LEN = 512
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
NEIGHBOUR = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

OUT_OF_RANGE: dict[str, list[Any]] = {
    "n": [0, 1.5],
    "temperature": [-0.1, math.nan, math.inf, "hot"],
    "top_p": [0, 1.1, math.nan],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "seed": [-1, 2**63, 0.5],
    "max_tokens": [0, -1, 1.5],
    "min_tokens": [-1, 17, 1.5],
    "stop": ["", ["x", ""], [5]],
    "stop_token_ids": [[-1], [10**6], ["x"]],
    "ignore_eos": ["no"],
    "include_stop_str_in_output": [1],
    "logprobs": [-2, 10**6],
    "prompt_logprobs": [-2, 1.5],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1],
    "bad_words": [[5], "x"],
    "allowed_token_ids": [[-1]],
    "logit_bias": [{-1: 1.0}],
    "skip_special_tokens": [None],
    "spaces_between_special_tokens": [None],
    "detokenize": ["yes"],
    "output_kind": ["everything"],
    "structured_outputs": [{"json": 5}],
    "truncate_prompt_tokens": [0],
    "thinking_budget": [-1, 2**31, 1.5],
    "extra_args": [5, {"x": {1, 2}}, {5: "x"}],
}
WRONG_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt must be at least one token long"),
    ({"prompt_token_ids": []}, "prompt_token_ids must be at least one token id"),
    ({"prompt_token_ids": [1, -1]}, "token ids in [0, 258), got -1"),
    ({"prompt_token_ids": [1, 258]}, "token ids in [0, 258), got 258"),
    ({"prompt_token_ids": [1] * MAX_MODEL_LEN}, f"at most {MAX_MODEL_LEN - 1} tokens long"),
    ("x" * 600, "max_model_len=512"),
    ({"prompt": 5}, "prompt must be a string"),
]


def refusal(ask: Callable[[], object]) -> str:
    """The message of the error that `ask` raises: of one line, as a user would want to read."""
    with pytest.raises((InvalidArgumentError, NotSupportedError)) as caught:
        ask()
    message = str(caught.value)
    assert "\n" not in message
    return message


def ways_to_ask(llm: LLM, other: AsyncLLM) -> list[Callable[[Any, SamplingParams], object]]:
    return [lambda prompt, params: llm.generate(prompt, params, use_tqdm=False), other.submit]


@pytest.fixture(scope="module")
def llm(start_shared: Callable[..., LLM]) -> LLM:
    """An engine that takes 3 ms a step; it is shared, since what is refused must not harm it."""
    return start_shared(
        LLM,
        max_model_len=MAX_MODEL_LEN,
        knobs={"step_seconds": 0.003, "vocab_size": 258},
    )


@pytest.fixture
def other(llm: LLM) -> Iterator[AsyncLLM]:
    """A streaming client of the same engine."""
    client = AsyncLLM.attach(llm.llm_engine.engine_core.info.name)  # type: ignore[attr-defined]
    yield client
    client.detach()


@pytest.fixture
def neighbour(other: AsyncLLM) -> Iterator[RequestOutputCollector]:
    """A stream that runs while others ask wrongly; it must bring exactly its tokens."""
    collector = other.submit({"prompt_token_ids": [5]}, NEIGHBOUR)
    output = collector.get_blocking(timeout=60)
    yield collector
    while not output.finished:
        output = collector.get_blocking(timeout=60)
    assert output.outputs[0].token_ids == list(range(6, 206))
    assert output.outputs[0].finish_reason == "length"


def test_a_wrong_prompt_is_named_and_fails_alone(
    llm: LLM, other: AsyncLLM, neighbour: RequestOutputCollector
) -> None:
    for ask in ways_to_ask(llm, other):
        for prompt, message in WRONG_PROMPTS:
            assert message in refusal(lambda ask=ask, prompt=prompt: ask(prompt, GREEDY))
    assert llm.generate({"prompt_token_ids": [7]}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == [
        8,
        9,
        10,
    ]


def test_every_sampling_argument_out_of_range_is_named_and_fails_alone(
    llm: LLM, other: AsyncLLM, neighbour: RequestOutputCollector
) -> None:
    assert set(OUT_OF_RANGE) == set(SamplingParams.__struct_fields__) - {
        "eos_token_id",
        "bad_words_token_ids",
    }
    for ask in ways_to_ask(llm, other):
        for name, values in OUT_OF_RANGE.items():
            for value in values:
                message = refusal(
                    lambda ask=ask, name=name, value=value: ask("x", SamplingParams(**{name: value}))
                )
                assert name in message, (value, message)
    assert llm.generate({"prompt_token_ids": [7]}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == [
        8,
        9,
        10,
    ]


@pytest.mark.parametrize("start", [LLM, AsyncLLM])
def test_a_wrong_engine_argument_is_named(start: Start) -> None:
    for arguments, message in (
        ({"max_model_lenn": 5}, "max_model_lenn"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"block_size": 0}, "block_size must be"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be"),
    ):
        with pytest.raises((InvalidArgumentError, NotSupportedError, TypeError)) as caught:
            start("random-tiny", **arguments)
        assert message in str(caught.value)


# Models.


@pytest.fixture(scope="module")
def tiny() -> Path:
    """Directory of a sound model."""
    return Path(resolve_model(ModelConfig("random-tiny")).directory)


@pytest.fixture(scope="module")
def gguf_head() -> bytes:
    """The first bytes of a sound GGUF file: its metadata and some of its tensors."""
    with open(resolve_model(ModelConfig("smollm2-135m")).weights[0], "rb") as file:
        return file.read(4 << 20)


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of a sound model, to be broken."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def error_of(start: Start, model: object, **options: Any) -> NBEngineError:
    """The error of a start that must fail: of one line, since it was raised on purpose."""
    with pytest.raises(NBEngineError) as caught:
        start(str(model), **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("start", [LLM, AsyncLLM])
def test_an_unknown_model_is_named_with_what_there_could_be(start: Start) -> None:
    error = error_of(start, "no-such-model")
    assert isinstance(error, ModelNotFoundError)
    assert "'no-such-model'" in str(error)
    assert "smollm2-135m" in str(error)


@pytest.mark.parametrize("start", [LLM, AsyncLLM])
def test_a_broken_gguf_is_named_with_the_fault(start: Start, gguf_head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, fault in (
        (gguf_head, "truncated: tensor"),
        (gguf_head[:2000], "cannot fit into its 2000 bytes"),
        (gguf_head[:100] + b"\xff" * 300 + gguf_head[400:], "corrupt"),
        (b"no such thing", "not a GGUF file"),
        (b"", "not a GGUF file"),
    ):
        path.write_bytes(content)
        error = error_of(start, path)
        assert isinstance(error, ModelLoadError)
        assert str(error).startswith(f"{path}: ")
        assert fault in str(error)


def in_this_process(model: str, **options: Any) -> LLM:
    """Start an engine in this process: what it finds wrong, it finds there, too."""
    return LLM(model, multiprocess=False, **options)


@pytest.mark.parametrize(
    ("start", "damage"),
    [
        (LLM, lambda content: content[: len(content) // 2]),
        (AsyncLLM, lambda content: b"\xff" * len(content)),
    ],
    ids=["truncated", "corrupt"],
)
def test_a_broken_safetensors_file_is_named(
    start: Start, damage: Callable[[bytes], bytes], broken: Path
) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    error = error_of(start, broken)
    assert isinstance(error, EngineStartError)
    assert f"{path} is truncated, corrupt or no safetensors file" in str(error)


def test_what_a_log_says_besides_is_not_part_of_an_error_that_was_raised_on_purpose(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine warns of it, as it does of a machine that left it no time for a moment.
    monkeypatch.setenv("NBENGINE_LOG_LEVEL", "LOUD")
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    error = error_of(LLM, broken)
    assert isinstance(error, EngineStartError)
    assert error.log_tail == ""
    assert f"{path} is truncated" in str(error)


@pytest.mark.parametrize("start", [LLM, AsyncLLM])
def test_a_model_without_a_tokenizer_says_what_to_do(start: Start, broken: Path) -> None:
    for path in broken.glob("token*"):
        path.unlink()
    error = error_of(start, broken)
    assert isinstance(error, ModelLoadError)
    assert f"{broken} has no tokenizer.json; name another tokenizer" in str(error)


def test_a_broken_tokenizer_is_named(broken: Path) -> None:
    (broken / "tokenizer.json").write_text('{"version":')
    assert f"the tokenizer in {broken} cannot be loaded" in str(error_of(AsyncLLM, broken))


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        (
            LLM,
            {"hf_overrides": {"intermediate_size": 10**10}},
            "does not fit on cpu: its weights take about 13.97 TiB and ",
        ),
        (
            AsyncLLM,
            {"num_gpu_blocks_override": 2, "max_model_len": 2048},
            "lower max_model_len to at most 32, or raise num_gpu_blocks_override to at least 128",
        ),
        (
            amount(in_this_process, thorough=LLM),
            {"kv_cache_memory_bytes": 100},
            "no room for the KV cache: 100 B is available",
        ),
        (
            amount(in_this_process, thorough=AsyncLLM),
            {"kv_cache_memory_bytes": 1 << 50},
            "the KV cache does not fit on cpu",
        ),
    ],
    ids=["weights", "blocks", "one block", "cache"],
)
def test_a_model_that_does_not_fit_says_what_would(
    start: Start, options: dict[str, Any], message: str
) -> None:
    error = error_of(start, "random-tiny", device="cpu", **options)
    assert isinstance(error, EngineStartError)
    assert message in str(error)


def test_a_failed_start_leaves_an_engine_that_runs_alone(
    neighbour: RequestOutputCollector, broken: Path
) -> None:
    (broken / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    assert "NoSuchModel" in str(error_of(AsyncLLM, broken))
