"""This module says in the terms of Hugging Face what llama.cpp's architectures are, and what their headers say
beside the usual.

Key names follow llama.cpp's converter (convert_hf_to_gguf.py) and the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader
from nbengine.models.checkpoints.gguf_gemma4 import gemma4_entries
from nbengine.models.checkpoints.gguf_hybrids import (
    granite,
    lfm2,
    lfm2moe,
    mamba2,
    nemotron_h,
    qwen3next,
    qwen35,
)
from nbengine.models.checkpoints.gguf_latent import SIGMOID, latent_entries
from nbengine.models.checkpoints.gguf_rope import (
    DEFAULT_THETA,
    head_dim_of,
    rope_parameters,
    theta_of,
    window_of,
    windows_of,
)

Entries = dict[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The largest models scale scores by what one of their heads would have of the hidden features."""


def no_more(header: GGUFHeader) -> Entries:  # noqa: ARG001 - there is nothing to look for
    """Return nothing: the usual keys say all."""
    return {}


_EXPERTS_OF_MAVERICK = 128
"""It does not normalise queries and keys."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: Hugging Face's `model_type` and class, and entries of config.json beside the
    usual ones. `permuted`: the converter interleaves the rows of the q and k projections, because its RoPE pairs
    neighbouring dimensions; else they are in Hugging Face's order."""

    model_type: str
    name: str
    more: Callable[[GGUFHeader], Entries] = no_more
    permuted: bool = False
    may_have_experts: bool = False
    has_attention: bool = True
    """False if no layer has heads of keys and values, whatever the file says of them."""
    reads: tuple[str, ...] = ()
    """Keys of experts that `more` reads, and that others' files have with values that change nothing."""
    has_varied_layers: bool = False
    """True if layers have different numbers of key heads and inner features, which `more` reads."""


def _llama(header: GGUFHeader) -> Entries:
    # Of the classes whose files say llama, Mistral's has windows.
    if not window_of(header) or header.integer_or("llama.expert_count", 0):
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def _llama4(header: GGUFHeader) -> Entries:
    """Return what llama.cpp's code has of the two released models, which their files do not say.

    Raises:
        ModelLoadError: the file is of neither: it has no experts, or says something of chunks.
    """
    experts = header.integer_or("llama4.expert_count", 0)
    if experts < 1:
        raise ModelLoadError(f"{header.path}: models of kind 'llama4' without experts are not supported")
    for key in ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"):
        if f"llama4.{key}" in header.metadata:
            raise ModelLoadError(f"{header.path}: llama4.{key} is not supported")
    return {
        "num_local_experts": experts,
        "intermediate_size": header.integer("llama4.expert_feed_forward_length"),
        "intermediate_size_mlp": header.largest("llama4.feed_forward_length"),
        "interleave_moe_layer_step": header.integer("llama4.interleave_moe_layer_step"),
        "use_qk_norm": experts != _EXPERTS_OF_MAVERICK,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _qwen2moe(header: GGUFHeader) -> Entries:
    # All layers have the window that a file states; for this class config.json can say so by their types alone.
    return {"layer_types": [_SLIDING] * header.num_layers} if window_of(header) else {}


def _gemma(header: GGUFHeader) -> Entries:  # noqa: ARG001 - all files are alike
    return dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")


def _gemma2(header: GGUFHeader) -> Entries:
    arch = header.architecture
    caps = {
        hf: header.number(f"{arch}.{key}") if f"{arch}.{key}" in header.metadata else None
        for hf, key in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        )
    }
    heads, hidden = header.integer(f"{arch}.attention.head_count"), header.integer(f"{arch}.embedding_length")
    is_27b = header.integer(f"{arch}.block_count") == _LAYERS_OF_27B[arch]
    scale = {"query_pre_attn_scalar": hidden // heads if is_27b else head_dim_of(header)}
    return {**_gemma(header), **{hf: cap for hf, cap in caps.items() if cap is not None}, **scale}


def _gemma3(header: GGUFHeader) -> Entries:
    return {
        **_gemma2(header),
        "rope_local_base_freq": header.metadata.get("gemma3.rope.freq_base_swa", DEFAULT_THETA),
        "layer_types": [_SLIDING if window else _FULL for window in windows_of(header, 6)],
    }


def _olmo(header: GGUFHeader) -> Entries:
    key = "olmo.attention.clamp_kqv"
    # Zero means that nothing is cut.
    return {"clip_qkv": (header.number(key) if key in header.metadata else 0.0) or None}


def _olmo2(header: GGUFHeader) -> Entries:
    if not window_of(header):
        return {}
    # Of the classes whose files say olmo2, OLMo 3 has windows; the rotary embedding of their layers is never stretched.
    theta = header.metadata.get("olmo2.rope.freq_base_swa", theta_of(header))
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": [_SLIDING if window else _FULL for window in windows_of(header, 4)],
        "rope_parameters": {_FULL: rope_parameters(header), _SLIDING: local},
    }


