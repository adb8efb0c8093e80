"""What a GGUF header says in the terms of Hugging Face: config.json, generation_config.json, tensor names.

Key and tensor names follow llama.cpp's converter (convert_hf_to_gguf.py) and the GGUF specification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbengine.errors import ModelLoadError
from nbengine.models.gguf import GGUFHeader, GGUFTensor, StringArray

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""llama.cpp's architecture to Hugging Face's `model_type` and class; Mistral files say llama, and so do Mixtral's."""

_MIXTRAL = ("mixtral", "MixtralForCausalLM")
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe")
_RENORMALIZED = {"qwen2moe": False, "qwen3moe": True}
"""Whether llama.cpp divides the weights of a token's experts by their sum where the file does not say."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which llama.cpp's converter expresses the llama3 kind of RoPE scaling."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors of all experts of a layer, [experts, rows, columns]."""
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_tensors(tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """What a tensor of the file is under Hugging Face's names: one tensor, or one an expert; none without counterpart.

    The gate of the shared expert is a vector in the file and a matrix of one row there.
    """
    if tensor.name in _GLOBAL_NAMES:
        return {_GLOBAL_NAMES[tensor.name]: tensor}
    parts = tensor.name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdigit():
        return {}
    layer, kind, suffix = f"model.layers.{int(parts[1])}", parts[2], parts[3]
    if kind in _EXPERT_NAMES and len(tensor.shape) == 3:
        num_experts = tensor.shape[0]
        size = tensor.num_bytes // num_experts
        return {
            f"{layer}.mlp.experts.{expert}.{_EXPERT_NAMES[kind]}.{suffix}": replace(
                tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size
            )
            for expert in range(num_experts)
        }
    if kind not in _LAYER_NAMES:
        return {}
    if kind == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    return {f"{layer}.{_LAYER_NAMES[kind]}.{suffix}": tensor}


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """The content of config.json that the header describes.

    Raises:
        ModelLoadError: an architecture or a feature that is not supported, or missing metadata.
    """
    arch = header.architecture
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(header)
    has_experts = _num_experts(header) > 0
    model_type, architecture = _MIXTRAL if has_experts and arch == "llama" else ARCHITECTURES[arch]
    hidden_size = header.integer(f"{arch}.embedding_length")
    num_heads = header.integer(f"{arch}.attention.head_count")
    if num_heads < 1:
        raise ModelLoadError(f"{header.path}: {arch}.attention.head_count is {num_heads}")
    head_dim = _integer_or(header, f"{arch}.attention.key_length", hidden_size // num_heads)
    _check_rotary_size(header, head_dim)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": header.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer_or(header, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope_parameters(header),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_token_ids(header),
    }
    if has_experts:
        config |= _experts(header)
    if ROPE_FACTORS in header.tensors:
        config["rope_frequency_factors"] = _frequency_factors(header)
    window = header.metadata.get(f"{arch}.attention.sliding_window")
    return config if window is None else {**config, "sliding_window": window, "use_sliding_window": True}


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """The content of generation_config.json: the tokens that end a text, and the advised sampling.

    llama.cpp ends a text at the end-of-turn token too, which some files state beside the end-of-sequence token.
    """
    ids = _token_ids(header)
    end = [ids["eos_token_id"], header.metadata.get("tokenizer.ggml.eot_token_id")]
    eos = list(dict.fromkeys(token for token in end if isinstance(token, int)))
    advised = {name: header.metadata[key] for key, name in _SAMPLING_KEYS.items() if key in header.metadata}
    config = {**ids, "eos_token_id": eos[0] if len(eos) == 1 else eos, **advised}
    return {key: value for key, value in config.items() if value is not None and value != []}


def _experts(header: GGUFHeader) -> dict[str, Any]:
    arch = header.architecture
    experts: dict[str, Any] = {
        "num_experts": _num_experts(header),
        "num_experts_per_tok": header.integer(f"{arch}.expert_used_count"),
    }
    if arch not in _RENORMALIZED:
        return experts
    renormalized = header.metadata.get(f"{arch}.expert_weights_norm", _RENORMALIZED[arch])
    shared = "blk.0.ffn_up_shexp.weight"
    if shared in header.tensors:
        experts["shared_expert_intermediate_size"] = header.tensors[shared].shape[0]
    return {
        **experts,
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "norm_topk_prob": renormalized,
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _num_experts(header: GGUFHeader) -> int:
    return _integer_or(header, f"{header.architecture}.expert_count", 0)


def _refuse_unsupported(header: GGUFHeader) -> None:
    arch = header.architecture
    if _integer_or(header, "split.count", 0) > 1:
        raise ModelLoadError(
            f"{header.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    if _num_experts(header) > 0 and arch not in _WITH_EXPERTS:
        raise ModelLoadError(f"{header.path}: mixture-of-experts models of kind {arch!r} are not supported")
    key_length = header.metadata.get(f"{arch}.attention.key_length")
    if key_length != header.metadata.get(f"{arch}.attention.value_length", key_length):
        raise ModelLoadError(f"{header.path}: keys and values of different sizes are not supported")
    scaling = header.metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelLoadError(
            f"{header.path}: RoPE scaling {scaling!r} is not supported; supported are none, linear"
        )


def _check_rotary_size(header: GGUFHeader, head_dim: int) -> None:
    rotary = _integer_or(header, f"{header.architecture}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ModelLoadError(
            f"{header.path}: RoPE over {rotary} of {head_dim} dimensions of a head is not supported"
        )


def _rope_parameters(header: GGUFHeader) -> dict[str, Any]:
    arch = header.architecture
    theta_key = f"{arch}.rope.freq_base"
    theta = header.number(theta_key) if theta_key in header.metadata else 10000.0
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if header.metadata.get(f"{arch}.rope.scaling.type") == "linear":
        parameters |= {"rope_type": "linear", "factor": header.number(f"{arch}.rope.scaling.factor")}
    return parameters


def _frequency_factors(header: GGUFHeader) -> list[float]:
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.type.name != "F32":
        raise ModelLoadError(f"{header.path}: {ROPE_FACTORS} is {tensor.type.name}, not F32")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise ModelLoadError(f"{header.path}: truncated in {ROPE_FACTORS}")
    factors: list[float] = np.frombuffer(raw, dtype="<f4").tolist()
    return factors


def num_tokens(header: GGUFHeader) -> int:
    """Size of the tokenizer's vocabulary; a file without a tokenizer raises `ModelLoadError`."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        raise ModelLoadError(f"{header.path} has no tokenizer (metadata key tokenizer.ggml.tokens)")
    return tokens.length


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{header.path}: tensor token_embd.weight is missing")
    rows = embedding.shape[0]
    if num_tokens(header) > rows:
        raise ModelLoadError(
            f"{header.path}: the tokenizer has {num_tokens(header)} tokens, the embedding only {rows} rows"
        )
    return rows


def _token_ids(header: GGUFHeader) -> dict[str, int | None]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {hf: header.metadata.get(f"tokenizer.ggml.{ours}_token_id") for hf, ours in names.items()}
    return {hf: value if isinstance(value, int) else None for hf, value in found.items()}


def _integer_or(header: GGUFHeader, key: str, default: int) -> int:
    return header.integer(key) if key in header.metadata else default
