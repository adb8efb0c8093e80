"""This module says which feature is missing for a model that does not run; it is free of torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nbengine.errors import did_you_mean, shown

_RECURRENT = "recurrent layers ({}), which nbengine has for other architectures only"
_ABSENT = "{}, which nbengine does not have"
_OF_LAYER_TYPES = {
    "linear_attention": _RECURRENT.format("gated delta rule or linear attention"),
    "mamba": _RECURRENT.format("Mamba"),
    "conv": _RECURRENT.format("short convolutions"),
    "recurrent": _RECURRENT.format("RG-LRU"),
    "chunked_attention": "attention in chunks, which nbengine has for other architectures only",
}
_OF_KEYS = {
    "index_topk": _ABSENT.format("attention to the tokens that an indexer chooses"),
    "mamba_d_state": _RECURRENT.format("Mamba"),
    "state_size": _RECURRENT.format("Mamba"),
    "ssm_cfg": _RECURRENT.format("Mamba"),
    "vision_config": _ABSENT.format("images or other inputs beside text"),
    "audio_config": _ABSENT.format("sound as an input"),
}


def why_unsupported(hf: Mapping[str, Any], known: Collection[str]) -> str:
    """Return the message for a configuration whose architecture is none of `known`."""
    names = [str(name) for name in hf.get("architectures") or ()]
    if not names:
        return "config.json has no architectures, so that it is unknown what model it is; hf_overrides can name one"
    missing = _missing(hf)
    feature = f"; it needs {missing}" if missing else ""
    near = did_you_mean(names[0], known)
    return (
        f"architecture {shown(', '.join(names))} is not supported{feature}{near}. These run: "
        f"{', '.join(sorted(name.removesuffix('ForCausalLM') for name in known))} (`%engine models` says more), and BERT's "
        "encoders; nbengine.register_model adds one of your own"
    )


def _missing(hf: Mapping[str, Any]) -> str:
    if hf.get("is_encoder_decoder"):
        return _ABSENT.format("an encoder and a decoder in one model")
    types = hf.get("layer_types")
    for kind in types if isinstance(types, list) else ():
        if kind in _OF_LAYER_TYPES:
            return _OF_LAYER_TYPES[kind]
    return next((feature for key, feature in _OF_KEYS.items() if hf.get(key) is not None), "")
