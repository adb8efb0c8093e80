"""Qwen3-Next and Qwen3.5: layers with a gated delta rule between layers with attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig, DeltaRuleConfig, LayerConfig
from nbengine.models.configs.hf_config import positive
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.families.qwen import experts_of
from nbengine.models.families.recurrent_layers import check_activation
from nbengine.models.families.text_part import TextPart

_RECURRENT, _FULL = "linear_attention", "full_attention"
WHOLE_PROJECTIONS, TILED_VALUES = "nbengine_whole_projections", "nbengine_tiled_values"
"""The entries with which the configuration of a GGUF file says that it has the projections of recurrent layers for
all key heads in one, and that their output projection takes value heads in another order."""

_EVERYWHERE: Mapping[str, Any] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""The entries of Qwen 3.5 with experts, whatever a file says."""


class Qwen35(TextPart):
    """Qwen 3.5, dense; the text of the models with images, too."""

    title = "Qwen 3.5 (text)"
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
    }
    unused: tuple[str, ...] = (*TextPart.unused, "mtp.", "model.mtp.")
    by_head = False
    """True if the checkpoint has the projections of recurrent layers by key heads."""

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        rule = DeltaRuleConfig(
            key_heads=positive(hf, "linear_num_key_heads", 16),
            value_heads=positive(hf, "linear_num_value_heads", 32),
            key_dim=positive(hf, "linear_key_head_dim", 128),
            value_dim=positive(hf, "linear_value_head_dim", 128),
            kernel=positive(hf, "linear_conv_kernel_dim", 4),
            by_head=self.by_head and not hf.get(WHOLE_PROJECTIONS),
            tiled=bool(hf.get(TILED_VALUES)),
        )
        layers = _layers(hf, rule)
        check_activation(hf, layers)
        return {
            "norm_kind": "rms_one",
            "qk_norm": True,
            "attention_gate": True,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "layers": layers,
            "delta_rule": rule,
        }

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        rule = config.delta_rule
        assert rule is not None
        keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
        *_, block, tensor, _kind = ("", "", *name.split("."))
        if block != "linear_attn" or tensor not in ("in_proj_qkv", "conv1d"):
            yield from super().tensor_parts(config, name, shape)
            return
        stem = tensor.removesuffix("qkv") if tensor == "in_proj_qkv" else "conv1d_"
        projections = [(f"{stem}{part}", rows) for part, rows in (("q", keys), ("k", keys), ("v", values))]
        for stated, part in stacked_parts(name, shape, projections):
            yield self.our_name(stated), part


class Qwen35Moe(Qwen35):
    """Qwen 3.5 with experts."""

    title = "Qwen 3.5 MoE (text)"
    has_experts = True
    # No layer is without experts.
    defaults: Mapping[str, Any] = {**Qwen35.defaults, "num_key_value_heads": 2, "intermediate_size": 512}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        shared = positive(hf, "shared_expert_intermediate_size", 512)
        moe: MoEConfig = experts_of({**hf, **_EVERYWHERE}, 256, 8, 512, shared)
        return {**super().variant(hf), "moe": moe}


class Qwen3Next(Qwen35):
    """Qwen3-Next: with experts, and the projections of recurrent layers by key heads."""

    title = "Qwen3-Next"
    has_experts = True
    defaults: Mapping[str, Any] = {
        **Qwen35.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "norm_topk_prob": True,
    }
    by_head = True

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        shared = positive(hf, "shared_expert_intermediate_size", 512)
        return {**super().variant(hf), "moe": experts_of(hf, 512, 10, 512, shared)}

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        # The layers, which need torch, know these sizes.
        rule = config.delta_rule
        assert rule is not None
        values = rule.group * rule.value_dim
        by_tensor = {
            "in_proj_qkvz": (("q", rule.key_dim), ("k", rule.key_dim), ("v", values), ("z", values)),
            "in_proj_ba": (("b", rule.group), ("a", rule.group)),
        }
        parts = by_tensor.get(([*name.split("."), ""])[-3])
        if parts is None:
            yield from super().tensor_parts(config, name, shape)
            return
        heads = range(rule.key_heads)
        yield from stacked_parts(
            name, shape, [(f"in_proj_{p}.{h}", rows) for h in heads for p, rows in parts]
        )


def _layers(hf: Mapping[str, Any], rule: DeltaRuleConfig) -> tuple[LayerConfig, ...]:
    count, types = positive(hf, "num_hidden_layers"), hf.get("layer_types")
    if types is None:
        interval = positive(hf, "full_attention_interval", 4)
        types = [_FULL if (index + 1) % interval == 0 else _RECURRENT for index in range(count)]
    if not isinstance(types, list) or not set(types) <= {_FULL, _RECURRENT}:
        raise ModelLoadError(
            f"config.json: layer_types must be a list of {_FULL!r} and {_RECURRENT!r}, got {quoted(types)}"
        )
    recurrent = LayerConfig("recurrent", rule.state_bytes, rope=None)
    return tuple(recurrent if kind == _RECURRENT else LayerConfig() for kind in types)
