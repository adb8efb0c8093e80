"""The sizes of a decoder that runs through its transformers class, read from config.json. Free of torch and of
transformers."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig
from nbengine.models.configs.hf_config import CLASSIFIER, max_model_len_of, num_labels_of, positive

GENERATORS = ("ForCausalLM", "LMHeadModel")
"""The endings of the names of transformers' classes that generate text."""
TEXT_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", ("vision_model.", "multi_modal_projector.")),
}
"""The classes of models with images whose text runs: the class of the text alone, and the beginnings of the names of
tensors that are for images, which are not loaded."""
_KNOWN_ENDINGS = (*GENERATORS, CLASSIFIER, "ForMaskedLM")
_LAYER_TYPES = ("full_attention", "attention", "sliding_attention", "chunked_attention")
_STATES = {
    "mamba": "recurrent state (Mamba)",
    "mamba2": "recurrent state (Mamba)",
    "hybrid": "recurrent state (Mamba) beside attention",
    "linear_attention": "recurrent state (gated delta rule or linear attention)",
    "recurrent": "recurrent state",
    "conv": "short convolutions",
    "moe": "layers without attention",
    "mlp": "layers without attention",
}
"""The kinds of layers whose state the backend does not keep, in words."""
_FEATURES = {
    "is_encoder_decoder": "an encoder beside the decoder",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_bidirectional_attention": "attention to later tokens",
    "alibi": "scores with ALiBi",
    "quantization_config": "quantised weights",
}
"""Entries of config.json that, where they are set, ask for what the backend does not do."""
_WINDOW_EVERYWHERE = ("Starcoder2", "Phimoe")
"""The beginnings of the names of classes whose `sliding_window` is that of all layers, without `layer_types`."""


@dataclass(frozen=True)
class TransformersConfig(DecoderConfig):
    """The sizes of a decoder that runs through the class `architecture` of transformers, as every part of the
    engine asks for them.

    `hf` is all of config.json, of which the class makes its layers. Entries of `DecoderConfig` that describe what is
    inside of a layer say nothing here.
    """

    architecture: str = ""
    hf: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hf_json(self) -> str:
        """Return `hf` as text: the key under which findings about a class are kept."""
        return json.dumps(dict(self.hf), sort_keys=True)


def transformers_config(hf: Mapping[str, Any]) -> TransformersConfig:
    """Map a Hugging Face configuration (`load_hf_config`) to the backend's.

    Raises:
        ModelLoadError: the model needs what the backend does not do, and the message names it; or a value is
            missing or wrong.
    """
    missing = missing_feature(hf)
    if missing is not None:
        names = ", ".join(map(str, hf.get("architectures") or ())) or "a model without architectures"
        raise ModelLoadError(f"{names} cannot run through transformers: it has {missing}")
    heads = positive(hf, "num_attention_heads")
    hidden_size = positive(hf, "hidden_size")
    num_layers = positive(hf, "num_hidden_layers")
    return TransformersConfig(
        architecture=_architecture(hf) or "",
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=positive(hf, "word_embed_proj_dim", hidden_size),
        intermediate_size=positive(hf, "intermediate_size", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(hf, heads),
        head_dim=_head_dim(hf, max(1, hidden_size // heads)),
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=max_model_len_of(hf),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        layers=_layers(hf, num_layers),
        num_labels=num_labels_of(hf),
        hf=_of_text(hf),
    )


def unused_tensors(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors that a checkpoint may have and its text does not use."""
    parts = [TEXT_PARTS[name] for name in map(str, hf.get("architectures") or ()) if name in TEXT_PARTS]
    return parts[0][1] if parts else ()


def _of_text(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a model's text alone."""
    text = hf.get("text_config")
    if not unused_tensors(hf) or not isinstance(text, Mapping):
        return hf
    kept = {key: value for key, value in hf.items() if key not in ("text_config", "vision_config")}
    return {**kept, "model_type": text.get("model_type", hf.get("model_type"))}


def missing_feature(hf: Mapping[str, Any]) -> str | None:
    """Return what a configuration asks for that the transformers backend does not do, in words; None: config.json
    asks for nothing of the kind, and only the class can tell more."""
    name, known = _architecture(hf), architectures_of_transformers()
    if name is None:
        return f"no class ...{' or ...'.join((*GENERATORS, CLASSIFIER))} among its architectures"
    for key, words in _FEATURES.items():
        if hf.get(key):
            return f"{words} ({key})"
    for kind in hf.get("layer_types") or hf.get("layers_block_type") or ():
        if kind not in _LAYER_TYPES:
            return f"{_STATES.get(str(kind), 'layers of an unknown kind')} (layer type {kind!r})"
    if known is None or name in known:
        return None
    if hf.get("auto_map"):
        return f"code of its own beside the weights (trust_remote_code), which is never run ({name})"
    return f"a class that transformers {metadata.version('transformers')} does not have ({name})"


@cache
def architectures_of_transformers() -> frozenset[str] | None:
    """Return the names of transformers' classes that generate text, classify it or fill in masked tokens; None: they
    cannot be told.

    They are read from its source: an import takes seconds, and this is asked in notebooks and hosts, too.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        source = path.read_text(encoding="utf-8")
    except OSError:
        return None
    return frozenset(re.findall(rf'"(\w+(?:{"|".join(_KNOWN_ENDINGS)}))"', source)) or None


def _architecture(hf: Mapping[str, Any]) -> str | None:
    names = [TEXT_PARTS.get(name, (name,))[0] for name in map(str, hf.get("architectures") or ())]
    return next((name for name in names if name.endswith((*GENERATORS, CLASSIFIER))), None)


def _layers(hf: Mapping[str, Any], num_layers: int) -> tuple[LayerConfig, ...]:
    """Return which keys each layer's queries see; empty: all before them, as far as config.json says."""
    types = hf.get("layer_types")
    if not types and hf.get("sliding_window") and (_architecture(hf) or "").startswith(_WINDOW_EVERYWHERE):
        types = ["sliding_attention"] * num_layers
    if not types or set(types) <= {"full_attention", "attention"}:
        return ()
    kinds = {
        "sliding_attention": ("window", "sliding_window"),
        "chunked_attention": ("chunk", "attention_chunk_size"),
    }
    found = []
    for each in types[:num_layers]:
        kind, key = kinds.get(each, ("full", ""))
        found.append(LayerConfig(kind, positive(hf, key) if key else 0))  # type: ignore[arg-type]
    return tuple(found)


def _num_kv_heads(hf: Mapping[str, Any], heads: int) -> int:
    if hf.get("multi_query"):
        return 1
    # Latent attention, not compressed, has a key for each head.
    return heads if hf.get("qk_nope_head_dim") is not None else positive(hf, "num_key_value_heads", heads)


def _head_dim(hf: Mapping[str, Any], default: int) -> int:
    """Return the numbers in a head of a key; latent attention puts it together from two parts."""
    if hf.get("qk_nope_head_dim") is not None:
        return positive(hf, "qk_nope_head_dim") + positive(hf, "qk_rope_head_dim")
    return positive(hf, "head_dim", default)