def _glm4(header: GGUFHeader) -> Entries:
    key = "glm4.rope.dimension_sections"
    if key in header.metadata:
        raise ModelLoadError(f"{header.path}: {key}, the positions of images, are not supported")
    return {}


def _glm4moe(header: GGUFHeader) -> Entries:
    """Return the entries of GLM-4.5 to 4.7.

    Raises:
        ModelLoadError: experts have other scores than those of all released models.
    """
    arch = header.architecture
    gating, scale = f"{arch}.expert_gating_func", f"{arch}.expert_weights_scale"
    if header.integer_or(gating, SIGMOID) != SIGMOID:
        raise ModelLoadError(f"{header.path}: {gating} {header.metadata[gating]!r} is not supported")
    return {
        "use_qk_norm": header.has_tensor("attn_q_norm.weight"),
        "n_routed_experts": header.integer(f"{arch}.expert_count"),
        "n_shared_experts": header.integer_or(f"{arch}.expert_shared_count", 0),
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "first_k_dense_replace": header.integer_or(f"{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": header.number(scale) if scale in header.metadata else 1.0,
        "norm_topk_prob": bool(header.metadata.get(f"{arch}.expert_weights_norm", True)),
        "n_group": header.integer_or(f"{arch}.expert_group_count", 1),
        "topk_group": header.integer_or(f"{arch}.expert_group_used_count", 1),
    }


def _mistral3(header: GGUFHeader) -> Entries:
    rope, key = rope_parameters(header), "mistral3.attention.temperature_scale"
    original = header.integer("mistral3.context_length")
    growth = {"llama_4_scaling_beta": header.number(key)} if key in header.metadata else {}
    return {"rope_parameters": {"original_max_position_embeddings": original, **rope, **growth}}


def _exaone4(header: GGUFHeader) -> Entries:
    if not window_of(header):
        return {"sliding_window": None}
    return {"layer_types": [_SLIDING if window else _FULL for window in windows_of(header, 4)]}


def _ernie(header: GGUFHeader) -> Entries:
    return {"use_bias": header.has_tensor("attn_q.bias")}


def _seed(header: GGUFHeader) -> Entries:
    return {"attention_out_bias": header.has_tensor("attn_output.bias")}


def _phi3(header: GGUFHeader) -> Entries:
    key = "phi3.rope.scaling.original_context_length"
    return {"original_max_position_embeddings": header.integer(key)} if key in header.metadata else {}


def _gpt_oss(header: GGUFHeader) -> Entries:
    rope = rope_parameters(header)
    # The bounds of what is stretched are no whole dimensions.
    return {"rope_parameters": {**rope, "truncate": False}} if rope["rope_type"] == "yarn" else {}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, permuted=True, may_have_experts=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _mistral3, permuted=True),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", _llama4, may_have_experts=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe, may_have_experts=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", may_have_experts=True),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", may_have_experts=True),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", qwen3next, may_have_experts=True),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", qwen35, may_have_experts=True),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        gemma4_entries,
        may_have_experts=True,
        has_varied_layers=True,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
    "olmo": Architecture("olmo", "OlmoForCausalLM", _olmo, permuted=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", may_have_experts=True),
    "granite": Architecture("granite", "GraniteForCausalLM", granite, permuted=True),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", granite, permuted=True, may_have_experts=True
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", granite, permuted=True, may_have_experts=True
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        lfm2moe,
        may_have_experts=True,
        reads=("expert_gating_func", "leading_dense_block_count"),
    ),
    "mamba2": Architecture("mamba2", "Mamba2ForCausalLM", mamba2, has_attention=False),
    "nemotron_h": Architecture("nemotron_h", "NemotronHForCausalLM", nemotron_h),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        "NemotronHForCausalLM",
        nemotron_h,
        may_have_experts=True,
        reads=("expert_weights_scale", "expert_group_count"),
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _exaone4),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _seed),
    "chatglm": Architecture("glm", "GlmForCausalLM"),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm4),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _glm4moe,
        may_have_experts=True,
        reads=(
            "expert_gating_func",
            "expert_weights_scale",
            "leading_dense_block_count",
            "expert_group_count",
        ),
    ),
    "deepseek2": Architecture("deepseek_v2", "DeepseekV2ForCausalLM", latent_entries, may_have_experts=True),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, may_have_experts=True),
}
"""By llama.cpp's names; Mistral files say llama, and so do Mixtral's; OLMo 3 files say olmo2. Of models with images
llama.cpp has the text in one file, and what is for images in another."""
