"""This module says in the terms of Hugging Face what a GGUF header says: config.json and
generation_config.json.

Key names follow llama.cpp's converter (convert_hf_to_gguf.py) and the GGUF specification.
"""

from __future__ import annotations

from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader, StringArray
from nbengine.models.checkpoints.gguf_architectures import ARCHITECTURES
from nbengine.models.checkpoints.gguf_rope import head_dim_of, rope_entries, window_of

_MIXTRAL = ("mixtral", "MixtralForCausalLM")
_RENORMALIZED = {
    "qwen2moe": False,
    "qwen3moe": True,
    "qwen3vlmoe": True,
    "qwen3next": True,
    "qwen35moe": True,
}
"""For each architecture, whether llama.cpp divides the weights of a token's experts by their sum where the
file does not say."""

_ONLY: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "moe_every_n_layers": (0, 1),
    "leading_dense_block_count": (0,),
}
"""Metadata that change what a model computes, with the values that do not."""

_WITH_WINDOWS = (
    "llama",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "gpt-oss",
    "olmo2",
    "exaone4",
)
"""The architectures whose layers may have a window."""
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the content of config.json that the header describes.

    Raises:
        ModelLoadError: an architecture or a feature is not supported, or metadata is missing.
    """
    arch = header.architecture
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(header)
    has_experts = _num_experts(header) > 0
    known = ARCHITECTURES[arch]
    is_mixtral = has_experts and arch == "llama"
    model_type, architecture = _MIXTRAL if is_mixtral else (known.model_type, known.name)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": header.integer(f"{arch}.embedding_length"),
        "num_hidden_layers": header.num_layers,
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_token_ids(header),
    }
    if known.has_attention:
        config |= _attention(header)
    if has_experts:
        config |= _experts(header)
    return {**config, **known.more(header)}


def _attention(header: GGUFHeader) -> dict[str, Any]:
    """Return the entries for attention, and for the feed-forward blocks beside it."""
    arch = header.architecture
    num_heads = header.largest(f"{arch}.attention.head_count")
    config: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "head_dim": head_dim_of(header),
        "rms_norm_eps": _eps(header),
        **rope_entries(header),
        "attention_bias": header.has_tensor("attn_q.bias") or header.has_tensor("attn_qkv.bias"),
        "mlp_bias": header.has_tensor("ffn_gate.bias"),
    }
    if not ARCHITECTURES[arch].has_varied_layers:
        # A file may say that no layer has any key heads.
        config["num_key_value_heads"] = _kv_heads(header, num_heads) or num_heads
        config["intermediate_size"] = _intermediate_size(header)
    if window := window_of(header):
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _kv_heads(header: GGUFHeader, num_heads: int) -> int:
    key = f"{header.architecture}.attention.head_count_kv"
    return header.largest(key) if key in header.metadata else num_heads


def _intermediate_size(header: GGUFHeader) -> int:
    """Return the inner features of feed-forward blocks; where all layers have experts the file need not say them."""
    arch = header.architecture
    key, of_experts = f"{arch}.feed_forward_length", f"{arch}.expert_feed_forward_length"
    has_key = key in header.metadata or of_experts not in header.metadata
    return header.largest(key if has_key else of_experts)


def _eps(header: GGUFHeader) -> float:
    prefix = f"{header.architecture}.attention"
    keys = (f"{prefix}.layer_norm_rms_epsilon", f"{prefix}.layer_norm_epsilon")
    return header.number(
        keys[1] if keys[1] in header.metadata and keys[0] not in header.metadata else keys[0]
    )


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the content of generation_config.json: the tokens that end a text, and the advised sampling.

    llama.cpp ends a text at the end-of-turn and the end-of-message token too, which some files state beside the
    end-of-sequence token.
    """
    ids = _token_ids(header)
    further = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
    end = [ids["eos_token_id"], *further]
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
    return header.integer_or(f"{header.architecture}.expert_count", 0)


def _refuse_unsupported(header: GGUFHeader) -> None:
    arch = header.architecture
    if header.integer_or("split.count", 0) > 1:
        raise ModelLoadError(
            f"{header.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    if _num_experts(header) > 0 and not ARCHITECTURES[arch].may_have_experts:
        raise ModelLoadError(f"{header.path}: mixture-of-experts models of kind {arch!r} are not supported")
    if ARCHITECTURES[arch].has_attention:
        _refuse_unsupported_attention(header)
    is_latent = f"{arch}.attention.kv_lora_rank" in header.metadata
    for key, supported in ({} if is_latent else _ONLY).items():
        found = None if key in ARCHITECTURES[arch].reads else header.metadata.get(f"{arch}.{key}")
        if found is not None and found not in supported:
            raise ModelLoadError(f"{header.path}: {arch}.{key} {found!r} is not supported")


def _refuse_unsupported_attention(header: GGUFHeader) -> None:
    arch = header.architecture
    key_length = header.metadata.get(f"{arch}.attention.key_length")
    is_latent = f"{arch}.attention.kv_lora_rank" in header.metadata
    if not is_latent and key_length != header.metadata.get(f"{arch}.attention.value_length", key_length):
        raise ModelLoadError(f"{header.path}: keys and values of different sizes are not supported")
    head_dim = head_dim_of(header)
    rotary = header.integer_or(f"{arch}.rope.dimension_count", head_dim)
    # The converter interleaves the rows of whole heads, of which Bamba turns a part.
    if rotary != head_dim and ARCHITECTURES[arch].permuted and arch != "granitehybrid":
        raise ModelLoadError(
            f"{header.path}: RoPE over {rotary} of {head_dim} dimensions of a head is not supported for {arch!r}"
        )
    if window_of(header) and arch not in _WITH_WINDOWS:
        raise ModelLoadError(
            f"{header.path}: {arch}.attention.sliding_window is not supported; it is for {', '.join(_WITH_WINDOWS)}"
        )


def num_tokens(header: GGUFHeader) -> int:
    """Return the size of the tokenizer's vocabulary; a file without a tokenizer raises `ModelLoadError`."""
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
