"""A prepared step of a model with several cache groups gives the bits of the eager path, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import GLM_4_MOE, GROWING

from nbengine.models.families.decoder import DecoderForCausalLM
from tests.support.thorough import in_turn
from tests.unit.models.prepared_batches import Batches, assert_same_bits_of_all_steps

FULL, WINDOW = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {"head_dim": 32, "intermediate_size": 128}
WINDOWS = {**SIZES, "sliding_window": 40, "layer_types": [WINDOW, FULL, WINDOW]}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 40}
GEMMA_4: dict[str, Any] = {
    **SIZES,
    "sliding_window": 40,
    "num_hidden_layers": 6,
    "layer_types": [WINDOW, FULL] * 3,
    "global_head_dim": 64,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
FEW_HEADS: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
GEMMA_4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
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
LFM2_EXPERTS: dict[str, Any] = {
    **LFM2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_dense_layers": 1,
}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
STATE_SPACE: dict[str, Any] = {
    **MIXED,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
}
BIASES_AND_LIMITS: dict[str, Any] = {
    "mamba_n_groups": 1,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "attention_bias": True,
    "time_step_limit": [0.3, 0.9],
}
GRANITE_4: dict[str, Any] = {
    **SCALES,
    **STATE_SPACE,
    "num_local_experts": 0,
    "shared_intermediate_size": 128,
}
FOUR_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 64}
QWEN_EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
GPT_OSS: dict[str, Any] = {
    **WINDOWS,
    "layer_types": [WINDOW, FULL, WINDOW],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "attention_bias": True,
    "swiglu_limit": 1.0,
}
LATENTS: dict[str, Any] = {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
NEMOTRON: dict[str, Any] = {
    **SIZES,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", FULL, "mlp", "linear_attention"],
    "num_hidden_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
}
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "moe", "linear_attention"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
}
BAMBA: dict[str, Any] = {**STATE_SPACE, "attn_layer_indices": [1], "num_attention_heads": 2}
del BAMBA["layer_types"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {**SIZES, "sliding_window": 40}),
    "ministral 3": ("Ministral3", {**SIZES, "rope_parameters": GROWING}),
    "qwen3": ("Qwen3", {**WINDOWS, "use_sliding_window": True}),
    "gemma": ("Gemma", {**SIZES, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3 with biases": ("Gemma3", {**GEMMA, "attention_bias": True}),
    "gemma4": ("Gemma4", GEMMA_4),
    "gemma4 of few heads": ("Gemma4", {**GEMMA_4, **FEW_HEADS, "attention_bias": True}),
    "gemma4 moe": ("Gemma4", {**GEMMA_4, **FEW_HEADS, **GEMMA_4_EXPERTS}),
    "qwen3.5": ("Qwen3_5", {**QWEN, **PARTIAL, "head_dim": 64}),
    "qwen3.5 with biases": ("Qwen3_5", {**QWEN, **PARTIAL, "head_dim": 64, "attention_bias": True}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 with biases": ("Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2 moe": ("Lfm2Moe", {**LFM2_EXPERTS, "routed_scaling_factor": 2.5}),
    "lfm2 moe that corrects nothing": ("Lfm2Moe", {**LFM2_EXPERTS, "use_expert_bias": False}),
    "granite": ("Granite", {**SIZES, **SCALES, "mlp_bias": True, "vocab_size": 99}),
    "granite 4": ("GraniteMoeHybrid", GRANITE_4),
    "granite 4 with biases and limits": ("GraniteMoeHybrid", {**GRANITE_4, **BIASES_AND_LIMITS}),
    "granite 4 moe": ("GraniteMoeHybrid", {**GRANITE_4, **FOUR_EXPERTS, "num_local_experts": 4}),
    "qwen2 moe": ("Qwen2Moe", QWEN_EXPERTS),
    "qwen2 moe, dense layers between": ("Qwen2Moe", {**QWEN_EXPERTS, "decoder_sparse_step": 2}),
    "qwen3.5 moe": ("Qwen3_5Moe", {**QWEN, **PARTIAL, **QWEN_EXPERTS, "head_dim": 64}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "deepseek 2 moe": ("DeepseekV2", {**LATENTS, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek 3 moe": ("DeepseekV3", {**LATENTS, **GROUPS, "q_lora_rank": 96}),
    "deepseek 3 that turns halves": (
        "DeepseekV3",
        {**LATENTS, "first_k_dense_replace": 3, "rope_interleave": False, "num_attention_heads": 3},
    ),
    "glm4 moe": ("Glm4Moe", {**SIZES, **GLM_4_MOE, "head_dim": 64, "use_qk_norm": True}),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "mlp_bias": True}),
    "nemotron 3 moe": ("NemotronH", {**NEMOTRON, **NEMOTRON_EXPERTS}),
    "bamba": ("Bamba", {**SIZES, **BAMBA, "head_dim": 64}),
    "olmo2": ("Olmo2", {**SIZES, "num_key_value_heads": 1, "pad_token_id": 0}),
    "olmo3": ("Olmo3", {**WINDOWS, "pad_token_id": 0}),
    "olmoe": ("Olmoe", {**QWEN_EXPERTS, "hidden_size": 128}),
    "exaone 4": ("Exaone4", WINDOWS),
    "ernie 4.5": ("Ernie4_5", {**SIZES, "use_bias": True}),
    "seed-oss": ("SeedOss", {**SIZES, "attention_out_bias": True, "mlp_bias": True}),
    "glm4": ("Glm4", {**SIZES, **PARTIAL, "head_dim": 64, "attention_bias": True, "pad_token_id": 0}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
}


WITHOUT_EXPERTS = [name for name in MODELS if "moe" not in name and name != "gpt-oss"]


@pytest.mark.parametrize(
    ("name", "num_threads", "asked"),
    [
        *in_turn(MODELS, [1, 3], [{"quantization": kind} for kind in ("int4", "int8")]),
        *in_turn(WITHOUT_EXPERTS, [1, 3], [{"dtype": kind} for kind in (torch.bfloat16, torch.float16)]),
    ],
)
def test_a_prepared_step_has_the_bits_of_the_eager_path(
    name: str,
    num_threads: int,
    asked: dict[str, Any],
    tmp_path: Path,
    load: Any,
    random_model: Any,
    threads: Callable[[int], None],
) -> None:
    threads(num_threads)
    kind, settings = MODELS[name]
    random_model(kind, **settings).save_pretrained(tmp_path)
    model: DecoderForCausalLM = load(tmp_path, **{"dtype": torch.bfloat16, **asked})
    assert model._prepared is not None
    is_uneven = model.config.latent is not None or any(layer.head_dim for layer in model.config.layers)
    is_rounded = "quantization" in asked and num_threads == 3 and not is_uneven
    assert_same_bits_of_all_steps(Batches(model, torch.int8 if is_rounded else None))


def test_experts_of_16_bits_are_not_covered(tmp_path: Path, load: Any, random_model: Any) -> None:
    kind, settings = MODELS["qwen2 moe"]
    random_model(kind, **settings).save_pretrained(tmp_path)
    assert load(tmp_path, torch.bfloat16)._prepared is None
