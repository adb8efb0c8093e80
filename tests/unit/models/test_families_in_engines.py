"""Families and the backend of transformers in an engine: greedy tokens in float32 are those of transformers, cold,
from the prefix cache, and after preemption, in batches of prompts' chunks and single tokens.

What a family computes, however its requests are cut, is proven without an engine (`test_families.py`,
`test_recurrent_families.py`, `test_transformers_backend.py`). An engine sees the kinds of its layers: a usual run has each
mixture of them, `make thorough` and `make models` have each family.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recurrent_cases
import torch
import transformers
from family_cases import CASES
from random_models import assert_greedy, random_tokens, save_tokenizer
from transformers_cases import CLASSES, HEADS

from nbengine import LLM, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.registry import decoder_config
from tests.support.thorough import amount
from tests.tools.compared_models import THROUGH_TRANSFORMERS
from tests.unit.models.conftest import SIZES

LONGEST, BLOCK_SIZE = 128, 8
PROMPTS = [random_tokens(length) for length in (70, 34, 64, 90)]
"""LongRoPE has one kind of factors for all of them: that of more than 32 tokens."""
EDITED = [*PROMPTS[0][:48], 7, 8, 9, *PROMPTS[0][51:]]
SHARED = 48
NEW_TOKENS = 8
MANY_PROMPTS = [random_tokens(length, 1) for length in (37, 34, 33, 39, 35, 38, 40, 36)]
FEW_BLOCKS = 30
"""They hold the longest sequence in each of three groups, and some of these prompts, but not their answers."""
LONG_ANSWER, ANSWER = 40, 24
"""The tokens after which the blocks have run out and a wrong table shows: with several kinds of layers, and with one."""
SMALL_PROMPTS, FEWER_BLOCKS = [prompt[:4] for prompt in MANY_PROMPTS], 10
"""The same where all layers have a window: sequences that are longer than it need no more blocks."""
ALL_WINDOWS = (
    "mistral window",
    "phi3",
    "Starcoder2: a window in all layers",
    "PhiMoE: experts of another name, a window of the mask alone",
)
NAMES = [*CASES, *recurrent_cases.CASES, *CLASSES]
USUAL = [
    "mistral window",
    "gemma3",
    "gemma4",
    "llama dynamic",
    "phi3 long",
    "mixtral",
    "llama 4",
    "gpt-oss",
    "deepseek v3",
    "qwen3.5",
    "granite 4 moe",
    "granite 4 without attention",
    "mamba-2",
    "lfm2",
    "GPT-NeoX: parallel blocks, partial rotation",
    "Starcoder2: a window in all layers",
    "DeepSeek-V3: latent attention, groups of experts",
    "gpt-oss: sinks",
    "Llama 4: chunks in some layers",
]
"""Of every mixture of layers one, and of every kind of recurrent state and of positions that depend on a length."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved(name: str, directory: Path, random_model: Any) -> tuple[Any, dict[str, Any]]:
    """Save a model of transformers; gives it, and the arguments of its engine."""
    options = {}
    if name in CASES:
        oracle = random_model(CASES[name].kind, **CASES[name].settings)
        oracle.save_pretrained(directory)
    elif name in CLASSES:
        kind, settings = CLASSES[name]
        oracle = random_model(kind, HEADS.get(kind, "ForCausalLM"), **settings)
        oracle.save_pretrained(directory)
        options = {"model_impl": "transformers"}
    else:
        # The number of slots goes by their bytes: so that several requests run, states are not large beside blocks.
        sizes = recurrent_cases.CASES[name][1]
        smaller = {key: 8 for key in ("mamba_d_state", "state_size", "ssm_state_size") if key in sizes}
        heads = {"num_key_value_heads": 4} if "num_heads" not in sizes else {}
        oracle = recurrent_cases.saved(name, directory, random_model, **smaller, **heads)
    save_tokenizer(directory)
    return oracle, options


