"""Mamba-2, whose layers have nothing but a state, and Bamba, which has attention in some layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig, LayerNorms
from nbengine.models.configs.hf_config import number, positive
from nbengine.models.families.granite_hybrid import stacked_state_space, state_space
from nbengine.models.families.recurrent_layers import check_activation, layers_with_state
from nbengine.models.family import DecoderFamily

_STATE, _ATTENTION = "linear_attention", "full_attention"
_LONGEST = 131_072
"""Tokens of the longest sequence where nothing is said: a state takes as much memory after any number of tokens."""
_MAMBA2_NAMES = {
    "mamba_n_heads": ("num_heads", 128),
    "mamba_d_head": ("head_dim", 64),
    "mamba_d_state": ("state_size", 128),
    "mamba_d_conv": ("conv_kernel", 4),
    "mamba_n_groups": ("n_groups", 8),
    "mamba_expand": ("expand", 2),
}
"""The names of sizes in other models' configurations, those of Mamba-2, and what transformers assumes."""


class Bamba(DecoderFamily):
    """Bamba; the blocks with a state are those of Granite 4."""

    title = "Bamba"
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    }

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; half of a head turns unless what is said of the rotary embedding is otherwise."""
        return super().config({**hf, "partial_rotary_factor": 0.5})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        space, bias = state_space(hf), bool(hf.get("attention_bias", False))
        types = _types(hf)
        layers = layers_with_state(types, [_STATE], [_ATTENTION], state_bytes=space.state_bytes)
        check_activation(hf, layers)
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            "norms": LayerNorms("input_layernorm", None, "pre_ff_layernorm", None),
            "layers": layers,
            "mamba2": space if _STATE in types else None,
        }

    def our_name(self, name: str) -> str:
        """Files have other names for two blocks and the last norm."""
        name = name.replace(".feed_forward.", ".mlp.", 1).replace(".mamba.", ".linear_attn.", 1)
        return name.replace("model.final_layernorm.", "model.norm.", 1)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        *_, tensor, _kind = ("", *name.split("."))
        stacked = None if config.mamba2 is None else stacked_state_space(config.mamba2).get(tensor)
        if stacked is None:
            yield from super().tensor_parts(config, name, shape)
            return
        for stated, part in stacked_parts(name, shape, stacked):
            yield self.our_name(stated), part


class Mamba2(Bamba):
    """Mamba-2: there are neither attention nor feed-forward blocks."""

    title = "Mamba-2"
    turns_parts = False
    defaults: Mapping[str, Any] = {"max_position_embeddings": _LONGEST, "layer_norm_epsilon": 1e-5}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; a head with a state takes the place of one with keys and values."""
        heads = positive(hf, "num_heads", 128)
        stated = {
            **hf,
            **{usual: positive(hf, name, default) for usual, (name, default) in _MAMBA2_NAMES.items()},
            "mamba_proj_bias": hf.get("use_bias"),
            "mamba_conv_bias": hf.get("use_conv_bias"),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": number({**self.defaults, **hf}, "layer_norm_epsilon", 1e-5),
            # Nothing is turned, and there are no inner features; see `variant`.
            "head_dim": 2,
            "intermediate_size": 1,
        }
        return super().config(stated)

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        space = state_space(hf)
        types = [_STATE] * positive(hf, "num_hidden_layers")
        layers = layers_with_state(types, [_STATE], [], state_bytes=space.state_bytes)
        check_activation(hf, layers)
        return {
            "intermediate_size": 0,
            "norms": LayerNorms("norm", None, None, None),
            "layers": layers,
            "mamba2": space,
        }

    def our_name(self, name: str) -> str:
        """Files have other names for everything but the output projection; GGUF has those of `Bamba`."""
        name = super().our_name(name).replace("backbone.", "model.", 1).replace(".mixer.", ".linear_attn.", 1)
        for theirs in ("model.embeddings.", "model.embedding."):
            name = name.replace(theirs, "model.embed_tokens.", 1)
        return name.replace("model.norm_f.", "model.norm.", 1)


def _types(hf: Mapping[str, Any]) -> list[str]:
    count, indices = positive(hf, "num_hidden_layers"), hf.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not set(indices) <= set(range(count)):
        raise ModelLoadError(
            f"config.json: attn_layer_indices must be a list of numbers from 0 to {count - 1}, got {quoted(indices)}"
        )
    return [_ATTENTION if index in indices else _STATE for index in range(count)]
