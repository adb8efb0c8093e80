"""Llama 4, with and without experts: chunks in most layers, and layers without rotary embedding between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig, QueryGrowth
from nbengine.models.configs.hf_config import max_model_len_of, number, positive
from nbengine.models.configs.moe_config import GroupedRouting, MoEConfig
from nbengine.models.families.text_part import TextPart

_FULL, _CHUNKED = "full_attention", "chunked_attention"
_LAYERS = 48
_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


class Llama4(TextPart):
    """Llama 4 Scout and Maverick, the text of the models with images, too; MobileLLM-R1, which has no experts."""

    title = "Llama 4 (text); MobileLLM-R1"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
    }
    unused = (*TextPart.unused, "vision_model.")

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:
        """See `DecoderFamily.shares_experts`."""
        return bool(_layers_with_experts(hf))

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; null says that layers have no chunks."""
        return super().config({"attention_chunk_size": 8192, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        grows = bool(hf["attn_temperature_tuning"])
        return {
            "intermediate_size": positive(hf, "intermediate_size_mlp"),
            "attention_bias": bias,
            "attention_out_bias": bias,
            "turned_norm": bool(hf["use_qk_norm"]),
            "rotary_interleaved": True,
            "layers": _layers(hf),
            "query_growth": _growth(hf) if grows else None,
            "moe": _experts(hf),
        }

    def our_name(self, name: str) -> str:
        """Files call feed-forward blocks and routers otherwise."""
        ours = super().our_name(name).replace(".feed_forward.", ".mlp.", 1)
        return ours.replace(".mlp.router.", ".mlp.gate.", 1)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; the matrices of all experts in one have the inputs' features first."""
        if not self.our_name(name).endswith(_STACKED) or len(shape) != 3:
            yield from super().tensor_parts(config, name, shape)
            return
        turned = (shape[0], shape[2], shape[1])
        for ours, part in super().tensor_parts(config, name, turned):
            yield ours, replace(part, is_transposed=True)


def _layers(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Return which layers turn queries and keys, and which see the tokens of their chunk alone.

    Raises:
        ModelLoadError: no_rope_layers, layer_types or attention_chunk_size is wrong.
    """
    count, interval = positive(hf, "num_hidden_layers"), positive(hf, "no_rope_layer_interval", 4)
    turned = hf.get("no_rope_layers") or [int((index + 1) % interval > 0) for index in range(count)]
    if not isinstance(turned, list) or len(turned) < count:
        raise ModelLoadError(
            f"config.json: no_rope_layers must be a list of {count} numbers, got {quoted(turned)}"
        )
    types = hf.get("layer_types") or [_CHUNKED if each else _FULL for each in turned]
    if not isinstance(types, list) or len(types) < count or not set(types) <= {_FULL, _CHUNKED}:
        raise ModelLoadError(
            f"config.json: layer_types must be a list of {count} times {_FULL!r} or {_CHUNKED!r}, got {quoted(types)}"
        )
    chunk = 0 if hf.get("attention_chunk_size") is None else positive(hf, "attention_chunk_size")
    # A chunk that is as long as the longest sequence hides nothing.
    if not 0 < chunk < max_model_len_of(hf):
        types = [_FULL] * count
    return tuple(
        LayerConfig("chunk", chunk, rope) if kind == _CHUNKED else LayerConfig(rope=rope)
        for kind, rope in zip(types[:count], [0 if each else None for each in turned[:count]], strict=True)
    )


def _growth(hf: Mapping[str, Any]) -> QueryGrowth:
    return QueryGrowth(positive(hf, "floor_scale", 8192), number(hf, "attn_scale", 0.1))


def _layers_with_experts(hf: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers that have experts.

    Raises:
        ModelLoadError: moe_layers is no list of integers.
    """
    count, stated = positive(hf, "num_hidden_layers", _LAYERS), hf.get("moe_layers")
    if stated is None:
        step = positive(hf, "interleave_moe_layer_step", 1)
        return list(range(step - 1, count, step))
    if not isinstance(stated, list) or not all(isinstance(layer, int) for layer in stated):
        raise ModelLoadError(f"config.json: moe_layers must be a list of integers, got {quoted(stated)}")
    return [layer for layer in range(count) if layer in stated]


def _experts(hf: Mapping[str, Any]) -> MoEConfig | None:
    layers = _layers_with_experts(hf)
    if not layers:
        return None
    inner, count = positive(hf, "intermediate_size"), positive(hf, "num_hidden_layers")
    return MoEConfig(
        num_experts=positive(hf, "num_local_experts"),
        experts_per_token=positive(hf, "num_experts_per_tok"),
        intermediate_size=inner,
        renormalize=False,
        shared_intermediate_size=inner,
        dense_layers=tuple(layer for layer in range(count) if layer not in layers),
        shared_gate=False,
        routing=GroupedRouting("sigmoid"),
        weighs_inputs=True,
    )
