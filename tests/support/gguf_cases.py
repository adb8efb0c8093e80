"""Small models of every family whose GGUF files are read, with all kinds of layers as such files can state them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.family_cases import CASES as FAMILIES
from tests.support.family_cases import LONGROPE
from tests.support.recurrent_cases import (
    BAMBA,
    GRANITE,
    GRANITE_EXPERTS,
    LFM2,
    LFM2_EXPERTS,
    MAMBA2,
    NEMOTRON,
    NEMOTRON_EXPERTS,
    QWEN,
    QWEN_EXPERTS,
)


@dataclass(frozen=True)
class GGUFCase:
    """A model as transformers makes it: the beginning of its class names and its settings; `arch` is llama.cpp's name,
    `more` metadata that the file has besides or in place of the usual."""

    arch: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None


def _of(arch: str, name: str, without: tuple[str, ...] = (), **settings: Any) -> GGUFCase:
    """A case of the families, some settings of which a file cannot state."""
    case = FAMILIES[name]
    kept = {key: value for key, value in case.settings.items() if key not in without}
    return GGUFCase(arch, case.kind, {**kept, **settings}, max_model_len=case.max_model_len)


_FULL = "full_attention"
_LINEAR_SIZES: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", _FULL] * 2,
}
_SECTIONS = {"qwen35.rope.dimension_sections": [1, 1, 0, 0]}
"""The turned pairs of so small a head that belong to each of three positions, which are the same in a text."""
_GROUPS_OF_THREE = {"linear_num_value_heads": 6}
_EXPERTS_OF_32 = {**QWEN_EXPERTS, "shared_expert_intermediate_size": 64}
_GRANITE = {
    **GRANITE,
    "num_experts_per_tok": 0,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "mamba_d_state": 16,
}
_ALL_ATTENTION = {"layer_types": [_FULL] * 4, "position_embedding_type": "rope"}
_LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
_LLAMA_4 = {
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 96,
    "intermediate_size_mlp": 128,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 100.0,
        "high_freq_factor": 400.0,
        "original_max_position_embeddings": 8192,
    },
}
"""The chunks, the growth of queries and the layers that turn nothing are those of the released models."""
CASES: dict[str, GGUFCase] = {
    "mistral window": _of("llama", "mistral window"),
    "ministral 3": _of("mistral3", "ministral 3"),
    "llama 4": _of("llama4", "llama 4", ("moe_layers", "no_rope_layer_interval"), **_LLAMA_4),
    "qwen2 yarn": _of("qwen2", "qwen2 yarn"),
    "gemma": _of("gemma", "gemma", tie_word_embeddings=True),
    "gemma2": _of("gemma2", "gemma2", query_pre_attn_scalar=16, tie_word_embeddings=True),
    "gemma3": _of(
        "gemma3",
        "gemma3",
        query_pre_attn_scalar=16,
        num_hidden_layers=7,
        layer_types=None,
        rope_parameters=_LINEAR_ROPE,
    ),
    "gemma4": _of("gemma4", "gemma4", vocab_size_per_layer_input=260, tie_word_embeddings=True),
    "gemma4 of few heads": _of("gemma4", "gemma4 of few heads", attention_bias=False),
    "gemma4 moe": _of("gemma4", "gemma4 moe"),
    "phi3 long": _of("phi3", "phi3 long"),
    "phi3 short": replace(
        _of(
            "phi3",
            "phi3 short",
            max_position_embeddings=512,
            original_max_position_embeddings=256,
            rope_parameters={**LONGROPE, "original_max_position_embeddings": 256},
        ),
        max_model_len=256,
    ),
    "phi4-mini": _of("phi3", "phi4-mini"),
    "phi3 window": _of("phi3", "phi3"),
    "olmo": _of("olmo", "olmo"),
    "olmo2": _of("olmo2", "olmo2"),
    "olmo3": _of("olmo2", "olmo3"),
    "olmo3 yarn": _of(
        "olmo2", "olmo3 yarn", num_hidden_layers=4, layer_types=[*["sliding_attention"] * 3, _FULL]
    ),
    "olmoe": _of("olmoe", "olmoe"),
    "granite": _of("granite", "granite", ("mlp_bias",)),
    "granite moe": _of("granitemoe", "granite moe", intermediate_size=64),
    "smollm3": _of("smollm3", "smollm3", no_rope_layers=None, num_hidden_layers=4),
    "exaone 4": _of("exaone4", "exaone 4"),
    "exaone 4 without windows": _of("exaone4", "exaone 4 without windows"),
    "ernie 4.5": _of("ernie4_5", "ernie 4.5", use_bias=False, tie_word_embeddings=True),
    "seed-oss": _of("seed_oss", "seed-oss", attention_out_bias=False, mlp_bias=False),
    "glm": _of("chatglm", "glm", rms_norm_eps=1e-5),
    "glm4": _of("glm4", "glm4"),
    "glm4 moe": _of("glm4moe", "glm4 moe"),
    "glm4 moe with norms and groups": _of("glm4moe", "glm4 moe with norms and groups"),
    "qwen3.5": GGUFCase("qwen35", "Qwen3_5", {**QWEN, **_LINEAR_SIZES}, _SECTIONS),
    "qwen3.5 of one value head": GGUFCase(
        "qwen35", "Qwen3_5", {**QWEN, **_LINEAR_SIZES, "linear_num_value_heads": 2}, _SECTIONS
    ),
    "qwen3.5 moe": GGUFCase(
        "qwen35moe",
        "Qwen3_5Moe",
        {**QWEN, **_LINEAR_SIZES, **_GROUPS_OF_THREE, **_EXPERTS_OF_32},
        {"qwen35moe.rope.dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen3-next": GGUFCase(
        "qwen3next",
        "Qwen3Next",
        {**QWEN, **_LINEAR_SIZES, **_EXPERTS_OF_32, "norm_topk_prob": True},
    ),
    "nemotron-h": GGUFCase("nemotron_h", "NemotronH", {**NEMOTRON, "time_step_min": 0.001}),
    "nemotron 3 moe": GGUFCase("nemotron_h_moe", "NemotronH", {**NEMOTRON_EXPERTS, "time_step_min": 0.001}),
    "granite 4": GGUFCase("granitehybrid", "GraniteMoeHybrid", _GRANITE),
    "granite 4 moe": GGUFCase(
        "granitehybrid", "GraniteMoeHybrid", {**_GRANITE, **GRANITE_EXPERTS, "mamba_n_groups": 1}
    ),
    "granite 4 without recurrent layers": GGUFCase(
        "granite", "GraniteMoeHybrid", {**_GRANITE, **_ALL_ATTENTION}
    ),
    "granite 4 moe without recurrent layers": GGUFCase(
        "granitemoe",
        "GraniteMoeHybrid",
        {**_GRANITE, **GRANITE_EXPERTS, **_ALL_ATTENTION},
    ),
    "bamba": GGUFCase("granitehybrid", "Bamba", {**BAMBA, "mamba_d_state": 16}),
    "bamba, heads turned whole": GGUFCase(
        "granitehybrid",
        "Bamba",
        {
            **BAMBA,
            "mamba_d_state": 16,
            "attn_layer_indices": [0, 2],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "lfm2": GGUFCase("lfm2", "Lfm2", LFM2),
    "lfm2 moe": GGUFCase("lfm2moe", "Lfm2Moe", {**LFM2_EXPERTS, "tie_word_embeddings": True}),
    "mamba-2": GGUFCase("mamba2", "Mamba2", MAMBA2),
}
RECURRENT = [
    name
    for name, case in CASES.items()
    if case.arch
    in (
        *("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "lfm2", "lfm2moe", "mamba2"),
        *("nemotron_h", "nemotron_h_moe"),
    )
]
