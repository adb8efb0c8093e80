"""Small models of every kind that has recurrent layers, with seeded random weights of transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

QWEN: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "pad_token_id": 0,
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA, ATTENTION, CONV = "linear_attention", "full_attention", "conv"
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, ATTENTION, MAMBA, MAMBA],
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_chunk_size": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
GRANITE_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [CONV, ATTENTION, CONV, CONV],
    "block_multiple_of": 16,
    "pad_token_id": 0,
}
LFM2_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [CONV, ATTENTION, CONV, CONV],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}
BAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1],
    "mamba_chunk_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
}
MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 24,
    "chunk_size": 16,
    "n_groups": 2,
    "pad_token_id": 0,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": [MAMBA, "mlp", MAMBA, ATTENTION, "mlp", MAMBA],
    "num_hidden_layers": 6,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.3,
}
"""Two layers have no feed-forward block; steps below the least one matter."""
NEMOTRON_EXPERTS: dict[str, Any] = {
    **NEMOTRON,
    "layers_block_type": [MAMBA, "moe", MAMBA, ATTENTION, "moe", MAMBA, "mlp"],
    "num_hidden_layers": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", QWEN),
    "qwen3.5 with biases": ("Qwen3_5", {**QWEN, "attention_bias": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5 moe": ("Qwen3_5Moe", {**QWEN, **QWEN_EXPERTS}),
    "qwen3-next": ("Qwen3Next", {**QWEN, **QWEN_EXPERTS}),
    "qwen3-next with dense layers": ("Qwen3Next", {**QWEN, **QWEN_EXPERTS, "mlp_only_layers": [1, 2]}),
    "granite 4": ("GraniteMoeHybrid", GRANITE),
    "granite 4 moe": ("GraniteMoeHybrid", {**GRANITE, **GRANITE_EXPERTS}),
    "granite 4 of one group": (
        "GraniteMoeHybrid",
        {**GRANITE, **GRANITE_EXPERTS, "mamba_n_groups": 1, "position_embedding_type": "rope"},
    ),
    "granite 4 with biases and limits": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "time_step_limit": [0.3, 0.9],
        },
    ),
    "granite 4 without recurrent layers": (
        "GraniteMoeHybrid",
        {**GRANITE, "layer_types": [ATTENTION] * 4, "position_embedding_type": "rope"},
    ),
    "granite 4 without attention": ("GraniteMoeHybrid", {**GRANITE, "layer_types": [MAMBA] * 4}),
    "bamba": ("Bamba", BAMBA),
    "bamba with biases and limits": (
        "Bamba",
        {
            **BAMBA,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.3, 0.9],
        },
    ),
    "mamba-2": ("Mamba2", MAMBA2),
    "mamba-2 with biases": (
        "Mamba2",
        {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h with biases": (
        "NemotronH",
        {**NEMOTRON, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "nemotron 3 moe": ("NemotronH", NEMOTRON_EXPERTS),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 with biases": ("Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2 moe": ("Lfm2Moe", LFM2_EXPERTS),
    "lfm2 moe without correction": (
        "Lfm2Moe",
        {
            **LFM2_EXPERTS,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "num_dense_layers": 0,
        },
    ),
    "lfm2 as stated": ("Lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
}
"""For each model the name that its classes of transformers begin with, and what its configuration says."""


def saved(name: str, directory: Path, random_model: Any, **settings: Any) -> Any:
    """Save a model of transformers, and return it; its decays are those of models, and no step is 0."""
    kind, sizes = CASES[name]
    oracle = random_model(kind, **{"tie_word_embeddings": False, **sizes, **settings})
    for key, parameter in oracle.named_parameters():
        if key.endswith("A_log"):
            parameter.data.uniform_(-3, 1, generator=torch.Generator().manual_seed(2))
    for key, buffer in oracle.named_buffers():
        if key.endswith("expert_bias"):
            buffer.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(3))
    oracle.save_pretrained(directory)
    # The cache of transformers asks a layer with attention how long a sequence is.
    oracle.config.use_cache = False
    return oracle


def hf_of(name: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a model as its file says it."""
    import transformers

    kind, sizes = CASES[name]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config_class(**{"hidden_size": 64, **sizes, **settings}).to_dict()
    return {**config, "architectures": [f"{kind}ForCausalLM"]}
