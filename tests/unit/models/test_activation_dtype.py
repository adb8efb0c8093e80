"""With `activation_dtype="int16"` a model with quantised weights computes nearly what its weights' values say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import save_tokenizer

from nbengine import LLM
from nbengine.config import CacheConfig, ModelConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models import loading
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import PackedWeight
from tests.unit.models.prepared_batches import Batches, assert_same_bits_of_all_steps
from tests.unit.models.test_alone_and_together import PROMPTS, answers
from tests.unit.models.test_prepared_groups import MODELS

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4)).tolist()
CPU = torch.device("cpu")


def saved(name: str, path: Path, random_model: Any) -> Path:
    kind, settings = MODELS[name]
    random_model(kind, **settings).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["mistral", "qwen2 moe", "granite"])
@pytest.mark.parametrize("rounding", ["int4", "int8"])
def test_logits_are_nearly_those_of_the_weights_values(
    name: str, rounding: str, tmp_path: Path, random_model: Any, load: Any, make_runner: Any
) -> None:
    path = saved(name, tmp_path, random_model)
    eight, sixteen = (load(path, quantization=rounding, activation_dtype=kind) for kind in ("auto", "int16"))
    exact = load(path, asked="float32")
    slots = exact.weight_slots()
    with torch.inference_mode():
        for slot_name, slot in sixteen.weight_slots().items():
            assert slots[slot_name].copy_from(slot) or slot.form is None
    few, more, expected = (make_runner(model).step({"a": TOKENS})["a"] for model in (eight, sixteen, exact))
    assert float((more - expected).std()) < 0.03 * float((few - expected).std())


@pytest.mark.parametrize(
    "name", ["mistral", "qwen2 moe", "gpt-oss", "gemma4", "lfm2 moe", "deepseek 3 moe", "nemotron-h"]
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_prepared_step_has_the_bits_of_the_eager_path(
    name: str,
    num_threads: int,
    tmp_path: Path,
    random_model: Any,
    load: Any,
    threads: Callable[[int], None],
) -> None:
    threads(num_threads)
    path = saved(name, tmp_path, random_model)
    model: DecoderForCausalLM = load(path, torch.bfloat16, quantization="int4", activation_dtype="int16")
    assert model._prepared is not None
    assert model.activation_bits == 16
    assert_same_bits_of_all_steps(Batches(model))


@pytest.mark.parametrize("name", ["mistral", "deepseek 3 moe"])
def test_answers_are_the_same_alone_together_cached_and_in_chunks(
    name: str, tmp_path: Path, random_model: Any
) -> None:
    path = saved(name, tmp_path, random_model)
    save_tokenizer(path)
    options: dict[str, Any] = {
        "multiprocess": False,
        "dtype": "bfloat16",
        "quantization": "int4",
        "activation_dtype": "int16",
        "max_model_len": 128,
        "kv_cache_memory_bytes": 16 << 20,
    }
    with LLM(str(path), **options) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS) == alone
    with LLM(str(path), max_num_batched_tokens=7, max_num_seqs=7, **options) as llm:
        assert answers(llm, PROMPTS) == alone


def test_only_the_output_projection_takes_16_bits_by_default(
    tmp_path: Path, random_model: Any, load: Any
) -> None:
    model: DecoderForCausalLM = load(saved("mistral", tmp_path, random_model), quantization="int4")
    assert model.activation_bits == 8
    assert model.lm_head is not None
    head, query = model.lm_head.rows.weight, model.layers[0].mixer.qkv_proj.runs[0][1]
    assert isinstance(head, PackedWeight)
    assert (head.activation_bits, query.activation_bits) == (16, 8)


@pytest.mark.parametrize(
    ("name", "asked", "in_pairs", "expected"),
    [
        ("mistral", "auto", True, torch.bfloat16),
        ("mistral", "auto", False, torch.float16),
        ("mistral", "int16", True, torch.float16),
        ("deepseek 3 moe", "auto", True, torch.float16),
    ],
)
def test_the_kv_cache_is_bfloat16_where_attention_multiplies_pairs_of_it(
    name: str,
    asked: str,
    in_pairs: bool,
    expected: torch.dtype,
    tmp_path: Path,
    random_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "attends_in_pairs", lambda head_dim, block_size: in_pairs)
    path = saved(name, tmp_path, random_model)
    config = resolve_model(
        ModelConfig(
            model=str(path), tokenizer="none", device="cpu", quantization="int4", activation_dtype=asked
        )
    )
    found = loading.resolve_precision(config, CacheConfig(), load_hf_config(config), CPU)
    assert found.kv_dtype is expected


def test_heads_and_blocks_of_whole_vectors_alone_are_in_pairs() -> None:
    from nbengine.kernels.cpu.jit import host_processor
    from nbengine.kernels.cpu.pairs import multiplies_pairs
    from nbengine.kernels.dispatch import attends_in_pairs

    has_pairs = multiplies_pairs(host_processor())
    assert attends_in_pairs(64, 16) is has_pairs
    assert not attends_in_pairs(72, 16)
    assert not attends_in_pairs(64, 8)


def test_16_bits_are_refused_where_nothing_is_rounded(tmp_path: Path, random_model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^activation_dtype must be 'auto' with device='cuda'"):
        ModelConfig(activation_dtype="int16", device="cuda")
    with pytest.raises(InvalidArgumentError, match=r"^activation_dtype must be 'auto' with dtype='float32'"):
        ModelConfig(activation_dtype="int16", dtype="float32")
    with pytest.raises(
        InvalidArgumentError, match=r"^activation_dtype must be one of auto, int16, got 'fp8'"
    ):
        ModelConfig(activation_dtype="fp8")
    encoder = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    transformers.BertModel(encoder).save_pretrained(tmp_path / "encoder")
    for path in (saved("mistral", tmp_path / "dense", random_model), tmp_path / "encoder"):
        config = resolve_model(ModelConfig(model=str(path), tokenizer="none", activation_dtype="int16"))
        with pytest.raises(InvalidArgumentError, match=r"'auto' for a model without quantised weights"):
            loading.resolve_precision(config, CacheConfig(), load_hf_config(config), CPU)
