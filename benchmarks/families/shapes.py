"""Models of several families with the sizes of real layers, and fewer of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SMALL_VOCABULARY = 8192
BITS: Mapping[str, float] = {"int4": 4.5, "int8": 8.5, "bfloat16": 16.0, "float16": 16.0}
"""The bits that a weight takes in memory, its part of a block's scale with it."""


@dataclass(frozen=True)
class Shape:
    """A model: the beginning of transformers' class names, and what its configuration says. `real_layers` is how many
    the model has that it stands for."""

    kind: str
    real_layers: int
    settings: Mapping[str, Any] = field(default_factory=dict)


_LATENT: dict[str, Any] = {
    "vocab_size": _SMALL_VOCABULARY,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
}
SHAPES: Mapping[str, Shape] = {
    "smollm2-135m": Shape(
        "Llama",
        30,
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": Shape(
        "Qwen3",
        28,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3-3b": Shape(
        "Ministral3",
        26,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "gemma4-e2b": Shape(
        "Gemma4",
        35,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "vocab_size_per_layer_input": _SMALL_VOCABULARY,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 10,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
            "num_kv_shared_layers": 5,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-26b-a4b": Shape(
        "Gemma4",
        30,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "vocab_size_per_layer_input": _SMALL_VOCABULARY,
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "head_dim": 256,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 1024,
            "enable_moe_block": True,
            "num_experts": 32,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "nemotron3-nano": Shape(
        "NemotronH",
        52,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "hidden_size": 2688,
            "layers_block_type": [
                *["linear_attention", "moe"] * 2,
                *["linear_attention", "full_attention", "moe"],
            ],
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_routed_experts": 32,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
        },
    ),
    "exaone4-1.2b": Shape(
        "Exaone4",
        30,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 8,
            "max_position_embeddings": 4096,
        },
    ),
    "olmoe-1b-7b": Shape(
        "Olmoe",
        16,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "glm4.5-air": Shape(
        "Glm4Moe",
        46,
        {
            "vocab_size": _SMALL_VOCABULARY,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 2,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "n_routed_experts": 64,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek-v2-lite": Shape(
        "DeepseekV2",
        27,
        {
            **_LATENT,
            "num_hidden_layers": 5,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
        },
    ),
}