def run(llm: LLM, oracle: Any, prompts: list[list[int]], num_new: int = NEW_TOKENS) -> list[int]:
    """Check the tokens after all prompts; gives how many tokens of each were found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == num_new
        assert_greedy(oracle, prompt, output.outputs[0].token_ids)
    (stats,) = llm.stats().engines
    assert stats.num_free_blocks == stats.num_blocks
    llm.llm_engine.engine_core.engine_core.scheduler.check_integrity()  # type: ignore[attr-defined]
    return [output.num_cached_tokens for output in outputs]


def answer_length(name: str, oracle: Any) -> int:
    """Return how many tokens the answers need until their requests have not enough blocks."""
    kinds = getattr(oracle.config, "layer_types", None) or []
    is_plain = name not in recurrent_cases.CASES and {*kinds} <= {"full_attention"}
    return ANSWER if is_plain else LONG_ANSWER


def whole_blocks(prompt: list[int]) -> int:
    """Count the tokens of a prompt's blocks without its last token, which is computed always."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def kinds_of_layers(name: str, directory: Path) -> tuple[str, frozenset[str], int]:
    """Return what an engine sees of a model: who computes, what its layers keep, and in how many parts."""
    cases = {case: (each.kind, each.settings) for case, each in CASES.items()}
    kind, settings = {**cases, **recurrent_cases.CASES, **CLASSES}[name]
    model_class = getattr(transformers, kind + HEADS.get(kind, "ForCausalLM"))
    config = model_class.config_class(**{**SIZES, **settings})
    config.architectures = [model_class.__name__]
    config.save_pretrained(directory)
    model_impl = "transformers" if name in CLASSES else "nbengine"
    found = decoder_config(load_hf_config(ModelConfig(directory=str(directory), model_impl=model_impl)))
    return model_impl, frozenset(rule.kind for rule in found.cache_rules()), found.cache_parts


def test_a_usual_run_has_every_mixture_of_layers(tmp_path: Path) -> None:
    every = {name: kinds_of_layers(name, tmp_path / str(place)) for place, name in enumerate(NAMES)}
    usual = {every[name] for name in USUAL}
    assert [name for name, kinds in every.items() if kinds not in usual] == []


@pytest.mark.parametrize("name", amount(USUAL, thorough=NAMES))
def test_tokens_are_those_of_transformers_cold_warm_and_preempted(
    name: str, tmp_path: Path, random_model: Any, compared: Any
) -> None:
    oracle, options = saved(name, tmp_path, random_model)
    settings = {"dtype": "float32", "max_model_len": LONGEST, "block_size": BLOCK_SIZE, "max_num_seqs": 8}
    settings |= {"max_num_batched_tokens": 64, **options}
    with LLM(str(tmp_path), multiprocess=False, kv_cache_memory_bytes=16 << 20, **settings) as llm:
        assert run(llm, oracle, PROMPTS) == [0] * len(PROMPTS)
        assert run(llm, oracle, PROMPTS) == [whole_blocks(prompt) for prompt in PROMPTS]
        # Recurrent layers may have kept no state there before.
        (shared,) = run(llm, oracle, [EDITED])
        assert shared <= SHARED
        assert run(llm, oracle, [EDITED]) == [whole_blocks(EDITED)]
    few, prompts = (FEWER_BLOCKS, SMALL_PROMPTS) if name in ALL_WINDOWS else (FEW_BLOCKS, MANY_PROMPTS)
    settings |= {"num_gpu_blocks_override": few, "max_num_batched_tokens": 16, "max_model_len": 104}
    with LLM(str(tmp_path), multiprocess=False, **settings) as llm:
        run(llm, oracle, prompts, answer_length(name, oracle))
        (stats,) = llm.stats().engines
        # Without attention there are no blocks, and requests that run keep their slots.
        assert stats.num_preemptions > 0 or not stats.num_blocks
    compared(THROUGH_TRANSFORMERS if name in CLASSES else oracle, "engine")
