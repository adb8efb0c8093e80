"""A prepared step of a model with several cache groups gives the bits of the eager path, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbengine.models.families.decoder import DecoderForCausalLM
from tests.support.thorough import in_turn
from tests.unit.models.prepared_batches import Batches, assert_same_bits_of_all_steps


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


FULL, WINDOW = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {"head_dim": 32, "intermediate_size": 128}
WINDOWS = {**SIZES, "sliding_window": 40, "layer_types": [WINDOW, FULL, WINDOW]}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 40}
MIXED = {"layer_types": ["linear_attention", FULL, "linear_attention", "linear_attention"]}
QWEN: dict[str, Any] = {
    **SIZES,
    **MIXED,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LFM2: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {**SIZES, "sliding_window": 40}),
    "qwen3": ("Qwen3", {**WINDOWS, "use_sliding_window": True}),
    "gemma": ("Gemma", {**SIZES, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3 with biases": ("Gemma3", {**GEMMA, "attention_bias": True}),
    "qwen3.5": ("Qwen3_5", {**QWEN, **PARTIAL, "head_dim": 64}),
    "qwen3.5 with biases": ("Qwen3_5", {**QWEN, **PARTIAL, "head_dim": 64, "attention_bias": True}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 with biases": ("Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4}),
}


@pytest.mark.parametrize(("name", "num_threads", "quantization"), in_turn(MODELS, [1, 3], ["int4", "int8"]))
def test_a_prepared_step_has_the_bits_of_the_eager_path(
    name: str,
    num_threads: int,
    quantization: str,
    tmp_path: Path,
    load: Any,
    random_model: Any,
    threads: Callable[[int], None],
) -> None:
    threads(num_threads)
    kind, settings = MODELS[name]
    random_model(kind, **settings).save_pretrained(tmp_path)
    model: DecoderForCausalLM = load(tmp_path, torch.bfloat16, quantization=quantization)
    batches = Batches(model, torch.int8 if num_threads == 3 else None)
    batches.has_logits = name != "gemma2"
    assert_same_bits_of_all_steps(batches)
