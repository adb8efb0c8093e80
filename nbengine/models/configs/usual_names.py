"""The sizes of a model under the names that most configurations give them; free of torch and of transformers."""

from __future__ import annotations

from typing import Any

OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
        "context_length",
    ),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""The usual name of each size, and those that some classes of transformers give it (their `attribute_map`)."""


def with_usual_names(stated: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the sizes that it states under another name under their usual names, too."""
    found = dict(stated)
    for usual, others in OTHER_NAMES.items():
        if found.get(usual) is None:
            value = next((stated[name] for name in others if stated.get(name) is not None), None)
            if value is not None:
                found[usual] = value
    return found
