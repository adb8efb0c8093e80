"""The models `random-tiny`, a small dense Llama, and `random-tiny-moe`, a small Qwen3-MoE: random weights,
made on the spot, free of torch.

Their vocabulary is the 256 bytes and two special tokens, so that every text has a tokenization and every
token a place in some text. What they write is noise; their value is that they run anywhere at once and that
the same seed gives the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbengine.models.checkpoints.storage import new_directory

_VERSION = 1
"""A part of the directory's name, to be raised whenever a seed's model changes."""
_BOS, _EOS = "<|bos|>", "<|eos|>"
_SPECIAL_TOKENS = (_BOS, _EOS)
_NUM_BYTES = 256
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": _NUM_BYTES + len(_SPECIAL_TOKENS),
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": _NUM_BYTES,
    "eos_token_id": _NUM_BYTES + 1,
}
_MOE_CONFIG: dict[str, Any] = {
    **_CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Its sizes are such that two or four workers divide its heads and its experts."""


def random_tiny(models: Path, seed: int) -> Path:
    """Return the directory of the random model of this seed inside `models`, made there if it is missing."""
    return _made(models / f"random-tiny-v{_VERSION}-seed{seed}", _CONFIG, seed)


def random_tiny_moe(models: Path, seed: int) -> Path:
    """Return the directory of the random mixture of experts of this seed inside `models`, made there if it is
    missing."""
    return _made(models / f"random-tiny-moe-v{_VERSION}-seed{seed}", _MOE_CONFIG, seed)


def _made(destination: Path, config: dict[str, Any], seed: int) -> Path:
    if destination.is_dir():
        return destination
    with new_directory(destination) as content:
        _write_weights(content / "model.safetensors", config, seed)
        _write_tokenizer(content)
        _write_json(content / "config.json", config)
        ids = {key: _CONFIG[key] for key in ("bos_token_id", "eos_token_id")}
        _write_json(content / "generation_config.json", ids)
    return destination


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Write normal weights: with variance 1 / fan-in activations stay near unit size, so that every layer
    matters."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.Generator(np.random.PCG64(seed))
    tensors = {}
    for name, shape in _shapes(config):
        if len(shape) == 1:
            tensors[name] = np.ones(shape, dtype=np.float32)
            continue
        scale = 1.0 if "embed_tokens" in name else shape[1] ** -0.5
        tensors[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    save_file(tensors, str(path), metadata={"format": "pt"})


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if "num_experts" not in config:
            yield from _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            inner = config["moe_intermediate_size"]
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "pad_token": _EOS,
            "model_max_length": _CONFIG["max_position_embeddings"],
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
