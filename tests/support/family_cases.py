"""Small models of every family, all kinds of its layers present: one entry a variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOW = 8
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0],
}
WINDOWS = {"sliding_window": WINDOW}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class FamilyCase:
    """A variant of a family: the beginning of transformers' class names, and settings beside the usual sizes."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    """The longest sequence, where the model is told one."""
    has_stages: bool = True
    """False if its layers cannot be divided among pipeline stages."""


LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
"""Latent attention; of three layers the first has no experts."""
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 4, "topk_group": 2}
GLM_4_MOE = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "num_mtp_layers": 0,
}
MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 4.0}
LLAMA_4 = {
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "attention_chunk_size": WINDOW,
    "floor_scale": 5,
    "attn_scale": 0.6,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""The factor of queries grows every five tokens; no matrix of experts is square."""
GROWING = {
    **YARN,
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.6,
}
"""Queries grow every eight tokens."""
GEMMA_4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [SLIDING, FULL] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
    **WINDOWS,
}
GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 40, **WINDOWS}
CASES: dict[str, FamilyCase] = {
    "mistral window": FamilyCase("Mistral", {"head_dim": 16, **WINDOWS}),
    "ministral": FamilyCase(
        "Ministral", {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING], **WINDOWS}
    ),
    "ministral 3": FamilyCase("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "qwen2 window": FamilyCase("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOWS}),
    "qwen3 window": FamilyCase(
        "Qwen3", {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 2, **WINDOWS}
    ),
    "llama dynamic": FamilyCase(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "qwen2 yarn": FamilyCase("Qwen2", {"rope_parameters": YARN}),
    "llama yarn mscale": FamilyCase(
        "Llama",
        {
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 4.0,
                "truncate": False,
            }
        },
    ),
    "mixtral": FamilyCase("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2 moe": FamilyCase(
        "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
    ),
    "qwen3 moe": FamilyCase(
        "Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}
    ),
    "gemma": FamilyCase("Gemma", {"head_dim": 16}),
    "gemma2": FamilyCase("Gemma2", {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": FamilyCase("Gemma3", {**GEMMA, "layer_types": [SLIDING, SLIDING, FULL]}),
    "gemma3 linear": FamilyCase(
        "Gemma3",
        {
            **GEMMA,
            "layer_types": [SLIDING, FULL, SLIDING],
            "attention_bias": True,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": FamilyCase(
        "Gemma4",
        {
            **GEMMA_4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        has_stages=False,
    ),
    "gemma4 of few heads": FamilyCase(
        "Gemma4",
        {
            **GEMMA_4,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
    "gemma4 moe": FamilyCase(
        "Gemma4",
        {
            **GEMMA_4,
            **GEMMA_4_EXPERTS,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "phi3": FamilyCase("Phi3", {"pad_token_id": 0, **WINDOWS}),
    "phi3 long": FamilyCase(
        "Phi3",
        {
            "pad_token_id": 0,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32},
            "original_max_position_embeddings": 32,
        },
    ),
    "phi3 short": FamilyCase(
        "Phi3",
        {
            "pad_token_id": 0,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 128,
        },
        max_model_len=128,
    ),
    "phi4-mini": FamilyCase(
        "Phi3",
        {
            "pad_token_id": 0,
            "rope_parameters": {
                **LONGROPE,
                "short_factor": LONGROPE["short_factor"][:6],  # type: ignore[index]
                "long_factor": LONGROPE["long_factor"][:6],  # type: ignore[index]
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo": FamilyCase("Olmo", {"clip_qkv": 0.7}),
    "olmo2": FamilyCase("Olmo2"),
    "olmo2 mqa": FamilyCase("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": FamilyCase("Olmo3", {"layer_types": [SLIDING, FULL, SLIDING], **WINDOWS}),
    "olmo3 yarn": FamilyCase(
        "Olmo3",
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
            **WINDOWS,
        },
    ),
    "olmoe": FamilyCase("Olmoe", {**EXPERTS, "intermediate_size": 32}),
    "olmoe renormalised": FamilyCase(
        "Olmoe", {**EXPERTS, "norm_topk_prob": True, "num_key_value_heads": 1, "attention_bias": True}
    ),
    "granite": FamilyCase(
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "mlp_bias": True,
        },
    ),
    "granite moe": FamilyCase(
        "GraniteMoe",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "smollm3": FamilyCase("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3 window": FamilyCase(
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "pad_token_id": 0, **WINDOWS},
    ),
    "llama 4": FamilyCase(
        "Llama4",
        {**LLAMA_4, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "moe_layers": [1, 2]},
    ),
    "llama 4 of experts alone": FamilyCase(
        "Llama4",
        {
            **LLAMA_4,
            "num_experts_per_tok": 3,
            "no_rope_layers": [1, 0, 0],
            "layer_types": [FULL, CHUNKED, FULL],
            "use_qk_norm": False,
            "attention_bias": True,
        },
    ),
    "llama 4 without experts": FamilyCase(
        "Llama4",
        {
            **LLAMA_4,
            "moe_layers": [],
            "no_rope_layers": [1, 1, 0],
            "layer_types": [CHUNKED, FULL, FULL],
            "attn_temperature_tuning": False,
        },
    ),
    "exaone 4": FamilyCase("Exaone4", {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING], **WINDOWS}),
    "exaone 4 without windows": FamilyCase(
        "Exaone4", {"head_dim": 16, "layer_types": [FULL] * 3, "sliding_window": None}
    ),
    "ernie 4.5": FamilyCase("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed-oss": FamilyCase("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "gpt-oss": FamilyCase(
        "GptOss",
        {
            "head_dim": 16,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
            "rope_parameters": {**YARN, "truncate": False},
            **WINDOWS,
        },
    ),
    "glm": FamilyCase("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": FamilyCase("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm4 moe": FamilyCase("Glm4Moe", GLM_4_MOE),
    "glm4 moe with norms and groups": FamilyCase(
        "Glm4Moe",
        {
            **GLM_4_MOE,
            **GROUPS,
            "first_k_dense_replace": 0,
            "use_qk_norm": True,
            "attention_bias": False,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek v2": FamilyCase("DeepseekV2", {**LATENT, "rope_parameters": MSCALE}),
    "deepseek v2 groups": FamilyCase(
        "DeepseekV2",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
    ),
    "deepseek v3": FamilyCase(
        "DeepseekV3", {**LATENT, **GROUPS, "q_lora_rank": 20, "rope_parameters": MSCALE}
    ),
    "deepseek v3 halves": FamilyCase(
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 1,
        },
    ),
    "glm4 moe lite": FamilyCase(
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 20, "mlp_layer_types": ["sparse", "dense", "sparse"], "pad_token_id": 0},
    ),
}
