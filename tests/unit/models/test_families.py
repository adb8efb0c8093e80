"""Every family against its class of transformers in float32: token by token, alone and in mixed batches, in chunks, far
beyond the windows, and divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, FamilyCase
from parallel_support import ThreadWorld
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.models.prepared.steps import PreparedSteps
from tests.support.thorough import amount, combinations, in_turn

LENGTH = 75
"""Tokens of the longest request: nine windows."""
SHORT = amount(24, thorough=LENGTH)
"""Tokens of a request that comes in many small pieces."""


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def saved(case: FamilyCase, directory: Path, random_model: Any, **settings: Any) -> Any:
    """Save a model of transformers, and return it."""
    head = settings.pop("head", "ForCausalLM")
    oracle = random_model(case.kind, head, **{**case.settings, **settings})
    oracle.save_pretrained(directory)
    return oracle


def loaded(case: FamilyCase, directory: Path, load: Any, **options: Any) -> Any:
    return load(directory, max_model_len=case.max_model_len, **options)


def expected_of(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def chunked(runner: Any, tokens: list[int], size: int, others: dict[str, list[int]]) -> Tensor:
    """The logits of a request that comes in chunks, other requests in the batch of the first."""
    parts = []
    for first in range(0, len(tokens), size):
        chunks = {f"{size}": tokens[first : first + size], **(others if first == 0 else {})}
        parts.append(runner.step(chunks)[f"{size}"])
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "tied"), in_turn(CASES, [False, True]))
def test_every_family_gives_the_tokens_of_transformers_however_a_request_is_cut(
    name: str, tied: bool, tmp_path: Path, load: Any, make_runner: Any, random_model: Any, compared: Any
) -> None:
    case = CASES[name]
    oracle = saved(case, tmp_path, random_model, tie_word_embeddings=tied)
    runner = make_runner(loaded(case, tmp_path, load))
    # Transformers chooses a LongRoPE by the length of each call.
    lengths = (40, 33) if name in ("phi3 long", "phi4-mini") else (21, 1)
    others = {f"other {length}": tokens_of(length, length) for length in lengths}
    tokens = tokens_of(LENGTH)
    expected = expected_of(oracle, tokens)
    for found_name, logits in runner.step(others).items():
        assert_same(logits, expected_of(oracle, others[found_name]))
    for size, length in ((LENGTH, LENGTH), (64, LENGTH), (7, SHORT), (1, SHORT)):
        found = chunked(runner, tokens[:length], size, {f"beside {size}": tokens_of(5, size)})
        assert_same(found, expected[:length])
    compared(oracle, "cut")


def divisions() -> Iterator[tuple[str, tuple[int, int]]]:
    """The numbers of ranks of a stage, and of stages, of each family."""
    sizes = amount([(2, 2)], thorough=[(2, 1), (1, 2), (2, 2)])
    with_stages = [name for name, case in CASES.items() if case.has_stages]
    yield from combinations(with_stages, sizes)
    yield from ((name, (2, 1)) for name in CASES if name not in with_stages)


@pytest.mark.parametrize(("name", "sizes"), [*divisions()])
def test_every_family_gives_them_on_ranks(
    name: str,
    sizes: tuple[int, int],
    tmp_path: Path,
    load: Any,
    make_runner: Any,
    random_model: Any,
    compared: Any,
) -> None:
    case, (tp_size, pp_size) = CASES[name], sizes
    oracle = saved(case, tmp_path, random_model)
    world = ThreadWorld(tp_size, pp_size)
    runners = [
        make_runner(loaded(case, tmp_path, load, parallel=state), parallel=state) for state in world.states
    ]
    tokens = tokens_of(LENGTH)

    def run(state: Any) -> Tensor:
        runner, parts = runners[state.layout.rank], []
        for chunk in (tokens[:50], tokens[50:51], tokens[51:]):
            step = runner.step if state.layout.is_last_stage else runner.hidden
            parts.append(step({"a": chunk})["a"])
        return torch.cat(parts)

    for logits in world.run(run)[world.states[-1].layout.pp_rank * tp_size :]:
        assert_same(logits, expected_of(oracle, tokens))
    compared(oracle, *["tensor"] * (tp_size > 1), *["pipeline"] * (pp_size > 1))


@pytest.mark.parametrize("name", ["gemma2", "phi3", "smollm3", "glm4"])
def test_classification_heads_give_the_labels_of_transformers(
    name: str, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    case, tokens = CASES[name], tokens_of(LENGTH)
    oracle = saved(
        case, tmp_path, random_model, head="ForSequenceClassification", num_labels=3, pad_token_id=0
    )
    model = loaded(case, tmp_path, load)
    hidden = make_runner(model).hidden({"a": tokens})["a"]
    with torch.inference_mode():
        found, expected = model.classify(hidden[-1:]), oracle(torch.tensor([tokens])).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_with_biases_or_weighted_inputs_are_summed_in_16_bits_too(
    name: str, dtype: torch.dtype, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    expected = expected_of(saved(CASES[name], tmp_path, random_model), tokens_of(LENGTH))
    runner = make_runner(loaded(CASES[name], tmp_path, load, dtype=dtype))
    found = runner.step({"a": tokens_of(LENGTH)})["a"].float()
    # Logits spread by about 1.
    assert (found - expected).abs().mean() < 0.1


def test_gpt_oss_does_not_classify(tmp_path: Path, load: Any, random_model: Any) -> None:
    saved(CASES["gpt-oss"], tmp_path, random_model)
    with pytest.raises(ModelLoadError, match="classification head is not supported; GptOssForCausalLM runs"):
        load(tmp_path, hf_overrides={"architectures": ["GptOssForSequenceClassification"]})


@pytest.mark.parametrize(
    "name",
    [
        "mistral window",
        "gemma3",
        "phi3",
        "olmo2",
        "granite",
        "glm4",
        "deepseek v2",
        "deepseek v3 halves",
        "llama 4",
        "llama 4 without experts",
    ],
)
def test_weights_that_are_rounded_to_eight_bits_stay_near(
    name: str, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    case, tokens = CASES[name], tokens_of(LENGTH)
    oracle = saved(case, tmp_path, random_model)
    model = load(tmp_path, torch.bfloat16, quantization="int8")
    assert any(slot.form is not None for slot in model.weight_slots().values())
    # The kernels of these tests are not those of the CPU, so that no step is prepared.
    found = make_runner(model).step({"a": tokens})["a"].float()
    expected = expected_of(oracle, tokens)
    assert (found - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize(
    ("name", "is_prepared"),
    [
        ("mistral window", True),
        ("qwen2 yarn", True),
        ("gemma2", True),
        ("gemma3", True),
        ("gemma4", False),
        ("olmo2", False),
        ("glm4", False),
        ("llama 4 without experts", False),
    ],
)
def test_steps_are_prepared_of_nothing_but_what_their_operations_do(
    name: str, is_prepared: bool, tmp_path: Path, load: Any, random_model: Any
) -> None:
    # Prepared steps need sizes that vectors divide.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    settings = {} if "head_dim" not in CASES[name].settings else {"head_dim": 32}
    saved(CASES[name], tmp_path, random_model, **(sizes if name == "qwen2 yarn" else settings))
    model = load(tmp_path, torch.bfloat16, quantization="int8")
    assert PreparedSteps.covers(model) is is_prepared
