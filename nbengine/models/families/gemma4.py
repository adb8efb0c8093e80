"""Gemma 4, text: its configuration and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig, LayerConfig, LayerNorms
from nbengine.models.configs.hf_config import number, positive, stated_rope
from nbengine.models.configs.moe_config import NORMS_BESIDE, MoEConfig
from nbengine.models.configs.rope_config import Rope, rope_of
from nbengine.models.families.text_part import TextPart

if TYPE_CHECKING:
    from nbengine.models.causal_model import CausalModel, DecoderOptions

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_PERIOD = 6
_OF_KEYS = (".self_attn.k_proj.weight", ".self_attn.k_proj.bias")
_RENAMED: Mapping[str, str] = {
    ".layer_scalar.weight": ".layer_scalar",
    ".router.proj.": ".mlp.gate.",
    ".router.scale": ".mlp.router_norm.weight",
    ".router.per_expert_scale": ".mlp.expert_factors",
    ".mlp.gate.scale": ".mlp.router_norm.weight",
    ".mlp.experts.down_proj.scale": ".mlp.expert_factors",
    ".experts.gate_up_proj": ".mlp.experts.gate_up_proj",
    ".experts.down_proj": ".mlp.experts.down_proj",
}
_OWN_OF_SOURCES = tuple(f".self_attn.{name}" for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm."))


class Gemma4(TextPart):
    """Gemma 4, the text of the models with images and sound, too.

    Layers that see everything have larger heads than those with a window. In the small models (E2B, E4B) the last
    layers read the keys and values of others, and each layer has embeddings of its own; 26B-A4B has experts beside the
    dense block of each layer.
    """

    title = "Gemma 4 (text)"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    }
    unused: tuple[str, ...] = (
        *TextPart.unused,
        *(
            f"{before}{part}."
            for before in ("", "model.")
            for part in ("audio_tower", "embed_vision", "embed_audio")
        ),
    )

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:
        """See `Family.shares_experts`."""
        return bool(hf.get("enable_moe_block", False))

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; the rotary embeddings of full and window layers are stated apart."""
        stated = stated_rope(hf)
        ropes = {kind: stated.get(kind) or usual for kind, usual in _ROPES.items()}
        if not all(isinstance(each, Mapping) for each in ropes.values()):
            raise ModelLoadError(
                f"config.json: rope_parameters must have an object for each type of layer, got {quoted(stated)}"
            )
        full = rope_of(hf, ropes[_FULL], 1e6)
        return super().config({**hf, "rope_parameters": ropes[_SLIDING], "nbengine_full_rope": full})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        if hf.get("use_bidirectional_attention") == "all":
            raise ModelLoadError(
                "config.json: use_bidirectional_attention is not supported: decoders are causal"
            )
        full: Rope = hf["nbengine_full_rope"]
        types = _types(hf)
        head_dim, kv_heads = _full_sizes(hf, types)
        bias, inputs = bool(hf.get("attention_bias", False)), int(hf["hidden_size_per_layer_input"])
        cap, act = hf.get("final_logit_softcapping"), str(hf.get("hidden_activation") or "gelu_pytorch_tanh")
        moe = _experts(hf, act) if self.shares_experts(hf) else None
        return {
            "hidden_act": act,
            "moe": moe,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "norms": _NORMS if moe is None else replace(_NORMS, before_mlp=None),
            "qk_norm": True,
            "value_norm": True,
            "attention_scale": 1.0,
            "embedding_scale": math.sqrt(positive(hf, "hidden_size")),
            "logits_soft_cap": None if cap is None else number(hf, "final_logit_softcapping"),
            "other_ropes": (replace(full, size=head_dim),),
            "layers": _layers(hf, types, head_dim, kv_heads),
            "layer_inputs": inputs,
            "layer_input_tokens": positive(hf, "vocab_size_per_layer_input") if inputs else 0,
            "layer_scales": True,
        }

    def build(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> CausalModel:
        """See `Family.build`."""
        if config.num_labels:
            raise ModelLoadError("config.json: Gemma 4 with a classification head is not supported")
        from nbengine.models.families.gemma4_model import Gemma4ForCausalLM

        return Gemma4ForCausalLM(config, **options)

    def our_name(self, name: str) -> str:
        """See `DecoderFamily.our_name`; GGUF files have the scale of a layer as a weight, and those of the router
        and of its experts beside matrices."""
        name = super().our_name(name)
        for theirs, ours in _RENAMED.items():
            if theirs in name:
                return name.replace(theirs, ours)
        return name

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; files may have what layers with the keys and values of others do not use, and one
        matrix for keys and values."""
        for ours, part in super().tensor_parts(config, name, shape):
            number = ours.removeprefix("model.layers.").partition(".")[0]
            layer = config.layer(int(number)) if number.isdigit() else LayerConfig()
            if layer.source is not None and any(each in ours for each in _OWN_OF_SOURCES):
                continue
            before, _, last = ours.removesuffix(".weight").rpartition(".")
            if config.moe is not None and last in NORMS_BESIDE:
                ours = f"{before}.mlp.{last}.weight"
            yield ours, part
            if layer.values_of_keys and ours.endswith(_OF_KEYS):
                yield ours.replace(".k_proj.", ".v_proj."), part


def _experts(hf: Mapping[str, Any], act: str) -> MoEConfig:
    return MoEConfig(
        positive(hf, "num_experts"),
        positive(hf, "top_k_experts"),
        positive(hf, "moe_intermediate_size"),
        renormalize=True,
        hidden_act=ACTIVATIONS.get(act, act),
        beside_dense=True,
    )


def _full_sizes(hf: Mapping[str, Any], types: list[str]) -> tuple[int, int]:
    """Return the sizes of heads, and the key heads (0: those of the others), of layers that see everything: files of
    newer versions of transformers say them for each layer."""
    stated = hf.get("per_layer_config")
    if stated is None:
        has_own = hf.get("attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None
        kv_heads = positive(hf, "num_global_key_value_heads") if has_own else 0
        return positive(hf, "global_head_dim"), kv_heads
    if stated == {}:
        return positive(hf, "head_dim"), 0
    full = {str(index) for index, kind in enumerate(types) if kind == _FULL}
    entries = list(stated.values()) if isinstance(stated, Mapping) else []
    if not entries or set(stated) != full or any(each != entries[0] for each in entries):
        raise ModelLoadError(
            "config.json: per_layer_config must have the same entries for each layer that sees everything, and for no "
            f"other, got {quoted(stated)}"
        )
    sizes = dict(entries[0])
    kv_heads = sizes.pop("num_key_value_heads", None)
    sizes.pop("head_dim", None)
    if sizes:
        raise ModelLoadError(f"config.json: per_layer_config {quoted(entries[0])} is not supported")
    # Heads of the others' size are not said again.
    head_dim = positive(entries[0], "head_dim", positive(hf, "head_dim"))
    return head_dim, 0 if kv_heads is None else positive(entries[0], "num_key_value_heads")


def _layers(hf: Mapping[str, Any], types: list[str], head_dim: int, kv_heads: int) -> tuple[LayerConfig, ...]:
    window = positive(hf, "sliding_window")
    count, shared = len(types), int(hf.get("num_kv_shared_layers") or 0)
    first = count - shared
    sources = {kind: index for index, kind in enumerate(types[:first])}
    if not 0 <= shared < count or set(sources) != set(types):
        raise ModelLoadError(
            f"config.json: num_kv_shared_layers ({shared}) leaves no layer of each type whose keys and values others read"
        )
    is_wide = bool(hf.get("use_double_wide_mlp", False))
    full: dict[str, Any] = {
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "values_of_keys": bool(hf.get("attention_k_eq_v", False)),
    }
    return tuple(
        LayerConfig(
            "full" if kind == _FULL else "window",
            0 if kind == _FULL else window,
            rope=int(kind == _FULL),
            inner=2 * positive(hf, "intermediate_size") if is_wide and index >= first else 0,
            source=sources[kind] if index >= first else None,
            **(full if kind == _FULL else {}),
        )
        for index, kind in enumerate(types)
    )


def _types(hf: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer; the last one always sees everything."""
    count, stated = positive(hf, "num_hidden_layers"), hf.get("layer_types")
    if stated is None:
        stated = [_SLIDING if (index + 1) % _PERIOD else _FULL for index in range(count)]
    if not isinstance(stated, list) or len(stated) != count or not set(stated) <= {_FULL, _SLIDING}:
        raise ModelLoadError(
            f"config.json: layer_types must be a list of {count} times {_FULL!r} or {_SLIDING!r}, got {quoted(stated)}"
        )
    return [*stated[:-1], _FULL]
