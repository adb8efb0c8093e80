"""Small models of classes of transformers that run through its backend: kinds of layers that nbengine may lack."""

from __future__ import annotations

from typing import Any

WINDOW = {"sliding_window": 5}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LLAMA_4: dict[str, Any] = {
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 64,
    "head_dim": 16,
    "no_rope_layers": [1, 0, 1],
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT: learned positions": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}),
    "GPT-NeoX: parallel blocks, partial rotation": ("GPTNeoX", {"num_key_value_heads": 4}),
    "GPT-2: one matrix for query, key and value, transposed": ("GPT2", {"num_key_value_heads": 4}),
    "GPT-BigCode: one key-value head": ("GPTBigCode", {"multi_query": True}),
    "StableLM: LayerNorm, partial rotation": ("StableLm", {}),
    "Cohere 2: scaled logits, tied, only layers with a window turn": (
        "Cohere2",
        {
            **WINDOW,
            "tie_word_embeddings": True,
            "logit_scale": 0.3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Phi: biases, parallel blocks": ("Phi", {"num_key_value_heads": 4}),
    "Starcoder2: a window in all layers": ("Starcoder2", WINDOW),
    "Nemotron: squared ReLU": ("Nemotron", {"head_dim": 16}),
    "Gemma 2: soft caps, windows in some layers": (
        "Gemma2",
        {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
    ),
    "Granite: four multipliers": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "OLMoE: experts": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "PhiMoE: experts of another name, a window of the mask alone": (
        "Phimoe",
        {**WINDOW, "num_local_experts": 4},
    ),
    "GraniteMoE: experts in one tensor": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3: latent attention, groups of experts": (
        "DeepseekV3",
        {**LATENT, **GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt-oss: sinks": ("GptOss", {**WINDOW, "head_dim": 16, "num_local_experts": 4}),
    "Llama 4: chunks in some layers": ("Llama4", LLAMA_4),
    "Apertus: parameters without dimensions": ("Apertus", {}),
}
HEADS = {"GPT2": "LMHeadModel"}
